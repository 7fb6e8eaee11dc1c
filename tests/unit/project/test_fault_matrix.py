# SPDX-License-Identifier: Apache-2.0
"""The fault matrix and the marks of the tests agree."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache

from testkit import REPOSITORY

TESTS = REPOSITORY / "tests"
MATRIX = tomllib.loads((TESTS / "faults.toml").read_text())


LAYERS = {
    "unit": "S",
    "simulation": "S",
    "fuzz": "SC",
    "hooks": "SP",
    "hooks_frameworks": "P",
    "hooks_jax": "P",
    "hooks_ray": "P",
    "monitoring": "SP",
    "contract": "C",
    "process": "P",
    "netns": "N",
    "system": "V",
    "vm": "V",
}
"""The layers that the tests of a directory may show.  Tests of the hooks are pure, or start processes."""


def marked(source: str) -> Iterator[str]:
    """The rows in ``pytest.mark.fault(...)`` anywhere in a file."""
    for arguments in re.findall(r"\bpytest\.mark\.fault\(([^)]*)\)", source):
        yield from re.findall(r'"([^"]+)"', arguments)


@cache
def covered() -> dict[str, set[str]]:
    """The test files that cover each row, relative to the directory of the tests."""
    found: dict[str, set[str]] = {}
    for path in TESTS.rglob("*.py"):
        for row in marked(path.read_text()):
            found.setdefault(row, set()).add(str(path.relative_to(TESTS)))
    return found


def test_every_row_has_a_fault_and_layers() -> None:
    """Each row has a description and its layers, and no unknown field."""
    for row, facts in MATRIX.items():
        assert facts["fault"], row
        assert facts["layers"], row
        assert facts.keys() == {"fault", "layers"}, row


def test_every_marked_row_exists() -> None:
    unknown = {row: files for row, files in covered().items() if row not in MATRIX}
    assert not unknown


def test_every_row_is_covered() -> None:
    assert not MATRIX.keys() - covered().keys()


def test_every_claimed_layer_of_a_covered_row_has_a_test() -> None:
    """A claim without a test would count as coverage that does not exist."""
    wrong = {}
    for row, files in covered().items():
        shown = {layer for file in files for layer in LAYERS[file.partition("/")[0]]}
        if unshown := set(MATRIX[row]["layers"].split()) - shown:
            wrong[row] = sorted(unshown)
    assert not wrong, "mark a test in each of these layers, or remove the claim"
