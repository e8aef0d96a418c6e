"""What every embedder promises, and the arithmetic that they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planroom.errors import DocumentFailed


def no_abort() -> None:
    """The `abort` of a caller that never gives up."""


LOCAL = frozenset({"static", "hashing", "minilm"})
"""The embedders that send no text to another machine."""


class Embedder(Protocol):
    """Turns texts into unit vectors.

    `identity` names all that decides the vectors (kind, our version, model, dimensions, and for a
    local model the digest of its files; never an address or a key): it is part of the fingerprint,
    and vectors of two identities are never compared.
    """

    @property
    def identity(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    def embed(
        self, texts: Sequence[str], abort: Callable[[], None] = no_abort
    ) -> NDArray[np.float32]:
        """Embed `texts`: shape (len(texts), dimensions), row i for `texts[i]`.

        Rows are finite and of length 1. A text without anything to embed, such as an empty one,
        is the first unit vector. `abort` is called often, from the calling thread, and may raise;
        then nothing is returned. Raises `DocumentFailed` (`EmbeddingInvalid` where one text is
        at fault) and `leasequeue.Retryable`.
        """
        ...

    def close(self) -> None:
        """Give back what it holds. It cannot be used afterwards."""
        ...


class EmbeddingInvalid(DocumentFailed):
    """The service answered with something that cannot be stored, so the whole batch is refused.

    `position` is the place in the batch of the text at fault, or None where it is no single one.
    """

    code = "embedding_invalid"

    def __init__(
        self, message: str, *, position: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.position = position


def unit_vector(vector: NDArray[np.float64]) -> NDArray[np.float32]:
    """Scale a finite `vector` to length 1, to the same bits on every machine.

    Only operations that IEEE 754 rounds in one way are used: no BLAS, whose sums depend on the
    processor. A zero vector has no direction and becomes the first unit vector.
    """
    largest = float(np.max(np.abs(vector)))
    if largest == 0.0:
        first = np.zeros(len(vector), dtype=np.float32)
        first[0] = 1.0
        return first
    # Scaled first, the squares can neither overflow nor all vanish.
    scaled = vector / largest
    length = math.sqrt(math.fsum((scaled * scaled).tolist()))
    return (scaled / length).astype(np.float32)
