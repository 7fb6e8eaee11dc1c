# SPDX-License-Identifier: Apache-2.0
"""Every test that a page names exists, and every security row of the fault matrix is covered."""

from __future__ import annotations

import re
from functools import cache

from testkit import REPOSITORY
from tests.unit.project.test_fault_matrix import MATRIX

TESTS, DOCS = REPOSITORY / "tests", REPOSITORY / "docs"


@cache
def functions(file: str) -> set[str]:
    """Names of the tests in a file."""
    path = TESTS / file
    text = path.read_text() if path.is_file() else ""
    return set(re.findall(r"^ *def (test_\w+)\(", text, re.MULTILINE))


def test_every_test_that_a_page_names_exists() -> None:
    """A renamed test must be renamed on the page."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    named = re.findall(r"`([a-z0-9_/]+\.py)::(\w+)`", pages)
    assert len(named) > 75
    assert [f"{file}::{name}" for file, name in named if name not in functions(file)] == []


def test_every_impossible_action_has_a_test() -> None:
    """Each row of the tables of what an actor cannot do names a test."""
    tables = (DOCS / "threat-model.md").read_text().split("\n## Limits of a trainer")[1]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and "---" not in line]
    bare = [row for row in rows if "cannot | tests" not in row and ".py" not in row]
    assert not bare


def test_no_security_row_of_the_fault_matrix_is_open() -> None:
    """Each of S1 to S27 has a test."""
    rows = [row for row in MATRIX if re.fullmatch(r"S[0-9]+", row)]
    assert len(rows) == 27
    assert [row for row in rows if "open" in MATRIX[row]] == []
