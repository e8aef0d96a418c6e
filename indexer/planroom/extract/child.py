"""The process that reads pages: `python -m planroom.extract.child PATH OPTIONS`.

A hostile page can take the process down: a Flate bomb makes PDFium abort, and no `except` catches
that. So the parsers run here, under the kernel's limits (address space, processor time), and what
is lost with the process is one page. It says `begin` before it touches a page, so that its reader
knows which page it died of.

It imports the parsers, the standard library and the pure modules beside it, nothing that opens a
connection or a terminal. Standard output carries frames, standard input the number of pages that
are committed, one a line, and a third pipe nothing at all: its end means that the reader is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Any

from planroom.extract.annotation import appended
from planroom.extract.fallback import FallbackDocument, PasswordRequired
from planroom.extract.frame import EXIT_MEMORY, send
from planroom.extract.outline import title_by_page
from planroom.extract.pdfium import (
    ERROR_PASSWORD,
    PdfiumDocument,
    PdfiumError,
    Reading,
    load_library,
)
from planroom.extract.sheet import Heading, read_heading
from planroom.extract.text import is_bad_encoding, normalise, normalise_line
from planroom.model import PageReason, PageStatus, SheetSource

PAGE_CHARACTERS_MAX = 8_000_000
"""More text than this on one page is an attack on the memory of whoever receives it."""
_POINTS_MAX = 1_000_000.0
_PARENT_SECONDS = 1.0


class ReaderGone(Exception):
    """Whoever wanted the pages has ended."""


class Unreadable(Exception):
    """No parser reads the document, or the page; the message says what each of them said."""


class Window:
    """How far the child may read: `ahead` pages beyond those that are committed.

    Standard input is read only when the window is used up; fewer than `ahead` lines can be waiting
    there until then.
    """

    def __init__(self, committed: int, ahead: int, parent: int) -> None:
        self._committed = committed
        self._ahead = ahead
        self._parent = parent
        self._pending = b""

    def wait_for(self, index: int) -> None:
        """Return when page `index` may be read; ReaderGone when nobody wants it any more."""
        while index >= self._committed + self._ahead:
            if not select.select([0], [], [], _PARENT_SECONDS)[0]:
                # The pipe stays open if somebody else has inherited the reader's end of it.
                if os.getppid() != self._parent:
                    raise ReaderGone
                continue
            data = os.read(0, 4096)
            if not data:
                raise ReaderGone
            *lines, self._pending = (self._pending + data).split(b"\n")
            self._committed = max([self._committed, *map(int, lines)])


def die_with_reader(lifeline: int) -> None:
    """Let the kernel end this process, in mid-page too, when the reader's process ends.

    Nothing is ever written to the pipe `lifeline`; when its other end closes, the kernel sends
    SIGIO, which ends a process that does not handle it. `prctl(PR_SET_PDEATHSIG)` would fire when
    the *thread* ends that started this process, and a reader is used from several. A thread that
    waits for the end of the pipe would make every allocation of the parser 4 % slower, by its lock.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    # It may have closed before anybody listened.
    if select.select([lifeline], [], [], 0)[0]:
        raise ReaderGone


class Document:
    """The document in whichever parser opens it, with what its pages are called."""

    def __init__(self, path: Path, reopen_pages: int) -> None:
        self._path = path
        self._raw = load_library()
        self._reopen_pages = reopen_pages
        self._reads = 0
        self._fallback = FallbackDocument(path)
        self._pdfium: PdfiumDocument | None = None
        try:
            self._pdfium = PdfiumDocument(self._raw, path)
            if self._pdfium.page_count < 1:
                raise PdfiumError("it has no pages")
        except PdfiumError as error:
            if error.code == ERROR_PASSWORD:
                raise PasswordRequired from error
            self._open_fallback(str(error))
            return
        self.page_count = self._pdfium.page_count
        self._bookmarks = title_by_page(self._pdfium.bookmarks())
        self._labels: list[str] | None = None

    def heading(self, index: int) -> Heading:
        """What the document itself calls a page."""
        label: str | None = None
        if self._labels is not None:
            label = self._labels[index] if index < len(self._labels) else None
        elif self._pdfium is not None:
            label = self._pdfium.label(index)
        return read_heading(normalise_line(label or ""), self._bookmarks.get(index))

    def reopen_if_due(self) -> None:
        """Close PDFium's document and open it again after so many pages, for its memory."""
        if self._pdfium is not None and self._reads >= self._reopen_pages:
            self._pdfium.close()
            self._pdfium = PdfiumDocument(self._raw, self._path)
            self._reads = 0

    def read(self, index: int, heading: Heading) -> tuple[str, Reading]:
        """A page, and which parser read it: pypdf only where PDFium reports an error."""
        if self._pdfium is None:
            return "pypdf", self._read_fallback(index, "")
        self._reads += 1
        try:
            return "pdfium", self._pdfium.read(index, heading)
        except PdfiumError as error:
            return "pypdf", self._read_fallback(index, f"PDFium: {error}; ")

    def close(self) -> None:
        """Close it in both parsers."""
        self._fallback.close()
        if self._pdfium is not None:
            self._pdfium.close()
            self._pdfium = None

    def _read_fallback(self, index: int, said: str) -> Reading:
        try:
            # A parser that counts other pages would read another page.
            if self._fallback.page_count != self.page_count:
                raise Unreadable(f"{said}pypdf finds {self._fallback.page_count} pages")
            return self._fallback.read(index)
        except (MemoryError, Unreadable):
            raise
        except Exception as error:  # pypdf raises anything on a damaged page.
            raise Unreadable(f"{said}pypdf: {_said(error)}") from error

    def _open_fallback(self, said: str) -> None:
        """Let pypdf open it; labels and outline are a bonus that may be damaged too."""
        if self._pdfium is not None:
            self._pdfium.close()
            self._pdfium = None
        try:
            self.page_count = self._fallback.page_count
        except (MemoryError, PasswordRequired):
            raise
        except Exception as error:
            raise Unreadable(f"PDFium: {said}; pypdf: {_said(error)}") from error
        if self.page_count < 1:
            raise Unreadable("it has no pages")
        self._labels, self._bookmarks = [], {}
        try:
            self._labels = self._fallback.labels()
            self._bookmarks = title_by_page(self._fallback.bookmarks())
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - Without names the pages are as readable as with them.
            return


def page_fields(parser: str, reading: Reading, heading: Heading) -> dict[str, Any]:
    """A reading as the fields of a `model.Page` that the reader does not know yet."""
    raw = appended(reading.text, reading.annotations)
    fields: dict[str, Any] = {
        "parser": parser,
        "width": _sane(reading.width),
        "height": _sane(reading.height),
        "rotation": reading.rotation if reading.rotation in (90, 180, 270) else 0,
        **heading_fields(heading),
    }
    if heading.number is None and reading.number is not None:
        fields["sheet_number"] = normalise_line(reading.number)
        fields["sheet_source"] = SheetSource.TITLE_BLOCK
    fields["sheet_title"] = heading.title or normalise_line(reading.title or "")
    return fields | _text_fields(raw)


def heading_fields(heading: Heading) -> dict[str, Any]:
    """What is known of a page before it is read, as fields of a `model.Page`."""
    return {
        "label": heading.label,
        "bookmark": heading.bookmark,
        "sheet_number": heading.number,
        "sheet_title": heading.title,
        "sheet_source": heading.source,
    }


def _text_fields(raw: str) -> dict[str, Any]:
    if len(raw) > PAGE_CHARACTERS_MAX:
        most = f"at most {PAGE_CHARACTERS_MAX:,} are read"
        said = f"The page has {len(raw):,} characters of text; {most}."
        return _failed(PageReason.MEMORY, said)
    if is_bad_encoding(raw):
        said = "The page's fonts do not say which characters they show; its text would be noise."
        return _failed(PageReason.BAD_ENCODING, said)
    text = normalise(raw)
    if not text.strip():
        return {"status": PageStatus.IMAGE_ONLY}
    return {"status": PageStatus.TEXT, "text": text}


def _failed(reason: PageReason, detail: str) -> dict[str, Any]:
    return {"status": PageStatus.FAILED, "reason": reason, "detail": detail}


def _sane(points: float) -> float:
    return min(max(points, 0.0), _POINTS_MAX) if math.isfinite(points) else 0.0


def _said(error: BaseException) -> str:
    """A parser's message, the same in every process: without addresses, and not endless."""
    message = re.sub(r" at 0x[0-9a-fA-F]+", "", str(error)) or type(error).__name__
    return normalise_line(message, length_max=300) or type(error).__name__


class _Deadline:
    """Processor seconds after which the kernel ends this process, by SIGPROF."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read_pages(out: int, path: Path, options: dict[str, Any]) -> None:
    opening, reading = _Deadline(options["open_seconds"]), _Deadline(options["page_seconds"])
    window = Window(options["committed"], options["ahead"], options["parent"])
    with opening:
        document = Document(path, options["reopen_pages"])
    send(out, {"pages": document.page_count})
    if document.page_count > options["pages_max"]:
        return
    for index in range(options["first"], document.page_count):
        window.wait_for(index)
        with opening:
            heading = document.heading(index)
        send(out, {"begin": index, "page": heading_fields(heading)})
        with opening:
            document.reopen_if_due()
        with reading:
            fields = _read_page(document, index, heading)
        send(out, {"read": index, "page": fields})


def _read_page(document: Document, index: int, heading: Heading) -> dict[str, Any]:
    try:
        return page_fields(*document.read(index, heading), heading)
    except Unreadable as error:
        return heading_fields(heading) | _failed(PageReason.PARSER_ERROR, str(error))


def _confine(memory_bytes: int) -> None:
    """Limits and signals, before anything of the file is touched."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        memory_bytes = min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # A bomb leaves no core dump, and a chatty parser no large log.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * 1024, 1024 * 1024))
    # Ctrl-C and an orderly stop are the reader's business: it closes the pipe.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # If the machine runs out of memory, this process goes before the worker; where the file is
    # missing or locked, which of them goes is the kernel's choice as ever.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def main(path: Path, options: dict[str, Any]) -> int:
    """Read the document's pages in order; the exit status says how that ended."""
    # Frames get a descriptor of their own, so that nothing a library prints lands among them.
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        die_with_reader(options["lifeline"])
        _confine(options["memory_bytes"])
        _read_pages(out, path, options)
    except PasswordRequired:
        send(out, {"failed": "password_required"})
    except Unreadable as error:
        send(out, {"failed": "unreadable", "said": str(error)})
    except MemoryError:
        return EXIT_MEMORY
    except (BrokenPipeError, ReaderGone):
        return 0
    return 0


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stderr.flush()
    # Nothing is worth tidying up, and a damaged heap could hang the attempt.
    os._exit(status)
