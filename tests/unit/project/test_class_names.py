# SPDX-License-Identifier: Apache-2.0
"""One word, one meaning: each public class name exists once in the two distributions."""

from __future__ import annotations

import re
from collections import defaultdict

from testkit import REPOSITORY

PACKAGES = ("daemon", "training_hooks/swansong")
SHARED = {"SwansongCallback"}
"""Lightning and Transformers each have a callback: users import it from the module of their framework."""


def test_each_public_class_name_exists_once() -> None:
    """A search for a class finds one definition."""
    homes = defaultdict(list)
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for name in re.findall(r"^ *class ([A-Za-z]\w*)[(:]", text, re.MULTILINE):
                homes[name].append(str(path.relative_to(REPOSITORY)))
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert shared.keys() == SHARED, shared
