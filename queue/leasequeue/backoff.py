"""How long to wait before another try: pure arithmetic, no clock.

Two waits exist. A job waits 5 s, 30 s, then 2 min between its attempts (rule L8); a worker whose
database is away waits up to a second between its tries, so that its log grows by about a line a
second and it is back within a second of the server.
"""

from __future__ import annotations

import random
from datetime import timedelta

RETRY_DELAYS = (timedelta(seconds=5), timedelta(seconds=30), timedelta(minutes=2))
JITTER_LOW, JITTER_HIGH = 0.8, 1.2
RECONNECT_SECONDS_MAX = 1.0


def retry_delay(
    failures: int, retry_after: timedelta | None = None, chance: random.Random | None = None
) -> timedelta:
    """The wait after the `failures`-th failure in a row (1 is the first).

    The step is scattered by 0.8 to 1.2 so that workers which failed together do not return
    together. A `retry_after` from the other side wins when it is longer, and is scattered only
    upwards, 1.0 to 1.2: never earlier than asked, never in lockstep.
    """
    if failures < 1:
        raise ValueError("failures counts from 1")
    draw = (chance or random).random()
    step = RETRY_DELAYS[min(failures, len(RETRY_DELAYS)) - 1]
    delay = step * (JITTER_LOW + (JITTER_HIGH - JITTER_LOW) * draw)
    if retry_after is None:
        return delay
    return max(delay, retry_after * (1.0 + (JITTER_HIGH - 1.0) * draw))


def reconnect_delay(failures: int, chance: random.Random | None = None) -> float:
    """Seconds to wait before the next try to reach a database that is away."""
    draw = (chance or random).random()
    ceiling = min(RECONNECT_SECONDS_MAX, 0.1 * 2.0 ** min(failures, 10))
    return ceiling * (JITTER_LOW + (1.0 - JITTER_LOW) * draw)
