# SPDX-License-Identifier: Apache-2.0
"""docs/design names modules and packages that exist, all packages, and the plans and verdicts of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testkit import REPOSITORY

DAEMON = [path.parent for path in (REPOSITORY / "daemon").glob("*/__init__.py")]
"""The import packages of the daemon's distribution."""
HOOKS = REPOSITORY / "training_hooks" / "swansong"
PAGES = [
    *sorted((REPOSITORY / "docs" / "design").glob("*.md")),
    *sorted((REPOSITORY / "docs").glob("format*.md")),
]
NAMED = re.compile(r"`((?:[A-Za-z0-9_]+/)*[A-Za-z0-9_]+\.py|(?:_?[a-z0-9]+/)+)`")
BUCKET = {"generations/", "commits/", "farewells/", "resumptions/", "data/", "pins/", "probes/"}
"""Prefixes of keys, which look like packages."""
ROOTS = (REPOSITORY, *DAEMON, *(root / "stores" for root in DAEMON), HOOKS, HOOKS.parent)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_and_package_that_a_page_names_exists(page: Path) -> None:
    """The daemon, the hooks or the root of the repository contains it."""
    named = set(NAMED.findall(page.read_text(encoding="utf-8"))) - BUCKET
    missing = {
        name for name in named if not any((root / name.rstrip("/")).exists() for root in ROOTS)
    }
    assert missing == set()


def test_the_overview_lists_every_package_of_the_daemon() -> None:
    """One row for each package, and no other rows."""
    page = (REPOSITORY / "docs" / "design" / "overview.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+)/` \|", page, re.MULTILINE)
    packages = [path.parent.name for root in DAEMON for path in root.glob("*/__init__.py")]
    assert sorted(rows) == sorted(packages)
