# SPDX-License-Identifier: Apache-2.0
"""docs/concepts.md defines each invariant that code, tests and pages cite."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from swansong_bucket.model import Verdict
from swansongd.core.planner import PlanKind

from testkit import REPOSITORY

TESTS = REPOSITORY / "tests"
PAGE = (REPOSITORY / "docs" / "concepts.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([IV][0-9]+) \| .+ \| `([a-z0-9_/]+\.py)::(\w+)` \|$", re.MULTILINE)
CITED = re.compile(r"(?<![\w-])([IV][0-9]{1,2})(?![\w\"])")
"""Does not match ``"I64"``, a type of safetensors, which is always quoted."""
CITING = ("daemon", "training_hooks", "tests", "testkit", "demo", "bench", "docs")


def citing_files() -> Iterator[Path]:
    for directory in CITING:
        for suffix in ("*.py", "*.md"):
            yield from (REPOSITORY / directory).rglob(suffix)


def test_the_page_defines_all_invariants_in_order() -> None:
    """I1 to I18 and V1 to V7, once each."""
    defined = [number for number, _, _ in ROW.findall(PAGE)]
    assert defined == [*(f"I{n}" for n in range(1, 19)), *(f"V{n}" for n in range(1, 8))]


def test_every_cited_invariant_is_defined() -> None:
    """Each number in code, tests and pages has a row."""
    defined = {number for number, _, _ in ROW.findall(PAGE)}
    cited = {
        (number, path.name)
        for path in citing_files()
        for number in CITED.findall(path.read_text(encoding="utf-8"))
    }
    assert len({number for number, _ in cited}) > 10
    assert {(number, name) for number, name in cited if number not in defined} == set()


def test_every_plan_and_verdict_is_a_word_of_the_glossary() -> None:
    """The page names the values of both enumerations."""
    words = set(re.findall(r"`([A-Z_]+)`", PAGE))
    assert words >= {*PlanKind, *Verdict}
