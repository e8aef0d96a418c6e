"""What is shipped: the wheel, the source distribution, and an installation of the wheel."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ["pyproject.toml", "README.md", "LICENSE", "indexer", "queue", "migrations"]
SQL = {path.name for path in (ROOT / "migrations").iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel, made by way of the source distribution, and that; no network."""
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, source / name)
    # What must not be shipped is there too.
    (source / "tests").mkdir()
    (source / "tests" / "test_nothing.py").write_text("")
    dist = tmp_path_factory.mktemp("dist")
    build(source, dist, "sdist")
    (archive,) = dist.glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("unpacked")
    # Python's own warns or fails, by its version, about an argument that others lack.
    subprocess.run(["tar", "-xzf", archive, "-C", unpacked], check=True)
    (again,) = unpacked.iterdir()
    build(again, dist, "wheel")
    return dist


def build(source: Path, target: Path, kind: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)


def names_in(dist: Path) -> set[str]:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_both_packages_with_every_module(built: Path) -> None:
    names = names_in(built)

    for root in (ROOT / "indexer", ROOT / "queue"):
        modules = {path.relative_to(root).as_posix() for path in root.rglob("*.py")}
        assert modules <= names
    assert {"planroom/py.typed", "leasequeue/py.typed"} <= names


def test_the_wheel_holds_the_migrations_of_each_package(built: Path) -> None:
    names = names_in(built)

    assert {n for n in names if n.startswith("planroom/migrations/")} == {
        f"planroom/migrations/{name}" for name in SQL
    }
    assert {n for n in names if n.startswith("leasequeue/migrations/")} == {
        f"leasequeue/migrations/{name}" for name in SQL if name.endswith("_engine.sql")
    }


def test_the_wheel_holds_nothing_else(built: Path) -> None:
    tops = {name.split("/")[0] for name in names_in(built)}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"planroom", "leasequeue"}
    assert not {name for name in names_in(built) if name.endswith((".pyc", "/__init__.pyi"))}


USE = """
import queue, sys
from pathlib import Path
import leasequeue, planroom
from planroom.migrate import migration_files
here = Path(sys.prefix)
for module in (leasequeue, planroom):
    assert here in Path(module.__file__).parents, module.__file__
assert all(here in Path(str(file)).parents for file in migration_files())
assert queue.__name__ in sys.stdlib_module_names and here not in Path(queue.__file__).parents
print(",".join(file.name for file in migration_files()))
print(",".join(m.name for m in leasequeue.engine_migrations()))
"""


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_and_a_folder_of_its_own(
    built: Path, tmp_path: Path
) -> None:
    """Dependencies come from this environment, so that no network is needed."""
    (wheel,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, wheel], check=True, capture_output=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # A line that begins with `import` is run, so this adds the folder without its .pth files, one
    # of which leads to the checkout.
    borrowed = "".join(
        f"import sys; sys.path.append({path!r})\n" for path in site.getsitepackages()
    )
    (packages / "borrowed.pth").write_text(borrowed)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    said = subprocess.check_output([python, "-c", USE], cwd=elsewhere, text=True).splitlines()
    assert said[0].split(",") == sorted(SQL)
    assert said[1].split(",") == sorted(name for name in SQL if name.endswith("_engine.sql"))
    command = tmp_path / "venv" / "bin" / "planroom"
    shown = subprocess.check_output([command, "--help"], cwd=elsewhere, text=True)
    assert "index" in shown
