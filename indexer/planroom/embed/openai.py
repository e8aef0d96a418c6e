"""Vectors from any endpoint that speaks OpenAI's `POST /embeddings`.

The one idea: nothing that the service says is believed until it is checked, and nothing is
returned until all of it is. A busy service is waited for in place, within a bound; one that
refuses is an error that says what to do. The key is sent in one header and appears nowhere else:
not in a message, a log line or a repr, even when the service repeats it.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import cast
from urllib.parse import quote, quote_plus

import httpx
import numpy as np
from numpy.typing import NDArray

from leasequeue import Retryable, retry_delay
from planroom.chunk import count_tokens
from planroom.embed.embedder import EmbeddingInvalid, no_abort, unit_vector
from planroom.errors import DocumentFailed, PlanroomError

VERSION = 1
REQUEST_TOKENS_MAX = 270_000
"""A tenth below the provider's limit of 300,000: its count and ours may differ a little."""
REQUEST_INPUTS_MAX = 2048
INPUT_TOKENS_MAX = 8191
PATIENCE_SECONDS = 60.0
"""How long one `embed` waits in all for a service that is busy, before the job is requeued."""

_TICK_SECONDS = 0.25
_ERROR_BYTES_MAX = 64 * 1024
_NUMBER_BYTES_MAX = 32
_SENTENCE_CHARS_MAX = 300
_RETRY_AFTER_MAX = timedelta(days=7)
_RETRIED_STATUSES = frozenset({408, 409, 425, 429})


class OpenAIEmbedder:
    """An embedder on the far side of a network.

    `wait` sleeps and `now` tells the time where the service gives none; tests pass their own.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        dimensions: int,
        api_key: str | None = None,
        timeout_seconds: float = 60.0,
        patience_seconds: float = PATIENCE_SECONDS,
        wait: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        chance: random.Random | None = None,
    ) -> None:
        self.dimensions = dimensions
        self.identity = f"openai/{VERSION} {model} {dimensions}"
        self._model = model
        url = _url(base_url)
        self._secret = _Secret(api_key, url)
        self._endpoint = _Endpoint(url, self._secret, timeout_seconds)
        self._patience_seconds = patience_seconds
        self._wait = wait
        self._now = now
        self._chance = chance
        self._send_dimensions = True

    def embed(
        self, texts: Sequence[str], abort: Callable[[], None] = no_abort
    ) -> NDArray[np.float32]:
        """Embed `texts`; see `Embedder.embed`. Blank texts are not sent: services refuse them."""
        rows = np.empty((len(texts), self.dimensions), dtype=np.float32)
        nothing = unit_vector(np.zeros(self.dimensions))
        sent = [at for at, text in enumerate(texts) if text.strip()]
        for at in set(range(len(texts))) - set(sent):
            rows[at] = nothing
        budget = _Budget(self._patience_seconds)
        for positions in _requests(texts, sent):
            abort()
            data = self._answer([texts[at] for at in positions], budget, abort)
            budget.failures = 0
            for vector, at in zip(self._vectors(data, positions), positions, strict=True):
                rows[at] = vector
        return rows

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def _answer(self, texts: list[str], budget: _Budget, abort: Callable[[], None]) -> object:
        """What the service answers to one request, retried while it is busy and time remains."""
        while True:
            started = time.monotonic()
            try:
                answer = self._endpoint.post(self._body(texts), self._room(texts), abort)
            except httpx.TransportError as error:
                why = self._secret.strike(str(error))[:_SENTENCE_CHARS_MAX]
                busy = f"the embedding service cannot be reached: {why or type(error).__name__}"
                self._pause(busy, "embedder_unreachable", None, started, budget, abort)
                continue
            if answer.status == 200:
                return answer.json(self._secret)
            if self._send_dimensions and answer.dislikes_dimensions(self._secret):
                # Models of one fixed length refuse the parameter; the length is checked anyway.
                self._send_dimensions = False
                continue
            if not answer.is_busy(self._secret):
                raise _refusal(answer, self._secret)
            busy = f"the embedding service is busy (HTTP {answer.status})"
            asked = answer.retry_after(self._now())
            self._pause(busy, "embedder_busy", asked, started, budget, abort)

    def _pause(
        self,
        busy: str,
        code: str,
        asked: timedelta | None,
        started: float,
        budget: _Budget,
        abort: Callable[[], None],
    ) -> None:
        """Wait before the next try, never less than was asked; Retryable when that is too long."""
        budget.failures += 1
        delay = retry_delay(budget.failures, asked, self._chance).total_seconds()
        budget.seconds -= max(0.0, time.monotonic() - started) + delay
        if budget.seconds < 0:
            raise Retryable(
                busy,
                retry_after=asked,
                code=code,
                hint="check PLANROOM_OPENAI_BASE_URL and the limits of your account",
            )
        while delay > 0:
            abort()
            tick = min(delay, _TICK_SECONDS)
            self._wait(tick)
            delay -= tick
        abort()

    def _body(self, texts: list[str]) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self._model,
            "input": texts,
            "encoding_format": "float",
        }
        if self._send_dimensions:
            body["dimensions"] = self.dimensions
        return body

    def _room(self, texts: list[str]) -> int:
        """The most bytes that an honest answer for `texts` can have."""
        return len(texts) * (self.dimensions * _NUMBER_BYTES_MAX + 256) + _ERROR_BYTES_MAX

    def _vectors(self, answer: object, positions: Sequence[int]) -> list[NDArray[np.float32]]:
        """The unit vectors of one answer, in the order of `positions`, all checked first."""
        entries = _entries(answer, positions)
        return [
            self._vector(entry.get("embedding"), at)
            for entry, at in zip(entries, positions, strict=True)
        ]

    def _vector(self, numbers: object, position: int) -> NDArray[np.float32]:
        if not isinstance(numbers, list):
            kind = type(numbers).__name__
            raise _invalid(f"an embedding that is no list of numbers ({kind})", position)
        values = cast("list[object]", numbers)
        if len(values) != self.dimensions:
            raise _invalid(
                f"{len(values)} dimensions where {self.dimensions} were asked for",
                position,
                hint="set PLANROOM_OPENAI_DIMENSIONS to the model's length",
            )
        if not all(type(value) in (int, float) for value in values):
            raise _invalid("an embedding with an entry that is no number", position)
        with suppress(OverflowError):
            vector = np.array([float(cast("float", value)) for value in values])
            if np.isfinite(vector).all() and vector.any():
                return unit_vector(vector)
        raise _invalid("an embedding that is zero or not finite", position)


@dataclass(slots=True)
class _Budget:
    """What one `embed` may still spend on a service that is busy."""

    seconds: float
    failures: int = 0


def _url(base_url: str) -> httpx.URL:
    with suppress(httpx.InvalidURL):
        url = httpx.URL(base_url)
        if url.scheme in ("http", "https") and url.host:
            return url
    raise PlanroomError(
        "the address of the embedding service is no http or https URL",
        code="embedder_refused",
        hint="set PLANROOM_OPENAI_BASE_URL, such as https://api.openai.com/v1",
    )


def _requests(texts: Sequence[str], sent: Sequence[int]) -> Iterator[list[int]]:
    """The positions of `sent` in groups that each fit in one request, in order.

    A provider counts tokens, or guesses them as a quarter of the UTF-8 bytes; for text that is
    not Latin either may be the larger, so a group is below the limit by both (case D14).
    """
    group: list[int] = []
    tokens = quarters = 0
    for at in sent:
        text = texts[at]
        text_tokens, text_quarter = count_tokens(text), len(text.encode(errors="replace")) // 4 + 1
        if text_tokens > INPUT_TOKENS_MAX:
            raise EmbeddingInvalid(
                f"text {at} of the batch has {text_tokens} tokens; the service takes at most"
                f" {INPUT_TOKENS_MAX}",
                position=at,
                hint="lower PLANROOM_CHUNK_TOKENS",
            )
        full = max(tokens + text_tokens, quarters + text_quarter) > REQUEST_TOKENS_MAX
        if group and (full or len(group) == REQUEST_INPUTS_MAX):
            yield group
            group, tokens, quarters = [], 0, 0
        group.append(at)
        tokens, quarters = tokens + text_tokens, quarters + text_quarter
    if group:
        yield group


def _entries(answer: object, positions: Sequence[int]) -> list[dict[str, object]]:
    """The entries of an answer by their `index`, each exactly once (case D15)."""
    data = cast("dict[str, object]", answer).get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list):
        raise _invalid("no list of embeddings", None, hint="check PLANROOM_OPENAI_BASE_URL")
    entries = cast("list[object]", data)
    found: dict[int, dict[str, object]] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise _invalid("an entry that is no object", None)
        fields = cast("dict[str, object]", entry)
        index = fields.get("index")
        if type(index) is not int or not 0 <= index < len(positions):
            raise _invalid(f"an entry for no text that was sent, of {len(positions)}", None)
        if index in found:
            raise _invalid("two embeddings for one text", positions[index])
        found[index] = fields
    for index, at in enumerate(positions):
        if index not in found:
            raise _invalid(f"{len(entries)} embeddings for {len(positions)} texts", at)
    return [found[index] for index in range(len(positions))]


def _invalid(what: str, position: int | None, *, hint: str | None = None) -> EmbeddingInvalid:
    which = "" if position is None else f" for text {position} of the batch"
    return EmbeddingInvalid(
        f"the embedding service answered {what}{which}",
        position=position,
        hint=hint or "the service or a proxy before it is at fault; planroom retry tries again",
    )


class _Secret:
    """The key, and anything secret in the address: sent, and struck out of everything else."""

    __slots__ = ("_forms", "_key")

    def __init__(self, key: str | None, url: httpx.URL) -> None:
        self._key = (key or "").strip()
        if not all("!" <= character <= "~" for character in self._key):
            # Said here because the header would be refused with an error that quotes it.
            raise PlanroomError(
                "the key of the embedding service holds a blank or a character outside ASCII",
                code="embedder_refused",
                hint="check PLANROOM_OPENAI_API_KEY or OPENAI_API_KEY",
            )
        secrets = {self._key, url.password, url.userinfo.decode(errors="replace")}
        forms = {form for secret in secrets for form in (secret, quote(secret), quote_plus(secret))}
        self._forms = sorted(forms - {""}, key=len, reverse=True)

    def __repr__(self) -> str:
        return "_Secret(***)"

    def headers(self) -> dict[str, str]:
        """The header that carries the key; none where there is no key."""
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def strike(self, text: str) -> str:
        """`text` without any secret."""
        for form in self._forms:
            text = text.replace(form, "***")
        return text


class _KeyAuth(httpx.Auth):
    """Adds the key as the request leaves, so that no client or request at rest holds it."""

    def __init__(self, secret: _Secret) -> None:
        self._secret = secret

    def auth_flow(self, request: httpx.Request) -> Iterator[httpx.Request]:  # pyright: ignore[reportIncompatibleMethodOverride]
        request.headers.update(self._secret.headers())
        yield request


@dataclass(frozen=True, slots=True)
class _Answer:
    """One complete response: its status, headers and body of bounded size."""

    status: int
    headers: httpx.Headers
    body: bytes

    def json(self, secret: _Secret) -> object:
        """The body as JSON; EmbeddingInvalid where it is something else."""
        body = self._parsed()
        if body is None:
            kind = secret.strike(self.headers.get("content-type", "nothing named"))
            raise _invalid(
                f"something other than JSON ({kind[:80]})",
                None,
                hint="check that PLANROOM_OPENAI_BASE_URL is the address of an API",
            )
        return body

    def _parsed(self) -> object:
        """The body as JSON, None where it is not; the parser's error would quote the body."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def error(self, secret: _Secret) -> tuple[str, str]:
        """The service's own code and sentence, without secrets; empty where it gave none."""
        body = self._parsed()
        fields = cast("dict[str, object]", body) if isinstance(body, dict) else {}
        inner = fields.get("error", fields)
        inner = cast("dict[str, object]", inner) if isinstance(inner, dict) else {"message": inner}
        code = inner.get("code") or inner.get("type") or ""
        sentence = inner.get("message") or inner.get("detail") or ""
        # Struck out before it is shortened: half a key would no longer be recognised.
        clean = " ".join(secret.strike(str(sentence)).split())
        return str(code), clean[:_SENTENCE_CHARS_MAX]

    def is_busy(self, secret: _Secret) -> bool:
        """Whether the same request may succeed later, with nothing done about it.

        `insufficient_quota` comes as a 429, yet only a person can end it: it is a refusal.
        """
        if self.status not in _RETRIED_STATUSES and self.status < 500:
            return False
        return self.error(secret)[0] != "insufficient_quota"

    def dislikes_dimensions(self, secret: _Secret) -> bool:
        """Whether the request was refused for its `dimensions` parameter."""
        if self.status not in (400, 422):
            return False
        sentence = self.error(secret)[1].lower()
        return "dimensions" in sentence or "matryoshka" in sentence

    def retry_after(self, now: datetime) -> timedelta | None:
        """How long the service asks to be left alone; None where it does not say.

        A date is compared with the service's own `Date`, so a wrong clock here makes no request
        early; `now` is used where the service gives no date.
        """
        value = self.headers.get("retry-after", "").strip()
        try:
            seconds = float(value)
        except ValueError:
            until = _http_date(value)
            if until is None:
                return None
            since = _http_date(self.headers.get("date", "")) or now
            seconds = (until - since).total_seconds()
        if math.isnan(seconds) or seconds < 0:
            return None
        return timedelta(seconds=min(seconds, _RETRY_AFTER_MAX.total_seconds()))


def _http_date(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _refusal(answer: _Answer, secret: _Secret) -> DocumentFailed:
    """What the service refused, as an error that says what a person can do about it."""
    code, sentence = answer.error(secret)
    hints = {
        401: "check PLANROOM_OPENAI_API_KEY or OPENAI_API_KEY",
        403: "the key may not use this model: check its rights, and PLANROOM_OPENAI_MODEL",
        404: "check PLANROOM_OPENAI_BASE_URL (it usually ends in /v1) and PLANROOM_OPENAI_MODEL",
        429: "add credit or raise the limit with the provider, then planroom retry",
    }
    hint = hints.get(answer.status, "check PLANROOM_OPENAI_MODEL and PLANROOM_OPENAI_DIMENSIONS")
    if 300 <= answer.status < 400:
        hint = "redirects are not followed: set PLANROOM_OPENAI_BASE_URL to the final address"
    said = f": {sentence}" if sentence else f" ({code})" if code else ""
    return DocumentFailed(
        secret.strike(f"the embedding service refused the request (HTTP {answer.status}){said}"),
        code="embedder_refused",
        hint=hint,
    )


class _Endpoint:
    """Posts one request at a time, without ever keeping its caller from an abort."""

    def __init__(self, url: httpx.URL, secret: _Secret, timeout_seconds: float) -> None:
        auth: httpx.Auth | None = None
        if secret.headers():
            auth = _KeyAuth(secret)
        elif url.userinfo:
            auth = httpx.BasicAuth(url.username, url.password)
        # Without its user and password, because httpx writes the address to its log.
        self._url = url.copy_with(
            username="", password="", path=url.path.rstrip("/") + "/embeddings"
        )
        self._timeout_seconds = timeout_seconds
        # Its debug lines quote the headers of answers, and a service may repeat the key there.
        logging.getLogger("httpcore").setLevel(logging.INFO)
        self._client = httpx.Client(timeout=timeout_seconds, auth=auth, follow_redirects=False)

    def close(self) -> None:
        self._client.close()

    def post(self, body: dict[str, object], bytes_max: int, abort: Callable[[], None]) -> _Answer:
        """Post `body` and read the whole answer, calling `abort` several times a second.

        The request runs in a thread of its own: a service that hangs must not hold up a worker
        that was told to stop. An abandoned thread ends by its own timeout. Raises
        httpx.TransportError, and EmbeddingInvalid when the answer is larger than `bytes_max` or
        cannot be decompressed.
        """
        outcome: queue.SimpleQueue[_Answer | BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put(self._exchange(body, bytes_max))
            except httpx.DecodingError:
                outcome.put(_invalid("a body that cannot be decompressed", None))
            except BaseException as error:  # noqa: BLE001 - raised again by the caller below
                outcome.put(error)

        threading.Thread(target=run, name="planroom-embed", daemon=True).start()
        while True:
            try:
                result = outcome.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                abort()
                continue
            if isinstance(result, BaseException):
                raise result
            return result

    def _exchange(self, body: dict[str, object], bytes_max: int) -> _Answer:
        # The client's timeout is for each read; the deadline ends an answer that only drips.
        deadline = time.monotonic() + self._timeout_seconds
        with self._client.stream("POST", self._url, json=body) as response:
            ok = response.status_code == 200
            content = bytearray()
            for part in response.iter_bytes(65_536):
                content += part
                if not ok and len(content) >= _ERROR_BYTES_MAX:
                    break
                if len(content) > bytes_max:
                    raise _invalid(f"more than {bytes_max} bytes", None)
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the answer took too long")
            return _Answer(response.status_code, response.headers, bytes(content))
