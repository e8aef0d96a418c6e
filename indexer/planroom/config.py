"""Settings: `PLANROOM_*` in the environment, or in a `.env` file where the command runs.

One class, read once by whoever wires things together and passed down as a value; nothing below
the command line reads the environment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 1024 * 1024


def default_home() -> Path:
    """Where data lives: root gets a folder that the database's own user can enter."""
    if os.geteuid() == 0:
        return Path("/var/lib/planroom")
    data = os.environ.get("XDG_DATA_HOME") or str(Path("~/.local/share").expanduser())
    return Path(data) / "planroom"


class Settings(BaseSettings):
    """Everything that can be set, with its default. The README's table is made from this."""

    model_config = SettingsConfigDict(
        env_prefix="PLANROOM_", env_file=".env", env_file_encoding="utf-8", extra="ignore"
    )

    home: Path = Field(
        default_factory=default_home, description="Folder of the embedded database and the blobs."
    )
    database_url: SecretStr | None = Field(
        default=None, description="A Postgres server of your own; unset: the embedded one."
    )
    workspace: str = Field(default="default", min_length=1, description="The tenant to work in.")
    project: str = Field(default="default", min_length=1, description="The project to work in.")

    embedder: Literal["static", "hashing", "openai", "minilm"] = Field(
        default="static", description="What turns chunks into vectors."
    )
    openai_base_url: str = Field(
        default="https://api.openai.com/v1", description="Any OpenAI-compatible endpoint."
    )
    openai_model: str = Field(default="text-embedding-3-small", description="Its embedding model.")
    openai_dimensions: int = Field(default=1536, ge=1, le=4000, description="Its vector length.")
    openai_api_key: SecretStr | None = Field(
        default=None, description="Its key; OPENAI_API_KEY is read too. Never stored or logged."
    )
    openai_timeout_seconds: float = Field(
        default=60.0, gt=0, description="Longest wait for one answer."
    )

    chunk_tokens: int = Field(default=256, ge=16, le=8191, description="Most tokens in a chunk.")
    chunk_overlap: int = Field(
        default=32, ge=0, description="Tokens repeated from the chunk before."
    )
    batch_units: int = Field(
        default=200, ge=1, le=2000, description="Chunks embedded and committed together."
    )
    page_group: int = Field(
        default=8, ge=1, le=100, description="Most pages read and not yet committed."
    )

    file_bytes_max: int = Field(default=4096 * MIB, gt=0, description="Largest file, in bytes.")
    pages_max: int = Field(default=20_000, gt=0, description="Most pages in a file.")
    chunks_max: int = Field(default=2_000_000, gt=0, description="Most chunks in a file.")
    extract_memory_bytes: int = Field(
        default=1536 * MIB, ge=256 * MIB, description="Address space of the child that reads pages."
    )
    page_seconds: float = Field(
        default=60.0,
        gt=0,
        description="Processor seconds a page may take (four times that by the clock).",
    )

    lease_seconds: float = Field(default=120.0, gt=0, description="Length of a lease.")
    poll_seconds: float = Field(default=2.0, gt=0, description="Longest wait between two polls.")
    retention_days: int = Field(default=90, ge=1, description="How long finished runs are kept.")
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="`auto` is colours in a terminal, JSON otherwise."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe line that is logged."
    )

    @model_validator(mode="after")
    def _overlap_is_less_than_the_chunk(self) -> Settings:
        if self.chunk_overlap * 2 > self.chunk_tokens:
            raise ValueError("chunk_overlap must be at most half of chunk_tokens")
        return self
