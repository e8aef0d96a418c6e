"""The OpenAI embedder against a real HTTP server that misbehaves on command."""

from __future__ import annotations

import logging
import random
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from leasequeue import Retryable
from planroom.chunk import count_tokens
from planroom.config import Settings
from planroom.embed import EmbeddingInvalid, open_embedder
from planroom.embed.openai import OpenAIEmbedder
from planroom.errors import DocumentFailed, PlanroomError
from support.embedding_server import (
    EmbeddingServer,
    Fault,
    Kind,
    failing,
    rate_limited,
    text_key,
    vector_of,
)

DIMENSIONS = 64
KEY = "sk-planroom+test/0123456789=abcdef"
TEXTS = [f"NOTE {number}: SEE A-{number}" for number in range(7)]
Make = Callable[..., OpenAIEmbedder]


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(DIMENSIONS) as running:
        yield running


@pytest.fixture
def waits() -> list[float]:
    """What the embedder under test has waited for; no time passes."""
    return []


@pytest.fixture
def make(server: EmbeddingServer, waits: list[float]) -> Iterator[Make]:
    made: list[OpenAIEmbedder] = []

    def _make(**options: object) -> OpenAIEmbedder:
        arguments: dict[str, object] = {
            "base_url": server.url,
            "model": "text-embedding-test",
            "dimensions": DIMENSIONS,
            "api_key": KEY,
            "wait": waits.append,
            "chance": random.Random(1),
            **options,
        }
        embedder = OpenAIEmbedder(**arguments)  # pyright: ignore[reportArgumentType]
        made.append(embedder)
        return embedder

    yield _make
    for embedder in made:
        embedder.close()


def _expected(texts: list[str]) -> list[list[float]]:
    return [list(vector_of(text, DIMENSIONS)) for text in texts]


def test_each_row_is_the_unit_vector_of_its_text(make: Make, server: EmbeddingServer) -> None:
    rows = make().embed(TEXTS)
    assert rows.dtype == np.float32
    assert np.allclose(rows, _expected(TEXTS), atol=1e-6)
    (request,) = server.received
    assert request.path == "/v1/embeddings"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.body == {
        "model": "text-embedding-test",
        "input": TEXTS,
        "encoding_format": "float",
        "dimensions": DIMENSIONS,
    }
    assert server.embedded == len(TEXTS)
    assert server.counts[text_key(TEXTS[3])] == 1


def test_the_settings_open_it_and_the_key_may_come_from_the_environment(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    values = {"embedder": "openai", "openai_base_url": server.url, "openai_dimensions": 64}
    for key, sent in ((None, "sk-environment"), ("sk-settings", "sk-settings")):
        settings = Settings.model_validate({**values, "openai_api_key": key})
        opened = open_embedder(settings)
        opened.embed(["A-101"])
        opened.close()
        assert server.received[-1].headers["authorization"] == f"Bearer {sent}"


def test_the_identity_names_neither_the_address_nor_the_key(make: Make) -> None:
    assert make().identity == make(base_url="http://other.test/v1", api_key="other").identity
    assert make().identity != make(model="other").identity
    assert make().identity != make(dimensions=32).identity


def test_no_key_sends_no_header(make: Make, server: EmbeddingServer) -> None:
    make(api_key=None).embed(["A-101"])
    assert "authorization" not in server.received[0].headers


def test_blank_texts_are_not_sent_and_have_a_vector_all_the_same(
    make: Make, server: EmbeddingServer
) -> None:
    rows = make().embed(["", "A-101", " \n"])
    assert server.received[0].texts == ["A-101"]
    assert rows[0, 0] == rows[2, 0] == 1.0
    assert np.allclose(rows[1], _expected(["A-101"])[0], atol=1e-6)
    assert make().embed([]).shape == (0, DIMENSIONS)
    assert server.requests == 1


def test_a_query_string_in_the_address_is_kept(make: Make, server: EmbeddingServer) -> None:
    make(base_url=f"{server.url}/?api-version=2").embed(["A-101"])
    assert server.received[0].path == "/v1/embeddings?api-version=2"


# --- D14: the size of a request


@pytest.mark.parametrize(
    "text",
    ["ᚠᛇᚻ᛫" * 500, "語言 文字 圖紙 " * 300, "a" * 6000, "GENERAL NOTES: VERIFY. " * 400],
    ids=["runes", "han", "one long word", "latin"],
)
def test_d14_requests_stay_below_the_limit_by_both_counts(
    text: str, make: Make, server: EmbeddingServer
) -> None:
    texts = [f"{number} {text}" for number in range(200)]
    rows = make().embed(texts)
    for request in server.received:
        assert sum(map(count_tokens, request.texts)) < 300_000
        assert sum(len(sent.encode()) for sent in request.texts) / 4 < 300_000
    assert [sent for request in server.received for sent in request.texts] == texts
    assert np.allclose(
        rows[[0, 100, 199]], _expected([texts[at] for at in (0, 100, 199)]), atol=1e-6
    )
    assert server.embedded == 200


def test_d14_dense_text_is_split_and_sparse_text_is_not(
    make: Make, server: EmbeddingServer
) -> None:
    make().embed(["ᚠᛇᚻ᛫" * 500] * 200)
    assert server.requests > 1
    before = server.requests
    make().embed(TEXTS * 28)
    assert server.requests == before + 1


def test_d14_no_request_has_more_than_2048_inputs(make: Make, server: EmbeddingServer) -> None:
    make().embed([f"A-{number}" for number in range(2500)])
    assert [len(request.texts) for request in server.received] == [2048, 452]


def test_a_text_too_long_for_the_model_is_named_before_anything_is_sent_for_it(
    make: Make, server: EmbeddingServer
) -> None:
    with pytest.raises(EmbeddingInvalid, match="text 1 of the batch has") as caught:
        make().embed(["A-101", "note " * 9000])
    assert caught.value.position == 1
    assert caught.value.hint == "lower PLANROOM_CHUNK_TOKENS"
    assert server.requests == 0


# --- D15, D16: answers that cannot be stored


def test_d15_shuffled_answers_are_put_in_order(make: Make, server: EmbeddingServer) -> None:
    server.fail_next(Fault("shuffle"))
    assert np.allclose(make().embed(TEXTS), _expected(TEXTS), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "position", "says"),
    [
        ("count", 6, "6 embeddings for 7 texts for text 6"),
        ("extra", None, "no text that was sent"),
        ("duplicate", 0, "two embeddings for one text"),
        ("unnumbered", None, "no text that was sent"),
        ("dimension", 4, "63 dimensions where 64"),
        ("nan", 4, "not finite"),
        ("infinity", 4, "not finite"),
        ("zero", 4, "zero"),
        ("null", 4, "no number"),
        ("null_entry", 4, "no list of numbers"),
        ("html", None, "other than JSON"),
        ("truncated", None, "other than JSON"),
        ("huge", None, "more than .* bytes"),
    ],
)
def test_d15_d16_an_invalid_answer_fails_the_batch_and_names_the_chunk(
    kind: Kind, position: int | None, says: str, make: Make, server: EmbeddingServer
) -> None:
    server.fail_next(Fault(kind, position=4))
    with pytest.raises(EmbeddingInvalid, match=says) as caught:
        make().embed(TEXTS)
    assert caught.value.code == "embedding_invalid"
    assert caught.value.position == position
    assert caught.value.hint
    assert isinstance(caught.value, DocumentFailed)
    assert server.requests == 1


def test_d16_the_position_counts_from_the_start_of_the_batch_not_of_the_request(
    make: Make, server: EmbeddingServer
) -> None:
    server.fail_next(None, Fault("nan", position=3))
    with pytest.raises(EmbeddingInvalid, match="text 2051 of the batch") as caught:
        make().embed([f"A-{number}" for number in range(2100)])
    assert caught.value.position == 2051


# --- D13: a service that is busy


def test_d13_a_retry_after_in_seconds_is_waited_for_and_the_batch_stays_whole(
    make: Make, server: EmbeddingServer, waits: list[float]
) -> None:
    server.fail_next(rate_limited(17))
    rows = make().embed(TEXTS)
    assert 17 <= sum(waits) <= 17 * 1.2
    assert [len(request.texts) for request in server.received] == [7, 7]
    assert np.allclose(rows, _expected(TEXTS), atol=1e-6)


@pytest.mark.parametrize("clock_is_ahead", [timedelta(0), timedelta(minutes=10)])
def test_d13_a_retry_after_as_a_date_is_measured_by_the_services_clock(
    clock_is_ahead: timedelta, make: Make, server: EmbeddingServer, waits: list[float]
) -> None:
    server.fail_next(
        rate_limited("Tue, 01 Dec 2026 10:00:20 GMT", date="Tue, 01 Dec 2026 10:00:00 GMT")
    )
    here = datetime(2026, 12, 1, 10, 0, 0, tzinfo=UTC) + clock_is_ahead
    make(now=lambda: here).embed(TEXTS)
    assert 20 <= sum(waits) <= 24


def test_d13_earlier_requests_of_a_batch_are_not_sent_again(
    make: Make, server: EmbeddingServer
) -> None:
    server.fail_next(None, rate_limited(1))
    make().embed([f"A-{number}" for number in range(2100)])
    assert server.embedded == 2100
    assert max(server.counts.values()) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_a_busy_service_is_asked_again_after_a_while(
    status: int, make: Make, server: EmbeddingServer, waits: list[float]
) -> None:
    server.fail_next(failing(status))
    assert np.allclose(make().embed(TEXTS), _expected(TEXTS), atol=1e-6)
    assert 4 <= sum(waits) <= 6


@pytest.mark.parametrize("value", ["soon", "-5", "nan", "", "Tue, 99 Dec 2026 10:00:20 GMT"])
def test_a_retry_after_that_says_nothing_is_an_ordinary_wait(
    value: str, make: Make, server: EmbeddingServer, waits: list[float]
) -> None:
    server.fail_next(rate_limited(value))
    make().embed(TEXTS)
    assert 4 <= sum(waits) <= 6


@pytest.mark.parametrize("kind", ["drop", "refuse"])
def test_a_connection_that_ends_early_is_tried_again(
    kind: Kind, make: Make, server: EmbeddingServer
) -> None:
    server.fail_next(Fault(kind))
    assert np.allclose(make().embed(TEXTS), _expected(TEXTS), atol=1e-6)
    assert server.requests == 2


def test_patience_ends_in_a_requeue(
    make: Make, server: EmbeddingServer, waits: list[float]
) -> None:
    server.fail_next(failing(503), times=50)
    with pytest.raises(Retryable, match="HTTP 503") as caught:
        make().embed(TEXTS)
    assert caught.value.code == "embedder_busy"
    assert caught.value.retry_after is None
    assert sum(waits) <= 60
    assert server.requests == 3


def test_a_longer_wait_than_patience_is_handed_to_the_queue_at_once(
    make: Make, server: EmbeddingServer, waits: list[float]
) -> None:
    server.fail_next(rate_limited(3600))
    with pytest.raises(Retryable) as caught:
        make().embed(TEXTS)
    assert caught.value.retry_after == timedelta(hours=1)
    assert (waits, server.requests) == ([], 1)


def test_q23_workers_that_get_one_retry_after_do_not_return_in_lockstep(
    make: Make, server: EmbeddingServer, waits: list[float]
) -> None:
    moments: set[float] = set()
    for seed in range(10):
        waits.clear()
        server.fail_next(rate_limited(30))
        make(chance=random.Random(seed)).embed(["A-101"])
        assert sum(waits) >= 30
        moments.add(round(sum(waits), 3))
    assert len(moments) == 10


def test_a_server_that_is_not_there_is_a_requeue_that_says_so(make: Make) -> None:
    with EmbeddingServer(DIMENSIONS) as gone:
        url = gone.url
    with pytest.raises(Retryable, match="cannot be reached") as caught:
        make(base_url=url).embed(TEXTS)
    assert caught.value.code == "embedder_unreachable"
    assert caught.value.hint


def test_a_silent_server_times_out(make: Make, server: EmbeddingServer) -> None:
    server.fail_next(Fault("hang"))
    rows = make(timeout_seconds=0.2).embed(TEXTS)
    assert np.allclose(rows, _expected(TEXTS), atol=1e-6)
    assert server.requests == 2


class _StoppedError(Exception):
    pass


def test_an_abort_leaves_a_hanging_request_at_once(make: Make, server: EmbeddingServer) -> None:
    stop = threading.Event()

    def abort() -> None:
        if stop.is_set():
            raise _StoppedError

    def stop_when_it_hangs() -> None:
        server.wait_for_requests(1)
        stop.set()

    server.fail_next(Fault("hang"))
    watcher = threading.Thread(target=stop_when_it_hangs)
    watcher.start()
    with pytest.raises(_StoppedError):
        make().embed(TEXTS, abort)
    watcher.join()
    assert server.embedded == 0, "the server was still hanging when embed returned"


def test_an_abort_ends_a_wait(make: Make, server: EmbeddingServer, waits: list[float]) -> None:
    def abort() -> None:
        if len(waits) == 3:
            raise _StoppedError

    server.fail_next(rate_limited(30))
    with pytest.raises(_StoppedError):
        make().embed(TEXTS, abort)
    assert sum(waits) < 1
    assert server.requests == 1


# --- refusals, and the key


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (400, "PLANROOM_OPENAI_MODEL"),
        (401, "OPENAI_API_KEY"),
        (403, "rights"),
        (404, "PLANROOM_OPENAI_BASE_URL"),
        (413, "PLANROOM_OPENAI_MODEL"),
    ],
)
def test_a_refusal_repeats_the_services_sentence_and_says_what_to_do(
    status: int, hint: str, make: Make, server: EmbeddingServer, waits: list[float]
) -> None:
    server.fail_next(failing(status, "No such model, sorry."))
    with pytest.raises(DocumentFailed, match=f"HTTP {status}.: No such model, sorry") as caught:
        make().embed(TEXTS)
    assert caught.value.code == "embedder_refused"
    assert hint in (caught.value.hint or "")
    assert (waits, server.requests) == ([], 1)


def test_an_exhausted_quota_is_a_refusal_because_only_a_person_ends_it(
    make: Make, server: EmbeddingServer, waits: list[float]
) -> None:
    server.fail_next(failing(429, "You exceeded your current quota", "insufficient_quota"))
    with pytest.raises(DocumentFailed, match="exceeded your current quota") as caught:
        make().embed(TEXTS)
    assert caught.value.code == "embedder_refused"
    assert "add credit" in (caught.value.hint or "")
    assert waits == []


def test_a_model_of_one_fixed_length_is_asked_again_without_dimensions(
    make: Make, server: EmbeddingServer, waits: list[float]
) -> None:
    server.fail_next(failing(400, "Model does not support matryoshka representation"))
    embedder = make()
    embedder.embed(TEXTS)
    embedder.embed(TEXTS)
    assert ["dimensions" in request.body for request in server.received] == [True, False, False]
    assert waits == []


def test_a_service_that_goes_on_refusing_dimensions_is_not_asked_for_ever(
    make: Make, server: EmbeddingServer
) -> None:
    server.fail_next(failing(400, "dimensions"), times=5)
    with pytest.raises(DocumentFailed, match="dimensions"):
        make().embed(TEXTS)
    assert server.requests == 2


@pytest.mark.parametrize(
    "fault",
    [Fault("echo_key", status) for status in (400, 401, 404, 429, 500)]
    + [Fault("html", status) for status in (200, 401, 502)],
    ids=lambda fault: f"{fault.kind} {fault.status}",
)
def test_the_key_is_nowhere_even_when_the_service_repeats_it(
    fault: Fault, make: Make, server: EmbeddingServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.fail_next(fault, times=9)
    embedder = make()
    with pytest.raises((DocumentFailed, Retryable)) as caught:
        embedder.embed(TEXTS)
    error: BaseException | None = caught.value
    said = [caplog.text, repr(embedder), repr(vars(embedder)), *traceback.format_exception(error)]
    while error is not None:
        said += [str(error), repr(error), repr(vars(error)), repr(error.args)]
        error = error.__cause__ or error.__context__
    everything = "\n".join(said)
    for part in (KEY, KEY[:16], KEY[-12:]):
        assert part not in everything
    assert server.received[0].headers["authorization"].endswith(KEY), "the key was never sent"


def test_a_password_in_the_address_is_sent_and_not_shown(
    make: Make, server: EmbeddingServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    address = server.url.replace("http://", "http://reader:hunter2hunter2@")
    embedder = make(base_url=address, api_key=None)
    embedder.embed(["A-101"])
    server.fail_next(failing(401, "hunter2hunter2 is wrong"))
    with pytest.raises(DocumentFailed) as caught:
        embedder.embed(["A-101"])
    assert server.received[0].headers["authorization"].startswith("Basic ")
    assert "hunter2hunter2" not in caplog.text + str(caught.value) + repr(vars(embedder))


def test_a_redirect_is_not_followed_and_the_key_goes_nowhere(
    make: Make, server: EmbeddingServer
) -> None:
    with EmbeddingServer(DIMENSIONS) as elsewhere:
        server.fail_next(Fault("redirect", location=f"{elsewhere.url}/embeddings"))
        with pytest.raises(DocumentFailed, match="HTTP 307") as caught:
            make().embed(TEXTS)
        assert "redirects are not followed" in (caught.value.hint or "")
        assert elsewhere.requests == 0


@pytest.mark.parametrize("key", ["sk-line\nbreak", "sk-ümlaut", "sk blank"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(PlanroomError) as caught:
        OpenAIEmbedder(base_url="http://x.test", model="m", dimensions=1, api_key=key)
    assert key not in "".join(traceback.format_exception(caught.value))
    assert caught.value.hint


@pytest.mark.parametrize("address", ["", "api.openai.com/v1", "ftp://x.test/v1", "http://"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(PlanroomError, match=re.escape("no http or https URL")):
        OpenAIEmbedder(base_url=address, model="m", dimensions=1)
