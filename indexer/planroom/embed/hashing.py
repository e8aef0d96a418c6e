"""Vectors without a model: signed feature hashing of words and parts of words.

For tests, and for machines where nothing else runs. It finds the same words and their
neighbours in spelling; it knows nothing of meaning.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planroom.embed.embedder import no_abort, unit_vector

VERSION = 1
DIMENSIONS = 256
_WORD = re.compile(r"\w+")
_PART_CHARS = 3
_WHOLE_WORD_WEIGHT = 2


class HashingEmbedder:
    """Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning".

    The features of a text are its words, its pairs of adjacent words, and each word's trigrams.
    Each is hashed to one of 256 columns and a sign; counts are whole numbers, so their sums are
    exact in any order.
    """

    identity = f"hashing/{VERSION} blake2b {DIMENSIONS}"
    dimensions = DIMENSIONS

    def embed(
        self, texts: Sequence[str], abort: Callable[[], None] = no_abort
    ) -> NDArray[np.float32]:
        """Embed `texts`; see `Embedder.embed`."""
        rows = np.empty((len(texts), DIMENSIONS), dtype=np.float32)
        for at, text in enumerate(texts):
            abort()
            rows[at] = unit_vector(_counts(text))
        return rows

    def close(self) -> None:
        """Nothing is held."""


def _counts(text: str) -> NDArray[np.float64]:
    """The signed feature counts of `text`, shape (256,)."""
    words: list[str] = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    if not words:
        return np.zeros(DIMENSIONS)
    features = [_word_features(word) for word in words]
    features += [_feature(f"pair {one} {other}") for one, other in pairwise(words)]
    flat = np.array([part for feature in features for part in feature], dtype=np.int64)
    # The sign travels in the lowest bit of the column's number.
    signs = 1.0 - 2.0 * (flat & 1)
    return np.bincount(flat >> 1, weights=signs, minlength=DIMENSIONS).astype(np.float64)


@functools.lru_cache(maxsize=65_536)
def _word_features(word: str) -> tuple[int, ...]:
    """The word itself, weighted, and its trigrams, with its ends marked."""
    marked = f"<{word}>"
    trigrams = [marked[at : at + _PART_CHARS] for at in range(len(marked) - _PART_CHARS + 1)]
    features = _feature(f"word {word}") * _WHOLE_WORD_WEIGHT
    return features + tuple(part for trigram in trigrams for part in _feature(f"part {trigram}"))


@functools.lru_cache(maxsize=65_536)
def _feature(name: str) -> tuple[int, ...]:
    """Where a feature is counted: its column times two, plus one when it counts negatively."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") % (2 * DIMENSIONS),)
