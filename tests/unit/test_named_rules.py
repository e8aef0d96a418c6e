"""Every numbered rule and case is named by a test, so that a bug report finds its test.

Rules L1 to L18 are those of the lease protocol, in ARCHITECTURE.md; cases Q1 to Q27 and D1 to D27
are failures that users of other systems met. A test names one in its own name (`test_q5_…`), or in
its docstring or its module's (`Q5`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NUMBERS = [("L", 18), ("Q", 27), ("D", 27)]
NAMES = [f"{letter}{number}" for letter, count in NUMBERS for number in range(1, count + 1)]


def named_in(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text("utf-8"))
    yield from re.findall(r"\b[LQD]\d+\b", ast.get_docstring(tree) or "")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from re.findall(r"\b[LQD]\d+\b", ast.get_docstring(node) or "")
            words = node.name.upper().split("_")
            yield from (word for word in words if re.fullmatch(r"[LQD]\d+", word))


NAMED = {
    name
    for path in sorted(TESTS.rglob("test_*.py"))
    if path != Path(__file__)
    for name in named_in(path)
}


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_or_case_is_named_by_a_test(name: str) -> None:
    assert name in NAMED
