"""Which files a command line names, and under which names they are entered."""

from __future__ import annotations

from pathlib import Path

import pytest

from planroom.cli.paths import find_named


@pytest.fixture(autouse=True)
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a/x.pdf", "a/deep/y.PDF", "b/x.pdf", "c/b/x.pdf", "a/.hidden.pdf", "a/note.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%PDF-1.7")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(*paths: str) -> list[str]:
    return [file.name for file in find_named([Path(path) for path in paths])[0]]


def test_a_file_has_its_own_name_and_a_folder_s_files_have_theirs_below_it() -> None:
    assert names("a/x.pdf") == ["x.pdf"]
    assert names("a") == ["a/deep/y.PDF", "a/x.pdf"]


def test_of_one_name_each_has_as_much_of_its_path_as_tells_them_apart() -> None:
    assert names("a/x.pdf", "b/x.pdf") == ["a/x.pdf", "b/x.pdf"]
    assert names("b/x.pdf", "c/b/x.pdf", "a/deep/y.PDF") == [
        *(f"{Path.cwd().name}/b/x.pdf", "c/b/x.pdf", "y.PDF")
    ]
    assert names("b", "c/b") == [f"{Path.cwd().name}/b/x.pdf", "c/b/x.pdf"]


def test_a_name_does_not_depend_on_how_the_path_is_written() -> None:
    assert names("./a/../a/x.pdf", str(Path("b/x.pdf").resolve())) == names("a/x.pdf", "b/x.pdf")


def test_a_file_that_is_named_twice_is_taken_once() -> None:
    assert names("a/x.pdf", "a", "a/deep/../x.pdf") == ["x.pdf", "a/deep/y.PDF"]


def test_a_folder_without_pdfs_is_refused_and_the_others_are_not(tree: Path) -> None:
    (tree / "empty").mkdir()

    found, refused = find_named([Path("empty"), Path("a/x.pdf")])

    assert [file.name for file in found] == ["x.pdf"]
    assert [(str(one.path), one.error.code) for one in refused] == [("empty", "no_pdf")]
