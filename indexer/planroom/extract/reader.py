"""Pages of a PDF, read by a child process, as an iterator that nothing in the file can break.

The one idea: whatever a page does to the parser, it does to a process that is expendable. The child
says which page it begins; if it dies, that page is `failed` with the reason, a new child starts
after it, and the document goes on. Why it died is read from how it died: the kernel ends it by
SIGPROF when a page has used its processor time, PDFium aborts when it is refused memory, and a
child that was killed from outside is no fault of the page, which is read again.

The child is started with `subprocess`, not `multiprocessing`: it must not import the parent's
`__main__`, inherits no descriptors, and is given no secrets of the parent's environment.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from planroom.extract.frame import EXIT_MEMORY, FrameBuffer, FrameError
from planroom.extract.limits import MIB, ExtractLimits
from planroom.model import Page, PageReason, PageStatus, SheetSource

if TYPE_CHECKING:
    from planroom.errors import DocumentFailed

EXTRACTOR_VERSION = 1
"""Raised with any change that can change the text, the status or the name of a page."""

_ABORT_SECONDS = 0.1
_WALL_FACTOR = 4
_START_SECONDS = 30.0
"""By the clock, for a busy machine to start the child before it opens anything."""
_STARTS_MAX = 3
"""Children in a row that may be lost from outside without a page read between them."""
_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
# What glibc prints before it aborts over a damaged heap; PDFium aborts in silence.
_HEAP_DAMAGE = ("free()", "malloc()", "realloc()", "corrupt", "double free", "smashing", "munmap_")
_ENVIRONMENT_KEPT = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "TZ", "SYSTEMROOT")


class ExtractionAborted(Exception):
    """The reader was closed, or `abort` returned True, before the next page was there."""


def extractor_identity() -> str:
    """What decides the text of a page: our version and both parsers'. For the fingerprint."""
    # Not at the top: the child imports this module too, and this would double its time to start.
    import importlib.metadata
    import importlib.util

    spec = importlib.util.find_spec("pypdfium2_raw")
    folder = next(iter(spec.submodule_search_locations or ())) if spec else ""
    version = json.loads((Path(folder) / "version.json").read_bytes())
    build = ".".join(str(version[part]) for part in ("major", "minor", "build", "patch"))
    pypdf = importlib.metadata.version("pypdf")
    return f"planroom-extract/{EXTRACTOR_VERSION} pdfium/{build} pypdf/{pypdf}"


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a child ended: a page's reason, or `outside` when the page has nothing to do with it."""

    reason: PageReason
    detail: str
    outside: bool = False


class PageReader:
    """The pages of one document in order, each exactly once; a context manager.

    `page_count` is known once it is entered. The child reads ahead, but never more than `ahead`
    pages beyond the count last given to `committed`: a consumer that waits for a page beyond that
    waits until another thread commits. `next`, `committed` and `close` may be called from
    different threads; `close`, and `abort` returning True, make a waiting `next` raise
    `ExtractionAborted`. Entering raises OSError when the file cannot be read, and
    `planroom.errors.DocumentFailed` (`password_required`, `unreadable`, `too_many_pages`);
    RuntimeError when the child itself does not work, so that no document is blamed for it.
    """

    page_count: int

    def __init__(
        self,
        path: Path,
        *,
        first: int = 0,
        ahead: int = 8,
        limits: ExtractLimits | None = None,
        name: str | None = None,
        abort: Callable[[], bool] = _never,
    ) -> None:
        self._path = path.absolute()
        self._name = name if name is not None else path.name
        self._ahead = ahead
        self._limits = limits if limits is not None else ExtractLimits()
        self._abort = abort
        self._next = self._committed = first
        self._begun: dict[str, Any] | None = None
        self._pages: int | None = None
        self._lost = 0
        self._closed = False
        self._child: _Child | None = None
        # `_state` guards which child there is; `_turn` lets one caller at a time read from it.
        self._state = threading.Lock()
        self._turn = threading.Lock()

    def __enter__(self) -> Self:
        with self._path.open("rb"):
            pass
        try:
            with self._turn:
                while self._pages is None:
                    self._receive()
        except BaseException:
            self.close()
            raise
        self.page_count = self._pages
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Page:
        with self._turn:
            while True:
                if self._next >= self.page_count:
                    raise StopIteration
                page = self._receive()
                if page is not None:
                    return page

    def committed(self, count: int) -> None:
        """Say that pages below `count` are committed: the child may read `ahead` beyond them."""
        with self._state:
            if count > self._committed:
                self._committed = count
                if self._child is not None:
                    self._child.tell(count)

    def close(self) -> None:
        """End the child, and whoever waits for a page; safe to call again, from any thread."""
        with self._state:
            self._closed = True
            if self._child is not None:
                self._child.kill()
        with self._turn, self._state:
            self._drop_child()

    # -- one step --------------------------------------------------------------------------------

    def _receive(self) -> Page | None:
        """Take one message from the child, or deal with its end; a page when there is one."""
        child = self._living_child()
        message = child.receive(self._wall_seconds(), self._check)
        if message is None:
            return self._bury(child)
        if "pages" in message:
            self._opened(int(message["pages"]))
        elif "failed" in message:
            raise self._document_failed(str(message["failed"]), str(message.get("said", "")))
        elif "begin" in message:
            self._begun = message["page"]
            child.begin()
        elif "read" in message:
            return self._taken(_page(self._next, message["page"]))
        return None

    def _living_child(self) -> _Child:
        with self._state:
            if self._closed:
                raise ExtractionAborted(f"reading {self._name} was stopped")
            if self._child is None:
                self._child = _Child(self._path, self._options(), self._limits)
            return self._child

    def _options(self) -> dict[str, Any]:
        return {
            "first": self._next,
            "committed": self._committed,
            "ahead": self._ahead,
            "parent": os.getpid(),
            "memory_bytes": self._limits.memory_bytes,
            "page_seconds": self._limits.page_seconds,
            "open_seconds": self._limits.open_seconds,
            "reopen_pages": self._limits.reopen_pages,
            "pages_max": self._limits.pages_max,
        }

    def _wall_seconds(self) -> float | None:
        """How long the child may take over what it is doing; None while it may wait for us."""
        child = self._child
        if child is not None and not child.opened:
            return _START_SECONDS + _WALL_FACTOR * self._limits.open_seconds
        if self._begun is not None:
            # A page may begin with opening the document again.
            return _WALL_FACTOR * (self._limits.page_seconds + self._limits.open_seconds)
        return None

    def _check(self) -> None:
        if self._closed or self._abort():
            raise ExtractionAborted(f"reading {self._name} was stopped")

    def _opened(self, pages: int) -> None:
        assert self._child is not None
        self._child.opened = True
        if pages > self._limits.pages_max:
            raise self._document_failed("too_many_pages", f"{pages}")
        if self._pages is not None and self._pages != pages:
            raise self._document_failed("unreadable", "it changed while it was read")
        self._pages = pages

    def _taken(self, page: Page) -> Page:
        self._begun = None
        self._next += 1
        self._lost = 0
        return page

    # -- its end ---------------------------------------------------------------------------------

    def _bury(self, child: _Child) -> Page | None:
        """The child is gone: fail its page, or begin again where it was nobody's fault."""
        opened = child.opened
        with self._state:
            ending = child.ending()
            self._drop_child()
        self._check()
        begun = self._begun
        blameless = ending.outside or (opened and begun is None)
        self._begun = None
        if blameless:
            self._lost += 1
            if self._lost < _STARTS_MAX:
                return None
        if not opened and child.broken:
            raise RuntimeError(f"the process that reads PDFs does not work: {ending.detail}")
        if not opened:
            raise self._document_failed("unreadable", ending.detail)
        fields = begun if begun is not None else {}
        return self._taken(
            _page(
                self._next,
                fields
                | {"status": PageStatus.FAILED, "reason": ending.reason, "detail": ending.detail},
            )
        )

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _document_failed(self, code: str, said: str) -> DocumentFailed:
        # Not at the top: this package is what the child imports, and errors bring in the engine.
        from planroom.errors import DocumentFailed

        if code == "password_required":
            return DocumentFailed(
                f"{self._name} opens with a password only.",
                code=code,
                hint="Save a copy without a password and add that.",
            )
        if code == "too_many_pages":
            return DocumentFailed(
                f"{self._name} has {said} pages; at most {self._limits.pages_max} are read.",
                code=code,
                hint="Raise PLANROOM_PAGES_MAX, or split the file.",
            )
        if _is_truncated(self._path):
            return DocumentFailed(
                f"{self._name} is truncated: its end is missing, and it cannot be opened ({said}).",
                code="unreadable",
                hint="Copy or download the file again; the transfer was probably cut off.",
            )
        return DocumentFailed(
            f"{self._name} cannot be read as a PDF ({said}).",
            code="unreadable",
            hint="Open it in a PDF viewer; if that works, print it to a new PDF and add that.",
        )


class _Child:
    """One process that reads, its three streams, and what its death says."""

    def __init__(self, path: Path, options: dict[str, Any], limits: ExtractLimits) -> None:
        self.opened = False
        self._limits = limits
        self._buffer = FrameBuffer()
        self._since = time.monotonic()
        self._overdue: float | None = None
        self._garbled = False
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        # Nothing is written to it; it ends when this process does, however that happens.
        listened, self._lifeline = os.pipe()
        command = [sys.executable, "-P", "-m", "planroom.extract.child"]
        try:
            self._process = subprocess.Popen(
                [*command, os.fspath(path), json.dumps(options | {"lifeline": listened})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                pass_fds=(listened,),
                cwd="/",
                env=_environment(),
                # Ctrl-C in the terminal goes to a group that the child is not in.
                start_new_session=True,
            )
        except BaseException:
            self._errors.close()
            os.close(self._lifeline)
            raise
        finally:
            os.close(listened)

    def begin(self) -> None:
        """A page begins: its time by the clock runs from here."""
        self._since = time.monotonic()

    def receive(
        self, wall_seconds: float | None, check: Callable[[], None]
    ) -> dict[str, Any] | None:
        """The next message, or None when there will be none; `check` is called while waiting."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        while True:
            check()
            try:
                if (message := self._buffer.take()) is not None:
                    return message
            except FrameError:
                self._garbled = True
                self.kill()
                return None
            if select.select([stream], [], [], _ABORT_SECONDS)[0]:
                data = os.read(stream, 1024 * 1024)
                if not data:
                    return None
                self._buffer.feed(data)
            elif wall_seconds is not None and time.monotonic() > self._since + wall_seconds:
                self._overdue = wall_seconds
                self.kill()

    def tell(self, committed: int) -> None:
        """Move the window; a child that is dying does not hear it, and its successor is told."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"%d\n" % committed)
        except OSError:
            return

    def kill(self) -> None:
        """End the process at once; it holds nothing that is worth an orderly end."""
        if self._process.returncode is None:
            self._process.kill()

    @property
    def broken(self) -> bool:
        """Whether it ended by an error of ours or of the installation, which no file can cause."""
        status = self._process.returncode
        return status is not None and status > 0 and status != EXIT_MEMORY

    def close(self) -> None:
        """End the process and give its streams back."""
        self.kill()
        self._wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            stream.close()
        os.close(self._lifeline)

    def ending(self) -> _Ending:
        """Why it ended, once its output has ended."""
        resident = self._wait()
        status = self._process.returncode
        limits = self._limits
        if self._overdue is not None:
            said = f"It took longer than {self._overdue:g} seconds by the clock."
            return _Ending(PageReason.TIMEOUT, said)
        if self._garbled:
            return _Ending(PageReason.CRASHED, "The parser's process sent what is no message.")
        if status == -signal.SIGPROF:
            seconds = limits.page_seconds if self.opened else limits.open_seconds
            said = f"It used more than {seconds:g} seconds of processor time."
            return _Ending(PageReason.TIMEOUT, said)
        if self._ran_out_of_memory(status, resident):
            said = f"It needed more than {limits.memory_bytes // MIB} MiB of memory."
            return _Ending(PageReason.MEMORY, said)
        if status < 0:
            name = signal.Signals(-status).name
            outside = -status in _OUTSIDE
            by = "killed from outside again and again" if outside else "ended by the kernel"
            said = f"The parser's process was {by} ({name})."
            return _Ending(PageReason.CRASHED, said, outside)
        last = self._printed().strip().rpartition("\n")[2] or "without a word"
        said = f"The parser's process ended with status {status}: {last}"
        return _Ending(PageReason.CRASHED, said)

    def _ran_out_of_memory(self, status: int, resident: int) -> bool:
        if status == EXIT_MEMORY:
            return True
        if status == -signal.SIGABRT:
            return not any(words in self._printed() for words in _HEAP_DAMAGE)
        # A parser that does not look at what it was refused dies of it a moment later.
        died = status in (-signal.SIGSEGV, -signal.SIGTRAP, -signal.SIGILL, -signal.SIGBUS)
        return died and resident > 0.8 * self._limits.memory_bytes

    def _printed(self) -> str:
        self._errors.seek(0)
        return self._errors.read(64 * 1024).decode(errors="replace")

    def _wait(self) -> int:
        """Wait for the end; the most memory it had resident, in bytes."""
        process = self._process
        if process.returncode is not None:
            return 0
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except ChildProcessError:
            # Somebody else in this process has waited for it; how it ended is not known.
            process.returncode = -signal.SIGKILL
            return 0
        process.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_maxrss * 1024


def _environment() -> dict[str, str]:
    """What the child needs to find its modules; none of our keys and passwords."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT_KEPT if name in os.environ}
    return kept | {
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "LC_ALL": "C.UTF-8",
        # Each further arena reserves 64 MiB of the address space that the limit counts.
        "MALLOC_ARENA_MAX": "1",
    }


def _page(index: int, fields: dict[str, Any]) -> Page:
    """A page from a message; the enumerations come as their values."""
    reason, source = fields.get("reason"), fields.get("sheet_source")
    return Page(
        index=index,
        status=PageStatus(fields["status"]),
        text=fields.get("text", ""),
        reason=PageReason(reason) if reason is not None else None,
        detail=fields.get("detail"),
        parser=fields.get("parser", "pdfium"),
        label=fields.get("label"),
        bookmark=fields.get("bookmark"),
        sheet_number=fields.get("sheet_number"),
        sheet_title=fields.get("sheet_title"),
        sheet_source=SheetSource(source) if source is not None else None,
        width=fields.get("width", 0.0),
        height=fields.get("height", 0.0),
        rotation=fields.get("rotation", 0),
    )


def _is_truncated(path: Path) -> bool:
    """Whether it begins as a PDF but does not end as one."""
    with path.open("rb") as file:
        begins = b"%PDF-" in file.read(1024)
        file.seek(max(0, path.stat().st_size - 2048))
        return begins and b"%%EOF" not in file.read()
