"""Several workers on one machine: start them, replace those that die, end them together.

One job a process (rule L17), so more throughput is more processes. The supervisor holds no
connection and no job. A worker that dies is started again after a second, then two, four, up to
thirty, so that a machine on which none can live is not kept busy dying; one that has lived for a
minute starts that count anew.

SIGTERM and SIGINT are passed on, and the workers give their leases back. Were the supervisor
itself killed, nobody would pass signals on any more: then the kernel sends each worker the
SIGTERM (Linux: PR_SET_PDEATHSIG), and they stop in order rather than go on unseen.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

import structlog

BACKOFF_SECONDS = 1.0
BACKOFF_SECONDS_MAX = 30.0
SETTLED_SECONDS = 60.0
"""A worker that has lived so long is healthy: the next death counts as the first."""
GRACE_SECONDS = 12.0
"""A worker leaves within 10 s of SIGTERM (rule L10); who does not is killed."""
LOOK_SECONDS = 0.2

SUPERVISOR = "PLANROOM_SUPERVISOR_PID"
"""Tells a worker whose child it has to be."""

_PR_SET_PDEATHSIG = 1

log = structlog.get_logger("planroom.supervise")


def worker_command(*, once: bool, until_idle: bool, log_format: str) -> list[str]:
    """How one worker is started, in the same Python as this one."""
    command = [sys.executable, "-m", "planroom", "worker"]
    if once:
        command.append("--once")
    if until_idle:
        command.append("--until-idle")
    if log_format == "json":
        command.append("--json")
    return command


def die_with_supervisor() -> None:
    """In a worker: be sent SIGTERM when the supervisor that started it is gone.

    Does nothing for a worker that has no supervisor, or off Linux. Call it from the main thread:
    the kernel watches the thread that called, and the thread of the parent that started it.
    """
    supervisor = os.environ.get(SUPERVISOR, "")
    if not supervisor.isdecimal() or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # It may have died before the call above.
    if os.getppid() != int(supervisor):
        signal.raise_signal(signal.SIGTERM)


@dataclass(slots=True)
class Patience:
    """How long to wait before what has died is started again: longer each time in a row."""

    deaths: int = 0

    def after_death(self, lived_seconds: float) -> float:
        """Seconds to wait, given how long this one had lived."""
        self.deaths = 1 if lived_seconds >= SETTLED_SECONDS else self.deaths + 1
        return min(BACKOFF_SECONDS * 2 ** min(self.deaths - 1, 10), BACKOFF_SECONDS_MAX)


@dataclass(slots=True)
class _Slot:
    """One of the workers: the process it is at present, or when the next is due."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    due_at: float = 0.0
    patience: Patience = field(default_factory=Patience)
    over: bool = False


class Supervisor:
    """Keeps `count` processes of `command` running; with `ends`, until each has ended well."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        ends: bool = False,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._command = command
        self._ends = ends
        self._grace_seconds = grace_seconds
        self._slots = [_Slot(number) for number in range(1, count + 1)]
        # Plain values: a signal's handler may have interrupted this thread inside any lock.
        self._signals: list[int] = []

    def run(self) -> int:
        """Supervise until SIGTERM, SIGINT, or the end of all; the exit code for this process.

        It is 0 after an orderly stop, and 1 when a worker had to be killed. A second signal
        kills at once.
        """
        watched = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._note) for number in watched}
        try:
            while not self._signals and not all(slot.over for slot in self._slots):
                for slot in self._slots:
                    self._look_at(slot)
                time.sleep(LOOK_SECONDS)
            return self._end_all()
        finally:
            self._kill_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _look_at(self, slot: _Slot) -> None:
        """Start what is due, and note what has died."""
        now = time.monotonic()
        if slot.process is None:
            if not slot.over and now >= slot.due_at:
                self._start(slot, now)
            return
        code = slot.process.poll()
        if code is None:
            return
        pid, slot.process = slot.process.pid, None
        if code == 0 and self._ends:
            slot.over = True
            log.info("process ended", slot=slot.number, pid=pid)
            return
        delay = slot.patience.after_death(now - slot.started_at)
        slot.due_at = now + delay
        log.warning(
            "process died", slot=slot.number, pid=pid, **_how(code), restart_in_seconds=delay
        )

    def _start(self, slot: _Slot, now: float) -> None:
        slot.started_at = now
        # A session of its own: a Ctrl-C in the terminal reaches the workers through the
        # supervisor, once, and not twice.
        slot.process = subprocess.Popen(
            list(self._command),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, SUPERVISOR: str(os.getpid())},
        )
        log.info("process started", slot=slot.number, pid=slot.process.pid)

    def _end_all(self) -> int:
        """Pass the signal on, wait, and kill what is left."""
        running = [slot for slot in self._slots if slot.process is not None]
        if running:
            log.info("stopping", workers=len(running))
        for slot in running:
            if slot.process is not None:
                slot.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + self._grace_seconds
        ended = [self._has_ended(slot, until) for slot in running]
        return 0 if all(ended) else 1

    def _has_ended(self, slot: _Slot, until: float) -> bool:
        """Wait for a worker that was told to stop; False if it had to be killed."""
        process, slot.process = slot.process, None
        assert process is not None
        while process.poll() is None and time.monotonic() < until and len(self._signals) < 2:
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()
            process.wait()
            log.warning("process killed", slot=slot.number, pid=process.pid)
            return False
        log.info("process stopped", slot=slot.number, pid=process.pid, **_how(process.wait()))
        return True

    def _kill_all(self) -> None:
        """Leave nothing behind, whatever happened here."""
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()
                slot.process.wait()


def _how(code: int) -> dict[str, object]:
    """An exit code, or the signal that killed."""
    return {"signal": signal.Signals(-code).name} if code < 0 else {"exit_code": code}
