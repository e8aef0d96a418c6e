"""The picture of a killed run: each document's progress, in the colour of the worker that holds it.

A kill is a cross where a line ends. Dotted is how long nobody had the document; then it goes on at
the same height, in the colour of whoever took it over. Grey behind is the uninterrupted run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from resume_parts.report import Comparison
from resume_parts.run import Kill, Sample

COLOURS = ("#0b6e99", "#d9822b", "#5b8c2a", "#8e4585", "#b23a48", "#6b7280")
CALM, INK, KILL = "#c9cdd3", "#22272e", "#c1121f"


def draw(compared: Comparison, out: Path) -> list[Path]:
    """Write the plot beside `out` as PNG and SVG; returns both paths. Needs matplotlib."""
    mpl: Any = import_module("matplotlib")
    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "planroom", "font.size": 10})
    plt: Any = import_module("matplotlib.pyplot")
    figure, (top, lanes) = plt.subplots(
        2,
        1,
        figsize=(9.5, 5.6),
        sharex=True,
        gridspec_kw={"height_ratios": [4, 0.42 * compared.work.workers + 0.3], "hspace": 0.08},
        layout="constrained",
    )
    _progress(top, compared)
    _lanes(lanes, compared)
    figure.suptitle(_headline(compared), x=0.01, ha="left", fontsize=11.5, color=INK)
    paths = [out.with_suffix(".png"), out.with_suffix(".svg")]
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
    plt.close(figure)
    return paths


def _headline(compared: Comparison) -> str:
    kills = len(compared.killed.kills)
    total = compared.calm.embedded
    return (
        f"{kills} × SIG{compared.signal}, {compared.work.workers} workers: "
        f"{compared.units_again:,} of {total:,} texts embedded again, "
        f"{compared.seconds_more:+.1f} s; the same chunks, byte for byte"
    )


def _by_document(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    found: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[sample.document].append(sample)
    return found


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A time in which one process held the document, alive; `dead` is the rest until the next."""

    slot: int
    held: list[Sample]
    dead: list[Sample]


def _stretches(samples: Sequence[Sample], kills: Sequence[Kill]) -> list[_Stretch]:
    """Part a document's samples by who held it, and by when that one died."""
    found: list[_Stretch] = []
    parts = [list(group) for _, group in groupby(samples, key=lambda s: s.pid)]
    for part, following in zip_longest(parts, parts[1:]):
        if part[0].slot is None:
            continue
        # What happened since the last look is drawn up to the next.
        whole = part + (following[:1] if following else [])
        died = [
            replace(part[0], at=k.at, units=k.units_committed)
            for k in kills
            if k.document == part[0].document and part[0].at <= k.at <= whole[-1].at
        ]
        if died:
            held = [s for s in part if s.at < died[0].at] + died[:1]
            dead = died[:1] + [s for s in whole if s.at >= died[0].at]
            found.append(_Stretch(part[0].slot, held, dead))
        else:
            found.append(_Stretch(part[0].slot, whole, []))
    return found


def _steps(axes: Any, samples: Sequence[Sample], **style: Any) -> None:
    axes.step([s.at for s in samples], [s.units for s in samples], where="post", **style)


def _progress(axes: Any, compared: Comparison) -> None:
    kills = compared.killed.kills
    for samples in _by_document(compared.calm.samples).values():
        _steps(axes, samples, color=CALM, linewidth=4, solid_capstyle="round", zorder=1)
    for document, samples in _by_document(compared.killed.samples).items():
        for stretch in _stretches(samples, kills):
            colour = COLOURS[stretch.slot % len(COLOURS)]
            _steps(axes, stretch.held, color=colour, linewidth=2.4, zorder=3)
            _steps(axes, stretch.dead, color=KILL, linewidth=1.6, ls=(0, (1, 1.6)), zorder=2)
        _label(axes, document, samples, compared)
    for kill in kills:
        _cross(axes, kill)
    axes.set_ylabel("units committed")
    axes.set_ylim(bottom=0)
    _tidy(axes)
    _legend(axes, compared)


def _cross(axes: Any, kill: Kill) -> None:
    """The kill, and what it cost."""
    at = (kill.at, kill.units_committed)
    axes.plot(*at, "x", color=KILL, ms=9, mew=2.4, zorder=5, clip_on=False)
    axes.annotate(
        f"{kill.units_again} again",
        at,
        xytext=(4, -13),
        textcoords="offset points",
        fontsize=8.5,
        color=KILL,
        zorder=6,
    )


def _label(axes: Any, document: int, samples: Sequence[Sample], compared: Comparison) -> None:
    """Name the document at its end."""
    end = max(s.units for s in samples)
    done = next(s.at for s in samples if s.units == end)
    name = compared.work.documents[(document - 1) % len(compared.work.documents)].stem
    axes.annotate(
        name,
        (done, end),
        xytext=(5, 4),
        textcoords="offset points",
        fontsize=8.5,
        color=INK,
    )


def _legend(axes: Any, compared: Comparison) -> None:
    Line2D: Any = import_module("matplotlib.lines").Line2D  # noqa: N806
    handles = [
        Line2D([], [], color=COLOURS[slot % len(COLOURS)], lw=2.2, label=f"worker {slot + 1}")
        for slot in range(compared.work.workers)
    ]
    handles.append(
        Line2D([], [], color=KILL, marker="x", ls="", ms=8, mew=2.4, label=f"SIG{compared.signal}")
    )
    handles.append(Line2D([], [], color=KILL, lw=1.6, ls=(0, (1, 1.6)), label="held by the dead"))
    handles.append(Line2D([], [], color=CALM, lw=4, label="uninterrupted"))
    axes.legend(handles=handles, loc="upper left", frameon=False, ncols=1, fontsize=9)


def _lanes(axes: Any, compared: Comparison) -> None:
    """One lane a worker: where it holds a document, and where it was killed."""
    for samples in _by_document(compared.killed.samples).values():
        for stretch in _stretches(samples, compared.killed.kills):
            start, end = stretch.held[0].at, stretch.held[-1].at
            colour = COLOURS[stretch.slot % len(COLOURS)]
            axes.barh(stretch.slot, max(end - start, 0.05), left=start, height=0.5, color=colour)
    for kill in compared.killed.kills:
        axes.plot(kill.at, kill.slot, "x", color=KILL, ms=8, mew=2.2, zorder=5, clip_on=False)
    workers = compared.work.workers
    axes.set_yticks(range(workers), [f"worker {slot + 1}" for slot in range(workers)])
    axes.set_ylim(workers - 0.45, -0.55)
    axes.set_xlabel("seconds")
    axes.set_xlim(left=0)
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa1ab")
    axes.tick_params(colors=INK, length=3)
    axes.grid(axis="x", color="#eceef1", zorder=0)
    axes.set_axisbelow(True)
