# SPDX-License-Identifier: Apache-2.0
"""The benchmarks write their tables into the pages that quote them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.transfer import results

PAGES = results.PAGES


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of all pages, to which a benchmark writes instead."""
    pages = tmp_path / PAGES.name
    pages.mkdir()
    for page in (PAGES.with_suffix(".md"), *PAGES.glob("*.md")):
        (tmp_path / page.relative_to(PAGES.parent)).write_text(page.read_text())
    monkeypatch.setattr(results, "PAGES", pages)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "make bench",
        "make bench-beside",
        "make bench-torch",
        "make bench-gpu",
        "make bench-preemption",
        "python -m bench.plans",
    ],
)
def test_writing_the_same_tables_changes_no_page(copies: Path, name: str) -> None:
    """Exactly one page has the marks of each benchmark, and only the text between them is replaced."""
    before = {page: page.read_text() for page in copies.rglob("*.md")}
    marked = re.compile(rf"<!-- {name}: begin -->\n\n(.*?)\n\n<!-- {name}: end -->", re.DOTALL)
    ((page, table),) = [(page, text) for page in before for text in marked.findall(before[page])]
    results.write_page(name, table)
    assert {page: page.read_text() for page in copies.rglob("*.md")} == before
    results.write_page(name, "new")
    assert page.read_text() == before[page].replace(table, "new")
