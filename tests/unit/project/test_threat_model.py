# SPDX-License-Identifier: Apache-2.0
"""The threat model names existing tests, and every security row of the fault matrix is covered."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from testkit import REPOSITORY
from tests.unit.project.test_fault_matrix import MATRIX, covered

TESTS = REPOSITORY / "tests"
PAGE = (TESTS.parent / "docs" / "threat-model.md").read_text()
NAMED = re.findall(r"`([a-z_/]+\.py)::(\w+)`", PAGE)


def functions(path: Path) -> set[str]:
    """Names of the tests in a file."""
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists() -> None:
    """A renamed test must be renamed on the page."""
    assert len(NAMED) > 50
    missing = [
        f"{file}::{name}"
        for file, name in NAMED
        if not (TESTS / file).is_file() or name not in functions(TESTS / file)
    ]
    assert not missing


def test_every_impossible_action_has_a_test() -> None:
    """Each row of the tables of what an actor cannot do names a test."""
    tables = PAGE.split("\n## Limits of a trainer")[1]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and "---" not in line]
    bare = [row for row in rows if "cannot | tests" not in row and ".py" not in row]
    assert not bare


def test_no_security_row_of_the_fault_matrix_is_open() -> None:
    """Each of S1 to S27 has a test."""
    rows = [row for row in MATRIX if re.fullmatch(r"S[0-9]+", row)]
    assert len(rows) == 27
    assert [row for row in rows if row not in covered() or "open" in MATRIX[row]] == []
