# SPDX-License-Identifier: Apache-2.0
"""Only ``format/`` formats and parses keys, manifests, claims, farewells and resumptions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from testkit import REPOSITORY

DAEMON = REPOSITORY / "daemon"
PACKAGE = DAEMON / "swansong_bucket" / "format"
LOCKS = DAEMON / "swansong_bucket" / "retention" / "locks.py"
"""Chooses a retention by the folder of a key."""
FORMAT = re.compile(
    r"(?:^|/)(?:commits|generations|data|farewells|resumptions|probes)/"  # prefixes of keys
    r"|^0(?:5|8|12)d$"  # widths of the numbers in keys
    r"|-of-(?![a-z])"  # a page has the heading "health-of-a-source"
    r"|^swansong-(?:manifest|claim|farewell|resumption)$"
)


def found(text: str) -> Iterator[str]:
    """String constants that are pieces of the format, docstrings left out."""
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings and FORMAT.search(node.value):
            yield node.value


def test_no_other_module_has_a_piece_of_the_format() -> None:
    """Other modules call :mod:`swansong_bucket.format`."""
    others = [path for path in DAEMON.rglob("*.py") if path.parent != PACKAGE and path != LOCKS]
    assert len(others) > 100
    pieces = {str(path): list(found(path.read_text(encoding="utf-8"))) for path in others}
    assert {path: strings for path, strings in pieces.items() if strings} == {}


def test_the_check_recognises_the_real_modules() -> None:
    """Each module of the package that has pieces of the format would be reported elsewhere."""
    for name in ("keys", "manifest", "claim", "farewell", "resumption"):
        assert list(found((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))), name
