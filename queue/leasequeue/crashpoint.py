"""Named places where a test may end the process, to prove that nothing is lost there.

`LEASEQUEUE_CRASH_AT=batch.committed:3` makes this process send itself SIGKILL on the third pass of
that point; a third field names another signal, as in `finish.publish:1:STOP`. Without the variable
a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
import threading

VARIABLE = "LEASEQUEUE_CRASH_AT"

_at, _, _rest = os.environ.get(VARIABLE, "").partition(":")
_count, _, _signal = _rest.partition(":")
_passes_left = int(_count or 1)
_lock = threading.Lock()


def crash_point(name: str) -> None:
    """Die here if the environment says so."""
    global _passes_left
    if name != _at:
        return
    with _lock:
        _passes_left -= 1
        if _passes_left != 0:
            return
    os.kill(os.getpid(), signal.Signals[f"SIG{_signal or 'KILL'}"])
