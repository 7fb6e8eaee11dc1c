# SPDX-License-Identifier: Apache-2.0
"""One word, one meaning: names of classes and modules in the two distributions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from testkit import REPOSITORY

PACKAGES = ("daemon", "training_hooks/swansong")
SHARED = {"SwansongCallback"}
"""Lightning and Transformers each have a callback: users import it from the module of their framework."""
NAMED_BY_OTHERS = {
    "swansong_tools/commands": "each module has the name of its command",
    "swansong_tools/doctor": "each module has the name of the thing that it checks",
}
BACKENDS = {"azure", "file", "gcs", "s3"}
"""Their modules answer to the same contract, so they have the same names."""


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (REPOSITORY / package).rglob("*.py")


def test_each_public_class_name_exists_once() -> None:
    """A search for a class finds one definition."""
    homes = defaultdict(list)
    for path in modules():
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^ *class ([A-Za-z]\w*)[(:]", text, re.MULTILINE):
            homes[name].append(str(path.relative_to(REPOSITORY)))
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert shared.keys() == SHARED, shared


def test_each_module_name_exists_once() -> None:
    """A module name names one thing, except where another rule gives the name."""
    homes = defaultdict(set)
    for path in modules():
        folder = path.parent.parent if path.parent.name in BACKENDS else path.parent
        if path.name != "__init__.py" and not str(folder).endswith(tuple(NAMED_BY_OTHERS)):
            homes[path.stem].add(str(folder.relative_to(REPOSITORY)))
    shared = {name: folders for name, folders in homes.items() if len(folders) > 1}
    assert not shared, shared
