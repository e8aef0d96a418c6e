"""Properties of the code itself: imports point down, functions fit a screen, SQL is written out.

A rule that lives here is one that nobody has to remember in a review.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 70
SOURCE_ROOTS = ("queue", "indexer")
EMPTY_NAMES = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}

# A module may import only from floors below its own. A new module needs a place here.
FLOORS: list[set[str]] = [
    # leasequeue: pure, then SQL with one function a transition, then the loop.
    {"leasequeue.errors", "leasequeue.backoff", "leasequeue.crashpoint", "leasequeue.outage"},
    {"leasequeue.abort", "leasequeue.migrate", "leasequeue.timed_connection"},
    {
        "leasequeue.lease",
        "leasequeue.workspaces",
        "leasequeue.connections",
        "leasequeue.workers",
        "leasequeue.throttle",
        "leasequeue.maintenance",
    },
    {"leasequeue.runs", "leasequeue.settle", "leasequeue.evict"},
    {"leasequeue.keeper"},
    {"leasequeue.poll"},
    {"leasequeue.worker"},
    {"leasequeue.stages"},
    {"leasequeue.serve"},
    {"leasequeue"},
    # planroom: pure.
    {"planroom.errors", "planroom.model", "planroom.config", "planroom.version"},
    {
        "planroom.chunk",
        "planroom.fingerprint",
        "planroom.log",
        "planroom.extract.annotation",
        "planroom.extract.frame",
        "planroom.extract.limits",
        "planroom.extract.text",
    },
    {"planroom.extract.sheet"},
    # One outside thing each.
    {
        "planroom.blobs",
        "planroom.embedded",
        "planroom.migrate",
        "planroom.embed.embedder",
        "planroom.extract.outline",
        "planroom.extract.reader",
    },
    {
        "planroom.database",
        "planroom.embed.hashing",
        "planroom.embed.minilm",
        "planroom.embed.openai",
        "planroom.embed.static",
        "planroom.extract.pdfium",
    },
    {"planroom.extract.fallback"},
    {"planroom.extract.child"},
    {"planroom.embed", "planroom.extract"},
    # SQL for what is stored.
    {
        "planroom.chunks",
        "planroom.ingestions",
        "planroom.orphans",
        "planroom.pages",
        "planroom.presence",
        "planroom.projects",
        "planroom.search",
        "planroom.status",
        "planroom.vector_index",
    },
    {"planroom.files", "planroom.units"},
    {"planroom.intake"},
    # What is done with it.
    {"planroom.connectors.connector", "planroom.ingest", "planroom.verify"},
    {"planroom.connectors.folder"},
    {"planroom.connectors"},
    {"planroom.sync"},
    {"planroom.stages"},
    {"planroom.room"},
    {"planroom"},
    # The command line: its parts, then its commands.
    {
        "planroom.doctor",
        "planroom.supervise",
        "planroom.cli.coverage",
        "planroom.cli.failure",
        "planroom.cli.opening",
        "planroom.cli.option",
        "planroom.cli.output",
        "planroom.cli.paths",
    },
    {"planroom.cli.progress"},
    {"planroom.cli.table"},
    {
        "planroom.cli.documents",
        "planroom.cli.fleet",
        "planroom.cli.indexing",
        "planroom.cli.searching",
        "planroom.cli.showing",
        "planroom.cli.sources",
        "planroom.cli.upkeep",
    },
    {"planroom.cli.app"},
    {"planroom.cli"},
    {"planroom.__main__"},
]
FLOOR = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


SOURCES = {
    module_name(path, ROOT / root): path
    for root in SOURCE_ROOTS
    for path in sorted((ROOT / root).rglob("*.py"))
}
PACKAGES = sorted(name for name, path in SOURCES.items() if path.name == "__init__.py")
ALL_FILES = sorted(
    path
    for folder in (*SOURCE_ROOTS, "tests", "fixtures", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_modules(tree: ast.Module) -> set[str]:
    """Our modules that are imported anywhere in a file, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & SOURCES.keys()
            found |= inner or {node.module}
    return {name for name in found if name.split(".")[0] in {"planroom", "leasequeue"}}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_every_module_has_its_floor() -> None:
    homeless = sorted(SOURCES.keys() - FLOOR.keys())

    assert homeless == [], "give each a place in FLOORS, below all that import it"


def test_every_floor_names_a_module_that_exists() -> None:
    assert sorted(FLOOR.keys() - SOURCES.keys()) == []


@pytest.mark.parametrize("module", sorted(SOURCES.keys() & FLOOR.keys()))
def test_imports_point_down(module: str) -> None:
    found = imported_modules(parse(SOURCES[module]))

    upwards = {name for name in found if FLOOR.get(name, -1) >= FLOOR[module]}

    assert upwards == set()


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_planroom_knows_the_engine_by_its_public_names_only(module: str) -> None:
    public = set(importlib.import_module("leasequeue").__all__)
    used: set[str] = set()
    for node in ast.walk(parse(SOURCES[module])):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "leasequeue":
                used |= {alias.name for alias in node.names} - public
            elif node.module.startswith("leasequeue."):
                used.add(node.module)
        elif isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names if alias.name.startswith("leasequeue.")}
    if module.startswith("planroom"):
        assert used == set()


@pytest.mark.parametrize("module", sorted(name for name in SOURCES if name.startswith("lease")))
def test_the_engine_knows_nothing_of_planroom(module: str) -> None:
    found = imported_modules(parse(SOURCES[module]))

    assert {name for name in found if name.startswith("planroom")} == set()


@pytest.mark.parametrize("path", ALL_FILES, ids=named)
def test_a_file_opens_by_saying_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(parse(path))


@pytest.mark.parametrize("path", ALL_FILES, ids=named)
def test_functions_fit_a_screen(path: Path) -> None:
    lengths = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions(parse(path))}

    assert {name: n for name, n in lengths.items() if n > FUNCTION_LINES_MAX} == {}


@pytest.mark.parametrize("path", ALL_FILES, ids=named)
def test_a_module_is_named_for_what_it_holds(path: Path) -> None:
    assert path.stem not in EMPTY_NAMES
    assert path.parent.name not in EMPTY_NAMES


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_is_listed_in_order(package: str) -> None:
    tree = parse(SOURCES[package])
    exported: list[str] = getattr(importlib.import_module(package), "__all__", [])

    assert exported == sorted(exported, key=in_order)
    assert set(exported) == public_names(tree)


def in_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: the order that ruff puts imports in."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def public_names(tree: ast.Module) -> set[str]:
    """What an `__init__` imports from its own package by name, or defines, for others to use."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.If):  # what is only imported for the types, and given lazily
            lazy = [n for n in node.body if isinstance(n, ast.ImportFrom)]
            given = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
            if "__getattr__" in given:
                names |= {alias.name for n in lazy for alias in n.names}
        elif isinstance(node, ast.ImportFrom) and is_ours(node):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


def is_ours(node: ast.ImportFrom) -> bool:
    return (node.module or "").split(".")[0] in {"planroom", "leasequeue"}


# ------------------------------------------------------------------------------------- SQL

SENDING = {"execute", "executemany", "copy", "stream", "SQL"}
VERBS = re.compile(
    r"\s*(?:--[^\n]*\n\s*)*(select|insert|update|delete|with|create|alter|drop)\b", re.I
)


def is_assembled(node: ast.expr) -> bool:
    """Whether a string is put together from parts: f-string, %, + or .format()."""
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            return True
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod | ast.Add):
            return any(
                isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(part)
            )
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            of_text = isinstance(part.func.value, ast.Constant)
            if of_text and part.func.attr in {"format", "replace", "join"}:
                return True
    return False


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_sql_is_written_out_and_never_assembled(module: str) -> None:
    assembled: list[str] = []
    for node in ast.walk(parse(SOURCES[module])):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr in SENDING and node.args and is_assembled(node.args[0]):
            assembled.append(ast.unparse(node.args[0]))
    assert assembled == []


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_sql_is_lower_case(module: str) -> None:
    loud: list[str] = []
    for node in parse(SOURCES[module]).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found = VERBS.match(str(node.value.value))
            if found and not found[1].islower():
                loud.append(ast.unparse(node))
    assert loud == []


# ------------------------------------------------- the rules themselves can be broken


def test_the_checks_find_what_they_look_for() -> None:
    def assembled(code: str) -> bool:
        call = ast.parse(code, mode="eval").body
        assert isinstance(call, ast.Call)
        return is_assembled(call.args[0])

    assert assembled("conn.execute(f'select * from {table}')")
    assert assembled("conn.execute('select * from %s' % table)")
    assert assembled("conn.execute('select * from ' + table)")
    assert assembled("conn.execute('select {}'.format(x))")
    assert assembled("conn.execute(f'select {x}'.encode())")
    assert not assembled("conn.execute(_CLAIM)")
    assert not assembled("conn.execute('select 1')")
    assert VERBS.match("\n-- why\nSELECT 1")
    assert imported_modules(ast.parse("def f():\n    from planroom import ingest")) == {
        "planroom.ingest"
    }
