"""Progress of `index`: events, plain lines, and bars on a terminal of the test's own."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from planroom.cli import output as output_module
from planroom.cli.output import Output
from planroom.cli.progress import Bars, Followed, Pace
from support.shown import file_row, shown

Row = dict[str, Any]


class Story:
    """A `Followed` with a clock of its own, and what came of what it was told."""

    def __init__(self, output: Output, **options: Any) -> None:
        self.time = 0.0
        self.ended: list[tuple[str, float]] = []
        self._followed = Followed(output, self._end, clock=lambda: self.time, **options)

    def _end(self, row: Row, seconds: float) -> None:
        self.ended.append((row["status"], seconds))

    def tell(self, *rows: Row, at: float) -> None:
        self.time = at
        self._followed.tell(rows)


def test_a_log_is_told_now_and_then_and_only_news(capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(Output())

    story.tell(file_row(), at=0)
    story.tell(file_row(processed_pages=128), at=5)
    story.tell(file_row(processed_pages=160), at=11)
    story.tell(file_row(processed_pages=160), at=30)

    assert capsys.readouterr().out == "set.pdf: page 160 of 320, chunk 1,400\n"


def test_machines_are_told_every_second_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(Output(as_json=True))

    for tick in range(21):
        story.tell(file_row(processed_units=1400 + tick), at=tick / 5)

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert '"event": "progress"' in lines[0]
    assert '"processed_units": 1405' in lines[0]


def test_an_end_is_told_once_and_bytes_that_were_superseded_have_not_ended() -> None:
    story = Story(Output(as_json=True))
    superseded = file_row(status="cancelled", error_code="superseded")

    story.tell(file_row(), at=1)
    story.tell(superseded, at=2)
    story.tell(file_row(status="ready", attempts=2), at=5)
    story.tell(file_row(status="ready", attempts=2), at=6)

    assert story.ended == [("ready", 4.0)]


def test_the_time_of_one_attempt_is_the_database_s() -> None:
    story = Story(Output(as_json=True))
    start = datetime(2026, 12, 1, tzinfo=UTC)
    done = file_row(status="ready", started_at=start, finished_at=start + timedelta(seconds=9))

    story.tell(done, at=1)

    assert story.ended == [("ready", 9.0)]


def test_a_file_that_stands_still_in_another_s_hands_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = file_row(
        lease_owner="elsewhere:12:ab", lease_expires_at=datetime.now(UTC) + timedelta(seconds=90)
    )
    own = file_row(
        lease_owner=f"{socket.gethostname()}:{os.getpid()}:ab",
        lease_expires_at=held["lease_expires_at"],
    )
    theirs, ours = Story(Output()), Story(Output())

    for at in range(0, 12, 2):
        theirs.tell(held, at=at)
        ours.tell(own, at=at)

    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("set.pdf is held by worker elsewhere:12:ab")


def on_screen(bars: Bars, width: int) -> list[str]:
    """What the bars look like on a terminal so wide."""
    return shown(bars.render(), width=width)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_bars_keep_free_of_the_right_edge_where_the_terminal_writes_ctrl_c(width: int) -> None:
    bars = Bars()
    bars.update([file_row(name="x" * 200)], 1, None)

    lines = on_screen(bars, width)

    assert len(lines) == 3
    assert all(len(line) <= width - 2 for line in lines)


def test_bars_show_pages_and_chunks_and_a_guess_is_marked() -> None:
    bars = Bars()
    bars.update([file_row()], 3, None)
    name, pages, chunks, rest = on_screen(bars, 90)

    assert name == "set.pdf"
    assert "120/320" in pages
    assert "1,400/~5,333" in chunks
    assert rest == "2 of 3 files done"

    bars.update([file_row(processed_pages=320, total_units=5210)], 1, None)
    _, pages, chunks = on_screen(bars, 90)
    assert "done" in pages
    assert "1,400/5,210" in chunks


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (file_row(status="queued", state="queued"), "set.pdf: waiting for a worker"),
        (
            file_row(status="queued", state="waiting to retry", waits_seconds=4.2, error="429"),
            "set.pdf: trying again in 4 s: 429",
        ),
        (file_row(status="queued", state="cancelling"), "set.pdf: being cancelled"),
    ],
)
def test_d25_a_file_that_nobody_works_on_says_what_it_waits_for(row: Row, said: str) -> None:
    bars = Bars()
    bars.update([row], 1, None)

    assert on_screen(bars, 80) == [said]


def test_a_pace_looks_back_a_little_and_not_at_what_was_done_before() -> None:
    time = 0.0
    pace = Pace(clock=lambda: time)
    pace.note(1000)
    assert pace.per_second is None
    for time in range(1, 61):
        pace.note(1000 + (10 * time if time < 30 else 290 + 20 * (time - 29)))

    assert pace.per_second == pytest.approx(20)
    assert pace.left(100) == pytest.approx(5)


def test_the_console_of_a_pipe_breaks_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)

    assert Output().console.width == output_module.WIDE
