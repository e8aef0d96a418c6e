"""The child may die of anything, and whoever reads may die too: nothing is lost or left over."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import psutil
import pytest

from planroom.errors import DocumentFailed
from planroom.extract import ExtractionAborted, ExtractLimits, PageReader
from planroom.extract.frame import FrameBuffer
from planroom.model import Page, PageReason, PageStatus
from support.pdf import ARCH_D, PdfPage, bomb, break_xref, drawing, slow, text, write_pdf

MIB = 1024 * 1024
PATIENCE_SECONDS = 30.0


def until(happened: Callable[[], bool]) -> None:
    """Wait for another process to get somewhere; fail when it never does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    nothing = threading.Event()
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        nothing.wait(0.01)


def read(path: Path, limits: ExtractLimits | None = None) -> list[Page]:
    pages: list[Page] = []
    with PageReader(path, limits=limits) as reader:
        for page in reader:
            pages.append(page)
            reader.committed(page.index + 1)
    return pages


def child_of(pid: int, path: Path) -> psutil.Process:
    """The process that reads `path` for `pid`."""
    (child,) = (
        process
        for process in psutil.Process(pid).children()
        if str(path) in " ".join(process.cmdline())
    )
    return child


def computing(process: psutil.Process) -> Callable[[], bool]:
    """Whether the process has been busy for a while since now."""
    before = process.cpu_times().user
    return lambda: process.cpu_times().user > before + 0.2


def between(tmp_path: Path, nasty: PdfPage) -> Path:
    """A document whose second page of three is `nasty`."""
    good = [PdfPage(text(f"GOOD {i}", 72, 72)) for i in range(2)]
    return write_pdf(tmp_path / "nasty.pdf", [good[0], nasty, good[1]])


def only_the_second_failed(pages: list[Page], reason: PageReason) -> bool:
    assert [page.index for page in pages] == [0, 1, 2]
    assert [page.status for page in pages] == [
        PageStatus.TEXT,
        PageStatus.FAILED,
        PageStatus.TEXT,
    ]
    assert (pages[0].text, pages[2].text) == ("GOOD 0", "GOOD 1")
    assert pages[1].reason is reason, pages[1].detail
    assert pages[1].detail
    return True


def test_d2_a_page_that_inflates_without_end_fails_within_its_memory(tmp_path: Path) -> None:
    path = between(tmp_path, bomb(600 * MIB))
    pages = read(path, ExtractLimits(memory_bytes=300 * MIB))

    assert only_the_second_failed(pages, PageReason.MEMORY)
    assert "300 MiB" in str(pages[1].detail)


def test_d3_a_page_beyond_its_processor_time_fails(tmp_path: Path) -> None:
    path = between(tmp_path, slow(40_000_000))
    pages = read(path, ExtractLimits(page_seconds=0.3))

    assert only_the_second_failed(pages, PageReason.TIMEOUT)
    assert "0.3 seconds of processor time" in str(pages[1].detail)


def test_d1_a_slow_page_within_its_time_is_read(tmp_path: Path) -> None:
    pages = read(between(tmp_path, slow(4_000_000)))

    assert [page.text for page in pages] == ["GOOD 0", "SLOW", "GOOD 1"]


def test_a_document_that_cannot_be_opened_within_its_time_is_unreadable(tmp_path: Path) -> None:
    # Without a cross-reference, opening means looking for every object there is.
    objects = [b"<< /A 1 >>"] * 200_000
    path = write_pdf(tmp_path / "long.pdf", [PdfPage()], objects=objects)
    break_xref(path)

    with (
        pytest.raises(DocumentFailed) as failed,
        PageReader(path, limits=ExtractLimits(open_seconds=0.02)),
    ):
        pytest.fail("it opened")
    assert failed.value.code == "unreadable"
    assert "processor time" in str(failed.value)


def test_a_broken_installation_is_not_blamed_on_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_pdf(tmp_path / "x.pdf", [PdfPage(text("X", 9, 9))])
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with pytest.raises(RuntimeError, match="does not work"), PageReader(path):
        pytest.fail("it opened")


@contextlib.contextmanager
def reading_the_second_page(path: Path) -> Generator[tuple[psutil.Process, list[Page]]]:
    """The child while it is in the middle of the second page, and then all pages."""
    pages: list[Page] = []
    with PageReader(path, ahead=1) as reader:
        pages.append(next(reader))
        child = child_of(os.getpid(), path)
        busy = computing(child)
        reader.committed(1)

        def take() -> None:
            for page in reader:
                pages.append(page)
                reader.committed(page.index + 1)

        taking = threading.Thread(target=take)
        taking.start()
        until(busy)
        yield child, pages
        taking.join(PATIENCE_SECONDS)
        assert not taking.is_alive()


@pytest.mark.parametrize("signal_number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGILL])
def test_a_page_that_crashes_the_parser_fails_and_the_rest_is_read(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    with reading_the_second_page(between(tmp_path, slow(8_000_000))) as (child, pages):
        child.send_signal(signal_number)

    assert only_the_second_failed(pages, PageReason.CRASHED)
    assert signal_number.name in str(pages[1].detail)


def test_a_child_that_hangs_without_computing_fails_its_page_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planroom.extract.reader._WALL_FACTOR", 0.02)
    with reading_the_second_page(between(tmp_path, slow(8_000_000))) as (child, pages):
        child.suspend()

    assert only_the_second_failed(pages, PageReason.TIMEOUT)
    assert "by the clock" in str(pages[1].detail)


def test_an_abort_in_silence_is_taken_for_memory(tmp_path: Path) -> None:
    # PDFium aborts without a word when it is refused memory, and only then.
    with reading_the_second_page(between(tmp_path, slow(8_000_000))) as (child, pages):
        child.send_signal(signal.SIGABRT)

    assert only_the_second_failed(pages, PageReason.MEMORY)


def test_a_child_killed_in_mid_page_from_outside_costs_nothing(tmp_path: Path) -> None:
    path = between(tmp_path, slow(8_000_000))
    with reading_the_second_page(path) as (child, pages):
        child.kill()

    assert pages == read(path)
    assert [page.text for page in pages] == ["GOOD 0", "SLOW", "GOOD 1"]


def test_a_page_whose_child_is_killed_every_time_fails_in_the_end(tmp_path: Path) -> None:
    path = between(tmp_path, slow(40_000_000))
    with reading_the_second_page(path) as (_, pages):

        def killed_again() -> bool:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if str(path) in " ".join(child.cmdline()) and child.cpu_times().user > 0.4:
                        child.kill()
            return len(pages) > 1

        until(killed_again)

    assert only_the_second_failed(pages, PageReason.CRASHED)
    assert "SIGKILL" in str(pages[1].detail)


def test_ctrl_c_and_an_orderly_stop_do_not_reach_the_child(tmp_path: Path) -> None:
    with reading_the_second_page(between(tmp_path, slow(8_000_000))) as (child, pages):
        assert os.getpgid(child.pid) != os.getpgid(os.getpid())
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            child.send_signal(ignored)

    assert [page.text for page in pages] == ["GOOD 0", "SLOW", "GOOD 1"]


def test_the_child_reads_no_further_than_ahead_of_what_is_committed(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "ten.pdf", [PdfPage(text(f"P{i}", 9, 9)) for i in range(10)])
    options: dict[str, object] = {
        "first": 2,
        "committed": 2,
        "ahead": 3,
        "parent": os.getpid(),
        "memory_bytes": 1024 * MIB,
        "page_seconds": 60.0,
        "open_seconds": 60.0,
        "reopen_pages": 25,
        "pages_max": 100,
    }
    listened, lifeline = os.pipe()
    options["lifeline"] = listened
    with subprocess.Popen(
        [sys.executable, "-m", "planroom.extract.child", path, json.dumps(options)],
        pass_fds=(listened,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        buffer, begun = FrameBuffer(), list[int]()

        def read_until(last: int) -> None:
            """Take messages until page `last` is read, and then for a moment longer."""
            assert child.stdout is not None
            done = False
            while select.select([child.stdout], [], [], 0.5 if done else PATIENCE_SECONDS)[0]:
                buffer.feed(os.read(child.stdout.fileno(), 65536))
                while (message := buffer.take()) is not None:
                    if "begin" in message:
                        begun.append(message["begin"])
                    done = done or message.get("read") == last

        read_until(4)
        assert begun == [2, 3, 4]
        child.stdin.write(b"3\n4\n")
        read_until(6)
        assert begun == [2, 3, 4, 5, 6]
        child.stdin.close()
        assert child.wait(PATIENCE_SECONDS) == 0
    os.close(listened)
    os.close(lifeline)


def test_next_waits_for_a_commit_and_close_ends_the_wait(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "ten.pdf", [PdfPage(text(f"P{i}", 9, 9)) for i in range(10)])
    outcome: list[object] = []
    with PageReader(path, ahead=2) as reader:
        assert [next(reader).index, next(reader).index] == [0, 1]

        def take() -> None:
            try:
                outcome.append(next(reader).index)
                outcome.append(next(reader))
            except ExtractionAborted as aborted:
                outcome.append(aborted)

        waiting = threading.Thread(target=take)
        waiting.start()
        reader.committed(1)
        until(lambda: outcome == [2])
        reader.close()
        waiting.join(PATIENCE_SECONDS)

    assert outcome[0] == 2
    assert isinstance(outcome[1], ExtractionAborted)
    with pytest.raises(ExtractionAborted):
        next(reader)


def test_close_ends_a_reader_in_mid_page_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "slow.pdf", [slow(100_000_000)])
    raised = threading.Event()
    with PageReader(path) as reader:
        child = child_of(os.getpid(), path)

        def take() -> None:
            with pytest.raises(ExtractionAborted):
                next(reader)
            raised.set()

        taking = threading.Thread(target=take)
        taking.start()
        started = time.monotonic()
        reader.close()
        assert raised.wait(PATIENCE_SECONDS)
        assert time.monotonic() - started < 2
        taking.join()

    assert not child.is_running()


def test_abort_ends_a_wait_in_mid_page(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "slow.pdf", [slow(100_000_000)])
    stop = threading.Event()
    with PageReader(path, abort=stop.is_set) as reader:
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(ExtractionAborted):
            next(reader)


_READER = """
import sys
from pathlib import Path
from planroom.extract import PageReader
with PageReader(Path(sys.argv[1]), ahead=int(sys.argv[2])) as reader:
    print("open", flush=True)
    for page in reader:
        pass
"""


@pytest.mark.parametrize("ahead", [1, 8], ids=["waiting for a commit", "in mid-page"])
def test_the_child_dies_with_a_reader_that_is_killed(tmp_path: Path, ahead: int) -> None:
    path = between(tmp_path, slow(150_000_000))
    with subprocess.Popen(
        [sys.executable, "-c", _READER, path, str(ahead)], stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        child = child_of(reader.pid, path)
        if ahead > 1:
            until(computing(child))
        reader.kill()
        reader.wait()
        child.wait(5)


def test_the_child_is_given_no_secrets_and_no_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_pdf(tmp_path / "x.pdf", [PdfPage(text("X", 9, 9))])
    monkeypatch.setenv("PLANROOM_DATABASE_URL", "postgresql://somebody:secret@host/db")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with socket.socket() as connection, PageReader(path, ahead=0):
        connection.set_inheritable(True)
        child = child_of(os.getpid(), path)
        environment = Path(f"/proc/{child.pid}/environ").read_bytes()
        links = [str(link.readlink()) for link in Path(f"/proc/{child.pid}/fd").iterdir()]

    assert b"secret" not in environment
    assert not [link for link in links if link.startswith("socket")]


def resident_growth(path: Path, reopen_pages: int, early: int, pages: int) -> tuple[int, int]:
    """How much the child's memory grows from page `early` to the last, and its peak, in bytes."""
    sizes: list[int] = []
    with PageReader(path, limits=ExtractLimits(reopen_pages=reopen_pages)) as reader:
        child = child_of(os.getpid(), path)
        for page in reader:
            if page.index < pages - 1:
                sizes.append(child.memory_info().rss)
            reader.committed(page.index + 1)
    assert len(sizes) == pages - 1
    return max(sizes[-25:]) - max(sizes[:early]), max(sizes)


def many_pages(path: Path, count: int) -> Path:
    lines = b"".join(b"%d %d m %d %d l S\n" % (i % 900, i, i % 700, i * 2) for i in range(1500))
    return write_pdf(
        path / "many.pdf",
        [PdfPage(drawing(f"A-{i}", "PLAN", notes=60) + lines, ARCH_D) for i in range(count)],
    )


def test_d26_memory_is_flat_because_the_document_is_opened_again(tmp_path: Path) -> None:
    path = many_pages(tmp_path, 200)
    flat, _ = resident_growth(path, 25, 30, 200)
    grown, _ = resident_growth(path, 10_000, 30, 200)

    assert flat < 4 * MIB
    assert grown > 2 * flat


@pytest.mark.slow
def test_d26_memory_is_flat_over_three_thousand_pages(tmp_path: Path) -> None:
    growth, peak = resident_growth(many_pages(tmp_path, 3000), 25, 30, 3000)

    assert growth < 8 * MIB
    assert peak < 120 * MIB
