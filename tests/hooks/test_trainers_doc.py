# SPDX-License-Identifier: Apache-2.0
"""The code blocks of all pages in ``docs/trainers/`` run without a change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testkit.python_process import HOOKS, run_python

PAGES = {
    page.name: page.read_text(encoding="utf-8")
    for page in sorted(Path(HOOKS.parent, "docs", "trainers").glob("*.md"))
}
BLOCKS = [
    (f"{page}: {section.splitlines()[0]}", block)
    for page, text in PAGES.items()
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]
    for block in re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
]


def test_each_framework_has_a_block() -> None:
    """Each of these sections has one block, and the other test runs every block."""
    assert [place for place, _ in BLOCKS] == [
        "checks.md: Check the resume, and end a run",
        "frameworks.md: Lightning",
        "frameworks.md: Lightning Fabric",
        "frameworks.md: PyTorch-Ignite",
        "frameworks.md: Accelerate",
        "frameworks.md: Hugging Face Trainer",
        "frameworks.md: Distributed Checkpoint (DCP)",
        "frameworks.md: Any other Python program",
        "pytorch.md: PyTorch",
        "pytorch.md: Several models and optimizers",
    ]
    assert sum(text.count("```python") for text in PAGES.values()) == len(BLOCKS)
    assert PAGES["frameworks.md"].count("```py\n") == 1, "tests/hooks_jax runs this one"
    assert PAGES["trackers.md"].count("```py\n") == 1, "tests/hooks_frameworks runs this one"


def test_each_page_is_linked_from_the_entry_page() -> None:
    """A reader finds every page of the folder from README.md, and no link points to a missing page."""
    links = set(re.findall(r"\]\(([\w-]+\.md)", PAGES["README.md"]))
    assert links == PAGES.keys() - {"README.md"}


@pytest.mark.parametrize("block", [pytest.param(block, id=place) for place, block in BLOCKS])
def test_a_block_runs(tmp_path: Path, warm_frameworks: str, block: str) -> None:
    """Each block runs as a script without a daemon."""
    script = tmp_path / "block.py"
    script.write_text(block)
    environment = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SWANSONG_SOCKET": str(tmp_path / "no-daemon"),
    }
    done = run_python(script, python=warm_frameworks, cwd=tmp_path, **environment)
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-2000:]}"
