"""The engine's README: its worker is run as it stands, and its names are all public."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg

import leasequeue
from support.engine import await_true

README = Path(leasequeue.__file__).parent / "README.md"


def _example() -> str:
    [block] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return block


def test_the_worker_of_the_readme_runs_retries_and_finishes(
    empty_database_url: str, tmp_path: Path
) -> None:
    """On an empty database; killed by SIGTERM once its job is done, it exits 0."""
    script = tmp_path / "worker.py"
    script.write_text(_example())
    process = subprocess.Popen([sys.executable, script, empty_database_url])
    try:
        with psycopg.connect(empty_database_url, autocommit=True) as conn:
            await_true(lambda: _is(conn, "queued", retried=True), "it was not retried")
            conn.execute("update connection_runs set queued_at = now()")
            await_true(lambda: _is(conn, "succeeded"), "it did not finish")
            rows = conn.execute("select sheet from sheets_seen order by sheet").fetchall()
            assert rows == [(sheet,) for sheet in range(400)]
            outcomes = conn.execute("select outcome from run_attempts order by attempt").fetchall()
            assert outcomes == [("retried",), ("succeeded",)]
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def _is(conn: psycopg.Connection[Any], status: str, *, retried: bool = False) -> bool:
    there = conn.execute("select to_regclass('sheets_seen') is not null").fetchone()
    if there != (True,):
        return False
    row = conn.execute("select status, failures > 0 from connection_runs").fetchone()
    return row is not None and row[0] == status and (row[1] or not retried)


def test_the_example_is_about_thirty_lines() -> None:
    lines = [line for line in _example().splitlines() if line.strip()]
    assert len(lines) <= 32


def test_the_readme_names_every_rule_and_imports_public_names_only() -> None:
    text = README.read_text()
    assert [f"L{n}" for n in range(1, 19)] == re.findall(r"^\| (L\d+) \|", text, re.MULTILINE)
    imported = re.findall(r"^from leasequeue import (.*)$", _example(), re.MULTILINE)
    names = {name.strip() for line in imported for name in line.split(",")}
    assert names <= set(leasequeue.__all__)
    assert "from leasequeue." not in _example()


def test_the_readme_names_modules_and_functions_that_exist() -> None:
    cells = re.findall(r"^\| L\d+ \|.*\| (.*?) \|$", README.read_text(), re.MULTILINE)
    folder = README.parent
    for name in re.findall(r"`([a-z_]+)(?:\.([A-Za-z_]+))?`", " ".join(cells)):
        module, function = name
        if (folder / f"{module}.py").exists():
            assert not function or re.search(
                rf"^(def {function}\(|{function}\b)", (folder / f"{module}.py").read_text(), re.M
            ), name
        else:
            assert module in leasequeue.__all__, name
