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
import threading
import time
from collections.abc import Callable, Sequence
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
class _Slot:
    """One of the workers: the process it is at present, or when the next is due."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    due_at: float = 0.0
    deaths: int = 0
    over: bool = False


@dataclass(slots=True)
class Supervisor:
    """Keeps `count` processes of `command` running; `ends`: until each has ended well."""

    command: Sequence[str]
    count: int
    ends: bool = False
    grace_seconds: float = GRACE_SECONDS
    clock: Callable[[], float] = time.monotonic
    _stopping: threading.Event = field(default_factory=threading.Event)
    _signal: int = signal.SIGTERM
    _slots: list[_Slot] = field(default_factory=list[_Slot])

    def run(self) -> int:
        """Supervise until SIGTERM, SIGINT, or the end of all; the exit code for this process.

        It is 0 after an orderly stop, and 1 when a worker had to be killed.
        """
        self._slots = [_Slot(number) for number in range(1, self.count + 1)]
        before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            while not self._stopping.is_set() and not all(slot.over for slot in self._slots):
                for slot in self._slots:
                    self._look_at(slot)
                self._stopping.wait(LOOK_SECONDS)
            return self._end_all()
        finally:
            self._kill_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        self._stopping.set()

    def _look_at(self, slot: _Slot) -> None:
        """Start what is due, and note what has died."""
        now = self.clock()
        if slot.over or (slot.process is None and now < slot.due_at):
            return
        if slot.process is None:
            self._start(slot, now)
            return
        code = slot.process.poll()
        if code is None:
            return
        pid, slot.process = slot.process.pid, None
        if code == 0 and self.ends:
            slot.over = True
            log.info("worker ended", slot=slot.number, pid=pid)
            return
        lived = now - slot.started_at
        slot.deaths = 1 if lived >= SETTLED_SECONDS else slot.deaths + 1
        delay = backoff(slot.deaths)
        slot.due_at = now + delay
        log.warning(
            "worker died", slot=slot.number, pid=pid, **_how(code), restart_in_seconds=delay
        )

    def _start(self, slot: _Slot, now: float) -> None:
        slot.started_at = now
        # A session of its own: a Ctrl-C in the terminal reaches the workers through the
        # supervisor, once, and not twice.
        slot.process = subprocess.Popen(
            list(self.command),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, SUPERVISOR: str(os.getpid())},
        )
        log.info("worker started", slot=slot.number, pid=slot.process.pid)

    def _end_all(self) -> int:
        """Pass the signal on, wait, and kill what is left."""
        running = [slot for slot in self._slots if slot.process is not None]
        if running:
            log.info("stopping", workers=len(running), signal=signal.Signals(self._signal).name)
        for slot in running:
            assert slot.process is not None
            slot.process.send_signal(signal.SIGTERM)
        until = self.clock() + self.grace_seconds
        killed = 0
        for slot in running:
            killed += not self._wait_for(slot, until)
        return 1 if killed else 0

    def _wait_for(self, slot: _Slot, until: float) -> bool:
        process = slot.process
        assert process is not None
        try:
            code = process.wait(timeout=max(0.0, until - self.clock()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            log.warning("worker killed", slot=slot.number, pid=process.pid)
            slot.process = None
            return False
        slot.process = None
        log.info("worker stopped", slot=slot.number, pid=process.pid, **_how(code))
        return True

    def _kill_all(self) -> None:
        """Leave nothing behind, whatever happened here."""
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()
                slot.process.wait()


def backoff(deaths: int) -> float:
    """Seconds before a worker is started again that has died so often in a row."""
    return min(BACKOFF_SECONDS * 2 ** min(deaths - 1, 10), BACKOFF_SECONDS_MAX)


def _how(code: int) -> dict[str, object]:
    """An exit code, or the signal that killed."""
    return {"signal": signal.Signals(-code).name} if code < 0 else {"exit_code": code}
