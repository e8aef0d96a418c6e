"""Search: the sheet that answers comes first, in its scope, each time, whatever is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg
import pytest

import planroom.search as module
from planroom.config import Settings
from planroom.embed.static import StaticEmbedder
from planroom.errors import PlanroomError
from planroom.projects import ensure_project
from planroom.search import Hit, Mode, Scope, clean_query, search
from support.drawing_set import QUESTIONS, SetInfo, make_set
from support.engine import scalar
from support.pdf import ARCH_D, PdfBookmark, PdfPage, drawing, image_page, labels, text, write_pdf
from support.room import Bench, notes_pdf


@pytest.fixture
def bench(settings: Settings) -> Iterator[Bench]:
    with Bench.open(settings) as bench:
        yield bench


def sheet_pdf(path: Path, *sheets: tuple[str, str, str]) -> Path:
    """Sheets of (number, title, note)."""
    pages = [
        PdfPage(drawing(number, title) + text(note, 100, 300), ARCH_D)
        for number, title, note in sheets
    ]
    return write_pdf(path, pages, root=labels(*(number for number, _, _ in sheets)))


def numbers(hits: list[Hit]) -> list[str | None]:
    return [hit.sheet_number for hit in hits]


SHEETS = (
    ("A-101", "FIRST FLOOR PLAN", "TERRAZZO IN THE LOBBY"),
    ("A-102", "SECOND FLOOR PLAN", "CARPET IN THE OFFICES"),
    ("A1.01", "ROOF PLAN", "PARAPET FLASHING AND SCUPPERS"),
    ("M-201", "MECHANICAL PLAN", "VAV BOXES SERVE A-101 AND A-102"),
)


# Sheet numbers


@pytest.mark.parametrize(
    "query", ["A-101", "a101", "A 101", "a-101 floor", "sheet A–101?", "terrazzo on (A-101)"]
)
def test_the_sheet_whose_number_is_asked_for_comes_first(
    bench: Bench, tmp_path: Path, query: str
) -> None:
    bench.index(sheet_pdf(tmp_path / "set.pdf", *SHEETS))
    hits = bench.search(query)
    assert (hits[0].sheet_number, hits[0].exact_sheet) == ("A-101", True)
    # M-201 says A-101 too, and A1.01 is another number.
    assert [hit.exact_sheet for hit in hits[1:]] == [False] * (len(hits) - 1)


def test_an_exact_sheet_comes_first_in_every_mode(bench: Bench, tmp_path: Path) -> None:
    bench.index(sheet_pdf(tmp_path / "set.pdf", *SHEETS))
    for mode in Mode:
        assert numbers(bench.search("a1.01", mode=mode))[0] == "A1.01"


def test_a_number_that_stands_in_two_files_gives_both_first(bench: Bench, tmp_path: Path) -> None:
    bench.index(sheet_pdf(tmp_path / "tower.pdf", *SHEETS))
    bench.index(sheet_pdf(tmp_path / "annex.pdf", *SHEETS[:2]))
    hits = bench.search("A-101")
    assert {(hit.file, hit.sheet_number) for hit in hits[:2]} == {
        ("tower.pdf", "A-101"),
        ("annex.pdf", "A-101"),
    }
    assert [hit.exact_sheet for hit in hits[:3]] == [True, True, False]


def test_a_scan_is_found_by_its_number_and_by_its_title(bench: Bench, tmp_path: Path) -> None:
    pages = [
        PdfPage(drawing("A-101", "FLOOR PLAN"), ARCH_D),
        image_page(),
        PdfPage(drawing("A-103", "ROOF DETAILS"), ARCH_D),
    ]
    marks = [PdfBookmark(f"({name})", i) for i, name in enumerate(("A", "S-301 BRACE ELEVATIONS"))]
    document = write_pdf(
        tmp_path / "set.pdf", pages, root=labels("A-101", "S-301", "A-103"), outline=marks
    )
    bench.index(document)
    by_number = bench.search("s301")[0]
    assert (by_number.page, by_number.sheet_number, by_number.snippet) == (2, "S-301", "")
    assert by_number.exact_sheet
    by_title = bench.search("brace elevations")[0]
    assert (by_title.page, by_title.sheet_title) == (2, "BRACE ELEVATIONS")
    assert 2 in [hit.page for hit in bench.search("where are the elevations of the frames")]


def test_a_query_that_is_a_title_brings_that_sheet_first(bench: Bench, tmp_path: Path) -> None:
    bench.index(sheet_pdf(tmp_path / "set.pdf", *SHEETS))
    assert numbers(bench.search("roof plan"))[0] == "A1.01"
    assert numbers(bench.search("second floor plan"))[0] == "A-102"


# Quality


@pytest.fixture
def made(tmp_path: Path) -> SetInfo:
    return make_set(tmp_path / "clinic.pdf", sheets=24, scans=2)


def test_every_question_about_the_set_is_answered_by_its_sheet(
    settings: Settings, made: SetInfo, tmp_path: Path
) -> None:
    embedder = StaticEmbedder()
    with Bench.open(settings) as bench:
        bench.opens = lambda settings: embedder
        assert bench.index(made.path)["status"] == "ready"
        # And beside other documents it still is.
        bench.index(notes_pdf(tmp_path / "notes.pdf", 5))
        wrong: dict[str, list[str | None]] = {}
        for query, sheet in QUESTIONS.items():
            hits = search(
                bench.conn,
                Scope(bench.workspace, bench.project),
                query,
                vectors={embedder.identity: embedder.embed([query])[0]},
            )
            if hits[0].sheet_number != sheet:
                wrong[query] = numbers(hits)[:3]
        assert wrong == {}
    embedder.close()


def test_every_sheet_of_the_set_is_first_for_its_own_number(bench: Bench, made: SetInfo) -> None:
    bench.index(made.path)
    for page in made.pages:
        hit = bench.search(page.number.lower().replace("-", " "))[0]
        assert (hit.sheet_number, hit.page) == (page.number, page.index + 1)


def test_a_sheet_that_both_rankings_find_beats_one_that_either_finds(
    bench: Bench, tmp_path: Path
) -> None:
    bench.index(sheet_pdf(tmp_path / "set.pdf", *SHEETS))
    hits = bench.search("parapet flashing scuppers")
    assert hits[0].sheet_number == "A1.01"
    # 1/61 for a first place in each of the two.
    assert hits[0].score == pytest.approx(2 / 61)


def test_a_sheet_counts_once_however_many_of_its_chunks_match(bench: Bench, tmp_path: Path) -> None:
    small = bench.with_settings(chunk_tokens=16, chunk_overlap=0)
    small.index(notes_pdf(tmp_path / "set.pdf", 3))
    hits = bench.search("anchor bolt slab", k=50)
    assert sorted(hit.page for hit in hits) == [1, 2, 3]


# Scope


def test_a_search_stays_in_its_project_file_and_sheet(bench: Bench, tmp_path: Path) -> None:
    annex = ensure_project(bench.conn, bench.workspace, "annex")
    tower = bench.index(sheet_pdf(tmp_path / "tower.pdf", *SHEETS))
    bench.index(sheet_pdf(tmp_path / "podium.pdf", *SHEETS))
    bench.take(sheet_pdf(tmp_path / "annex.pdf", *SHEETS), project=annex)
    bench.drain()
    query = "terrazzo in the lobby"
    assert {hit.file for hit in bench.search(query)} == {"tower.pdf", "podium.pdf"}
    assert {hit.file for hit in bench.search(query, project_id=annex)} == {"annex.pdf"}
    assert {hit.project for hit in bench.search(query, project_id=None)} == {"default", "annex"}
    assert {hit.file for hit in bench.search(query, file_id=tower["file_id"])} == {"tower.pdf"}
    for mode in Mode:
        hits = bench.search(query, sheet="a 102", mode=mode)
        assert {hit.sheet_number for hit in hits} == {"A-102"}
    assert numbers(bench.search("", sheet="A-102")) == ["A-102", "A-102"]
    assert bench.search(query, sheet="Z-999") == []


def test_only_published_versions_are_searched(bench: Bench, tmp_path: Path) -> None:
    document = sheet_pdf(tmp_path / "set.pdf", *SHEETS)
    bench.take(document)
    assert bench.search("terrazzo lobby") == []
    bench.drain()
    assert len(bench.search("terrazzo lobby")) == 4
    bench.take(sheet_pdf(document, ("A-101", "FIRST FLOOR PLAN", "GRANITE IN THE LOBBY")))
    assert "TERRAZZO" in bench.search("terrazzo lobby")[0].snippet
    bench.drain()
    [hit] = bench.search("terrazzo lobby")
    assert "TERRAZZO" not in hit.snippet
    assert hit.page_count == 1


def test_a_version_published_in_mid_search_is_seen_whole_or_not_at_all(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = sheet_pdf(tmp_path / "set.pdf", *SHEETS)
    bench.index(document)
    sheet_pdf(document, ("Q-901", "FOURTH FLOOR PLAN", "GRANITE IN THE LOBBY"))
    ranked = module.normalise_sheet_number

    def publish_meanwhile(number: str) -> str:
        # What a search calls between its rankings and its hits.
        monkeypatch.undo()
        with bench.database.connect() as conn:
            replace(bench, conn=conn).index(document)
        return ranked(number)

    monkeypatch.setattr(module, "normalise_sheet_number", publish_meanwhile)
    hits = bench.search("a-101 lobby")
    assert numbers(hits)[0] == "A-101"
    assert len(hits) == 4
    assert numbers(bench.search("lobby")) == ["Q-901"]


def test_vectors_of_another_embedder_are_not_compared(bench: Bench, tmp_path: Path) -> None:
    bench.index(sheet_pdf(tmp_path / "set.pdf", *SHEETS))
    bench.conn.execute("update embedders set identity = 'another', dimensions = 3")
    bench.conn.execute("update chunks set embedding = '[1,0,0]'")
    assert bench.search("terrazzo", mode=Mode.VECTOR) == []
    assert bench.search("terrazzo")[0].sheet_number == "A-101"


# What a hit shows


def test_a_hit_says_where_it_is_and_marks_the_words(bench: Bench, tmp_path: Path) -> None:
    row = bench.index(sheet_pdf(tmp_path / "set.pdf", *SHEETS))
    hit = bench.search("parapet scupper")[0]
    assert (hit.file_id, hit.file, hit.project) == (row["file_id"], "set.pdf", "default")
    assert (hit.page, hit.page_count, hit.sheet_number) == (3, 4, "A1.01")
    assert (hit.sheet_title, hit.sheet_source, hit.label) == ("ROOF PLAN", "label", "A1.01")
    marked = [hit.snippet[start:stop] for start, stop in hit.marks]
    # Stemmed: the word that was asked for and the word that was found may differ.
    assert marked == ["PARAPET", "SCUPPERS"]
    assert "\n" not in hit.snippet


def test_a_snippet_that_looks_like_markup_is_text(bench: Bench, tmp_path: Path) -> None:
    said = "USE <b>GALVANIZED</b> & [red]PAINTED[/red] \\x02 ANCHORS"
    bench.index(write_pdf(tmp_path / "set.pdf", [PdfPage(text(said, 40, 700))]))
    hit = bench.search("galvanized anchors")[0]
    assert "GALVANIZED</b> & [red]PAINTED[/red] \\x02" in hit.snippet
    assert [hit.snippet[a:b] for a, b in hit.marks] == ["GALVANIZED", "ANCHORS"]


def test_words_in_angle_brackets_and_between_slashes_are_words(
    bench: Bench, tmp_path: Path
) -> None:
    said = "<DEMOLISH EXISTING WALL> SUPPLY/RETURN DIFFUSER"
    bench.index(write_pdf(tmp_path / "set.pdf", [PdfPage(text(said, 40, 700))]))
    for query in ("demolish", "existing wall", "supply", "return", "<demolish>", "supply/return"):
        [hit] = bench.search(query, mode=Mode.TEXT)
        # A snippet begins with a word.
        assert hit.snippet == said.removeprefix("<")
        assert hit.marks


# Whatever is asked


@pytest.mark.parametrize(
    "query",
    [
        "'",
        "''",
        '"roof plan',
        "roof' plan",
        "o'brien",
        "a & b | !c",
        "roof <-> plan",
        "roof:* & plan:B",
        "(((",
        "\\",
        "%_%",
        "$1 %s %(query)s {} {0}",
        "roof\x00 plan",
        "\x00",
        "\ud800roof\udfff",
        "the of and a",
        "кровля и парапет",
        "屋顶平面图",
        "🏗️ roof",
        "x" * 10_000,
        "roof " * 2_000,
        "a/b/c http://example.com/x?y=z user@example.com",
        "1e400 -- ; drop table files",
        "\n\t roof \r\n",
    ],
    ids=lambda query: ascii(query)[:24],
)
def test_odd_characters_are_searched_for_like_any(bench: Bench, tmp_path: Path, query: str) -> None:
    bench.index(sheet_pdf(tmp_path / "set.pdf", *SHEETS))
    vector = bench.embedder.embed([clean_query(query)])[0]
    for mode in Mode:
        scope = Scope(bench.workspace, bench.project)
        ask = partial(
            search,
            bench.conn,
            scope,
            query,
            vectors={bench.embedder.identity: vector},
            mode=mode,
        )
        if not clean_query(query):
            with pytest.raises(PlanroomError, match="empty"):
                ask()
            continue
        hits = ask()
        if "roof" in query and mode is not Mode.VECTOR:
            assert "A1.01" in numbers(hits)
    assert bench.conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert scalar(bench.conn, "select count(*) from files") == 1


def test_cyrillic_is_found(bench: Bench, tmp_path: Path) -> None:
    said = "План кровли. Парапет".encode("utf-16-be").hex()
    mark = f"<< /Type /Annot /Subtype /Square /Rect [0 0 9 9] /Contents <FEFF{said}> >>"
    bench.index(write_pdf(tmp_path / "set.pdf", [PdfPage(annotations=(mark,))]))
    hit = bench.search("парапет", mode=Mode.TEXT)[0]
    assert [hit.snippet[a:b] for a, b in hit.marks] == ["Парапет"]


def test_nothing_asked_is_refused_and_nothing_found_is_no_error(bench: Bench) -> None:
    with pytest.raises(PlanroomError) as refused:
        bench.search("  ")
    assert refused.value.code == "query_empty"
    assert bench.search("roof") == []


def test_the_order_is_the_same_each_time(bench: Bench, tmp_path: Path) -> None:
    for name in "abcdef":
        bench.index(sheet_pdf(tmp_path / f"{name}.pdf", *SHEETS))
    first = bench.search("floor plan", k=24)
    assert len(first) == 24
    # Rows move about in the table, as they do in any that is written to.
    bench.conn.execute("update chunks set tokens = tokens where chunk_index % 2 = 0")
    bench.conn.execute("vacuum full chunks")
    assert bench.search("floor plan", k=24) == first
    assert bench.search("floor plan", k=7) == first[:7]
