"""The default: WordLlama's static token vectors, which come inside its wheel.

The vector of a text is the sum of the vectors of its tokens, scaled to length 1. The weights are
16-bit floats, all below 2**4 and multiples of 2**-24, so a sum of fewer than 2**24 of them is
exact in 64 bits: the order cannot matter, and every machine finds the same bits in any batch.

The files are read directly. Importing the `wordllama` module would configure the root logger of
the whole process, and its own pooling pads each text to the longest of its batch.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load
from tokenizers import Tokenizer

from planroom.embed.embedder import no_abort, unit_vector
from planroom.errors import PlanroomError

VERSION = 1
MODEL = "l2_supercat"
DIMENSIONS = 256


class StaticEmbedder:
    """WordLlama `l2_supercat`, 256 dimensions, in lower case.

    Drawings are lettered in capitals and questions are not, and the model takes a word in
    capitals for other tokens: on 16 drawing titles in capitals asked for in ordinary words, lower
    case on both sides raised the mean reciprocal rank from 0.47 to 0.97. White space is
    collapsed, because where a line happens to end says nothing of what it means.
    """

    dimensions = DIMENSIONS

    def __init__(self) -> None:
        folder = _package_folder()
        weights = (folder / "weights" / f"{MODEL}_{DIMENSIONS}.safetensors").read_bytes()
        words = (folder / "tokenizers" / f"{MODEL}_tokenizer_config.json").read_bytes()
        digest = hashlib.sha256(hashlib.sha256(weights).digest() + hashlib.sha256(words).digest())
        self.identity = (
            f"static/{VERSION} wordllama:{MODEL} {DIMENSIONS} sha256:{digest.hexdigest()[:16]}"
        )
        # Kept as 32 bits: twice the memory of 16, and twice as fast to gather.
        self._table = load(weights)["embedding.weight"].astype(np.float32)
        self._tokenizer = Tokenizer.from_str(words.decode())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # A "</s>" that is lettered on a sheet is text, not an end.
        self._tokenizer.encode_special_tokens = True

    def embed(
        self, texts: Sequence[str], abort: Callable[[], None] = no_abort
    ) -> NDArray[np.float32]:
        """Embed `texts`; see `Embedder.embed`."""
        rows = np.empty((len(texts), DIMENSIONS), dtype=np.float32)
        for at, text in enumerate(texts):
            abort()
            rows[at] = unit_vector(self._sum(text))
        return rows

    def close(self) -> None:
        """Nothing but memory is held."""

    def _sum(self, text: str) -> NDArray[np.float64]:
        """The sum of the vectors of the tokens of `text`, shape (256,); zero where it has none."""
        # A query typed in a terminal may hold lone surrogates, which the tokeniser refuses.
        whole = text.encode(errors="replace").decode()
        plain = " ".join(whole.lower().split())
        if not plain:
            return np.zeros(DIMENSIONS)
        # One text at a time: a batch would start a pool of threads, which warns at every fork.
        tokens = self._tokenizer.encode(plain, add_special_tokens=False).ids
        return self._table[tokens].sum(axis=0, dtype=np.float64)


def _package_folder() -> Path:
    """Where the `wordllama` package is, without importing it."""
    found = importlib.util.find_spec("wordllama")
    if found is None or found.origin is None:
        raise PlanroomError(
            "the built-in embedding model is not installed",
            code="embedder_missing",
            hint="pip install wordllama",
        )
    return Path(found.origin).parent
