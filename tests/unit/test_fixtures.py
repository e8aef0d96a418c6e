"""The drawing-set generator keeps its word: same bytes, and pages that hold what it says."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pikepdf
import pypdfium2
import pytest
from pypdf import PdfReader

from support.drawing_set import FIXTURES, QUESTIONS, SetInfo, collisions, main, make_set

_SPACE = re.compile(r"\s+")


@pytest.fixture(scope="module")
def permit_set(tmp_path_factory: pytest.TempPathFactory) -> SetInfo:
    return make_set(tmp_path_factory.mktemp("drawings") / "permit.pdf")


def _texts(path: Path) -> list[str]:
    """What PDFium reads on each page, without white space: it may break lines where it likes."""
    document = cast("Any", pypdfium2).PdfDocument(str(path))
    found: list[str] = []
    try:
        for page in document:
            text = page.get_textpage().get_text_range()
            found.append(_SPACE.sub("", text).replace("\ufffe", "-"))
            page.close()
    finally:
        document.close()
    return found


def _contents(path: Path) -> list[bytes]:
    with pikepdf.open(path) as pdf:
        return [bytes(page.obj["/Contents"].read_bytes()) for page in pdf.pages]


def test_same_arguments_give_the_same_bytes_in_other_processes_and_hash_seeds(
    tmp_path: Path,
) -> None:
    digests: set[bytes] = set()
    for seed in ("1", "77"):
        out = tmp_path / f"set-{seed}.pdf"
        command = [sys.executable, str(FIXTURES / "make_drawing_set.py"), str(out)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([*command, "--sheets", "12"], check=True, env=environment, timeout=120)
        digests.add(hashlib.sha256(out.read_bytes()).digest())
    made = make_set(tmp_path / "here.pdf", sheets=12)
    digests.add(hashlib.sha256(made.path.read_bytes()).digest())
    assert len(digests) == 1


def test_another_seed_gives_another_set(tmp_path: Path) -> None:
    first = make_set(tmp_path / "a.pdf", sheets=5, seed=1, scans=1)
    second = make_set(tmp_path / "b.pdf", sheets=5, seed=2, scans=1)
    assert first.path.read_bytes() != second.path.read_bytes()


def test_every_string_of_the_truth_is_read_from_its_page(permit_set: SetInfo) -> None:
    read = _texts(permit_set.path)
    assert len(read) == len(permit_set.pages) == 24
    for page, text in zip(permit_set.pages, read, strict=True):
        missing = [s for s in (*page.words, *page.texts) if _SPACE.sub("", s) not in text]
        assert missing == [], page.number


def test_scanned_pages_have_no_text_and_differ(permit_set: SetInfo) -> None:
    read = _texts(permit_set.path)
    scanned = [page for page in permit_set.pages if page.scanned]
    assert len(scanned) == 2
    assert {read[page.index] for page in scanned} == {""}
    with pikepdf.open(permit_set.path) as pdf:
        pictures = {
            pdf.pages[page.index].obj["/Resources"]["/XObject"]["/Im0"].read_raw_bytes()
            for page in scanned
        }
    assert len(pictures) == 2


def test_pages_have_the_size_and_the_turn_that_the_truth_says(permit_set: SetInfo) -> None:
    document = cast("Any", pypdfium2).PdfDocument(str(permit_set.path))
    sizes = [document.get_page_size(place) for place in range(len(document))]
    turns = [document[place].get_rotation() for place in range(len(document))]
    document.close()
    assert [(page.width, page.height) for page in permit_set.pages] == sizes
    assert [page.rotation for page in permit_set.pages] == turns
    assert set(turns) == {0, 90, 180, 270}
    assert {size[0] for size in sizes} == {2592.0, 3024.0}


def test_no_two_strings_of_a_sheet_overlap_and_none_leaves_the_border(tmp_path: Path) -> None:
    made = make_set(tmp_path / "large.pdf", sheets=110, scans=0, revision=9)
    for page in made.pages:
        assert collisions(page.letterings) == [], page.number
        for box, text in ((entry.box, entry.text) for entry in page.letterings):
            inside = box is None or (
                box[0] >= 90
                and box[1] >= 36
                and box[2] <= page.width - 36
                and box[3] <= page.height - 36
            )
            assert inside, (page.number, text)


def test_labels_and_bookmarks_name_the_sheets(permit_set: SetInfo) -> None:
    reader = PdfReader(permit_set.path)
    assert reader.page_labels == [page.number for page in permit_set.pages]
    with pikepdf.open(permit_set.path) as pdf, pdf.open_outline() as outline:
        titles = [str(entry.title) for group in outline.root for entry in group.children]
    assert titles == [page.bookmark for page in permit_set.pages]


def test_a_set_without_labels_and_bookmarks_has_neither(tmp_path: Path) -> None:
    made = make_set(tmp_path / "bare.pdf", sheets=4, labels=False, bookmarks=False)
    with pikepdf.open(made.path) as pdf:
        assert "/PageLabels" not in pdf.Root
        assert "/Outlines" not in pdf.Root
    assert {(page.label, page.bookmark) for page in made.pages} == {(None, None)}


def test_stroke_text_is_only_in_the_annotations(permit_set: SetInfo) -> None:
    read = _texts(permit_set.path)
    said = 0
    with pikepdf.open(permit_set.path) as pdf:
        for page in permit_set.pages:
            entries = list(pdf.pages[page.index].obj.get("/Annots", pikepdf.Array()))
            assert tuple(str(entry["/Contents"]) for entry in entries) == page.strokes
            for entry in entries:
                assert (entry["/Subtype"], str(entry["/T"])) == ("/Square", "AutoCAD SHX Text")
                assert _SPACE.sub("", str(entry["/Contents"])) not in read[page.index]
                said += 1
    assert said >= 6
    assert any("ВЫХОД" in text for page in permit_set.pages for text in page.strokes)


def test_a_revision_changes_three_sheets_and_no_other(permit_set: SetInfo, tmp_path: Path) -> None:
    before = permit_set
    for revision in (1, 2):
        after = make_set(tmp_path / f"r{revision}.pdf", revision=revision)
        drawn = zip(_contents(before.path), _contents(after.path), after.pages, strict=True)
        changed = {page.number for old, new, page in drawn if old != new}
        read = zip(_texts(before.path), _texts(after.path), after.pages, strict=True)
        assert {page.number for old, new, page in read if old != new} == changed
        assert changed == set(after.changed)
        assert len(changed) == 3
        assert {p.number for p in after.pages if p.revision == revision} == changed
        assert [p.number for p in before.pages] == [p.number for p in after.pages]
        before = after


def test_the_same_general_notes_stand_on_many_sheets_d20(permit_set: SetInfo) -> None:
    note = "1200 HARBOR POINT ROAD, PORT ALDEN"
    repeated = "THE CONTRACTOR IS SOLELY RESPONSIBLE FOR MEANS, METHODS,"
    for line in (note, repeated):
        assert sum(line in page.texts for page in permit_set.pages) >= 20


def test_every_question_is_about_a_sheet_of_the_default_set(permit_set: SetInfo) -> None:
    assert permit_set.questions == QUESTIONS
    drawn = {page.number for page in permit_set.pages if not page.scanned}
    assert set(QUESTIONS.values()) == drawn


def test_paths_decide_how_dense_a_sheet_is(tmp_path: Path) -> None:
    light = make_set(tmp_path / "light.pdf", sheets=3, scans=0)
    dense = make_set(tmp_path / "dense.pdf", sheets=3, scans=0, paths=30_000)
    assert all(page.paths >= 30_000 for page in dense.pages)
    assert [page.texts for page in light.pages] == [page.texts for page in dense.pages]
    assert dense.path.stat().st_size > 5 * light.path.stat().st_size


def test_a_large_set_has_as_many_sheets_as_asked_each_with_its_own_number(tmp_path: Path) -> None:
    made = make_set(tmp_path / "many.pdf", sheets=130, scans=0, paths=0)
    assert len({page.number for page in made.pages}) == 130


def test_too_few_sheets_for_a_revision_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="three drawn sheets"):
        make_set(tmp_path / "no.pdf", sheets=3, scans=0, revision=1)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "named.pdf"
    assert main([str(out), "--sheets", "2", "--scans", "0", "--project", "Été Clinic ≤ 5"]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 2 sheets")
    assert "ÉtéClinic≤5" in _texts(out)[0]


def test_the_readme_lists_the_questions() -> None:
    readme = (FIXTURES / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (.+) \| ([A-Z]+-\d+) \|$", readme, re.MULTILINE)
    assert dict(listed) == QUESTIONS
