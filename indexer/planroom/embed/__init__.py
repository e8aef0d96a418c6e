"""Turn texts into vectors: built in, in a model of our own process, or over the network.

The one idea: the vector of a text depends on that text and the embedder's `identity` alone, never
on its batch, machine or neighbours. That is what lets a batch be embedded again after a crash, and
a vector be copied from an earlier version of the same document.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from planroom.embed.embedder import LOCAL, Embedder, EmbeddingInvalid, no_abort

if TYPE_CHECKING:
    from planroom.config import Settings

__all__ = ["LOCAL", "Embedder", "EmbeddingInvalid", "name_of", "no_abort", "open_embedder"]


def name_of(identity: str) -> str:
    """What `settings.embedder` calls the embedder with this identity."""
    return identity.partition("/")[0]


def open_embedder(settings: Settings, name: str | None = None) -> Embedder:
    """Open the embedder that `settings` names, or `name`: static, hashing, openai or minilm.

    Loads the model of a local one (0.2 s for static); `openai` makes no request. The key of
    `openai` is `settings.openai_api_key` or else OPENAI_API_KEY in the environment. Raises
    `PlanroomError` where the embedder cannot be used here, and ValueError for an unknown name.
    """
    # Each is imported where it is chosen, so that no command waits for a model it does not use.
    match name or settings.embedder:
        case "static":
            from planroom.embed.static import StaticEmbedder

            return StaticEmbedder()
        case "hashing":
            from planroom.embed.hashing import HashingEmbedder

            return HashingEmbedder()
        case "openai":
            from planroom.embed.openai import OpenAIEmbedder

            key = settings.openai_api_key
            return OpenAIEmbedder(
                base_url=settings.openai_base_url,
                model=settings.openai_model,
                dimensions=settings.openai_dimensions,
                api_key=key.get_secret_value() if key else os.environ.get("OPENAI_API_KEY"),
                timeout_seconds=settings.openai_timeout_seconds,
            )
        case "minilm":
            from planroom.embed.minilm import MiniLMEmbedder

            return MiniLMEmbedder()
        case unknown:
            raise ValueError(f"no embedder is called {unknown!r}")
