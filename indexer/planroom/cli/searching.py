"""`search`: which sheet answers."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from planroom.cli.opening import open_room
from planroom.cli.option import JsonOption, ProjectOption, examples
from planroom.cli.output import Output, clean

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from planroom.search import Hit

commands = typer.Typer()


class ModeChoice(StrEnum):
    """Which rankings are used; as `planroom.search.Mode`, without its imports."""

    HYBRID = "hybrid"
    VECTOR = "vector"
    TEXT = "text"


@commands.command(
    rich_help_panel="Drawing sets",
    epilog=examples(
        'planroom search "fire rating of the stair doors"',
        "planroom search A-101",
        'planroom search "roof drain" --file riverside.pdf -k 3 --json',
    ),
)
def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="A question, or a sheet number.")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Most sheets shown.")] = 10,
    project: ProjectOption = None,
    all_projects: Annotated[
        bool, typer.Option("--all-projects", help="Search every project of the workspace.")
    ] = False,
    file: Annotated[
        str | None, typer.Option("--file", metavar="FILE", help="Only this file.")
    ] = None,
    sheet: Annotated[
        str | None, typer.Option("--sheet", metavar="A-101", help="Only sheets of this number.")
    ] = None,
    mode: Annotated[
        ModeChoice, typer.Option(help="By meaning (vector), by words (text), or both.")
    ] = ModeChoice.HYBRID,
    as_json: JsonOption = False,
) -> None:
    """Find the sheets that answer a question, best first.

    A sheet whose number the query names comes before all others. With --json: one document,
    `hits`, whose `marks` are the spans of the marked words in `snippet`.
    """
    output = Output(as_json)
    with open_room() as room:
        hits = room.search(
            query,
            k=k,
            project=project,
            all_projects=all_projects,
            file=file,
            sheet=sheet,
            mode=mode,
        )
    output.document({"query": query, "mode": mode, "hits": [_for_machines(hit) for hit in hits]})
    if not hits:
        output.say("No sheet answers that.")
    for rank, hit in enumerate(hits, 1):
        output.say(*show_hit(rank, hit, plain=not output.console.is_terminal))


def _for_machines(hit: Hit) -> dict[str, object]:
    return {**asdict(hit), "score": round(hit.score, 6), "marks": [list(m) for m in hit.marks]}


def show_hit(rank: int, hit: Hit, *, plain: bool) -> list[RenderableType]:
    """Two lines: what it is, and the words that answer; in a pipe they are marked with `*`."""
    from rich.padding import Padding
    from rich.text import Text

    head = Text(f"{rank:>2}  ")
    if hit.sheet_number:
        head.append(clean(hit.sheet_number), style="bold cyan")
        head.append("  ")
    if hit.sheet_title:
        head.append(clean(hit.sheet_title), style="bold")
        head.append("  ")
    head.append(f"{clean(hit.file)}, page {hit.page} of {hit.page_count}", style="dim")
    shown: list[RenderableType] = [head]
    if hit.snippet:
        shown.append(Padding(snippet(hit, plain=plain), (0, 0, 0, 4), expand=False))
    return shown


def snippet(hit: Hit, *, plain: bool) -> Text:
    """The snippet with its words marked; neighbours are marked as one."""
    from rich.text import Text

    text = clean(hit.snippet)
    spans: list[tuple[int, int]] = []
    for start, stop in hit.marks:
        if spans and not text[spans[-1][1] : start].strip():
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
    if not plain:
        shown = Text(text)
        for start, stop in spans:
            shown.stylize("bold yellow", start, stop)
        return shown
    for start, stop in reversed(spans):
        text = f"{text[:start]}*{text[start:stop]}*{text[stop:]}"
    return Text(text)
