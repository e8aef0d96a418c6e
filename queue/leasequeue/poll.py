"""One poll: a fixed list of small stages, each bounded and each caught on its own (rule L15).

There is one loop in a worker, and this is its body. A test calls `poll` and looks at the database;
nothing sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stage:
    """One kind of upkeep or work. `run` does at most a bounded amount and says how much it did."""

    name: str
    run: Callable[[], int]


@dataclass(slots=True)
class Polled:
    """What one poll came to: items done in all, and the stages that failed, by name."""

    done: int = 0
    errors: dict[str, Exception] = field(default_factory=dict[str, Exception])


def poll(stages: Sequence[Stage], stopping: Callable[[], bool] = lambda: False) -> Polled:
    """Walk the stages once, in order. A stage that raises is noted and never skips the next."""
    polled = Polled()
    for stage in stages:
        if stopping():
            break
        try:
            polled.done += stage.run()
        except Exception as error:  # noqa: BLE001 - this is the one place that isolates stages
            polled.errors[stage.name] = error
    return polled
