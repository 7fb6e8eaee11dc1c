# SPDX-License-Identifier: Apache-2.0
"""The code blocks of ``docs/trainers.md`` run as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import swansong

HOOKS = Path(swansong.__file__).parents[1]
TEXT = Path(HOOKS.parent, "docs", "trainers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(
    r"^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL
)


def test_each_framework_has_a_block() -> None:
    """No block goes without being run."""
    assert len(BLOCKS) == TEXT.count("```python") == 7


RUN_ALL = """
import json, runpy, sys, warnings
for name, path in json.loads(sys.argv[1]):
    print(name, flush=True)
    with warnings.catch_warnings():  # what one framework switches on or off is not the next one's
        runpy.run_path(path, run_name="__main__")
"""


@pytest.mark.timeout(200)
def test_the_blocks_run(tmp_path: Path) -> None:
    """As scripts, on a machine without a daemon; in one process, since the imports take longest."""
    scripts = []
    for number, (name, block) in enumerate(BLOCKS):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block)
        scripts.append((name, str(script)))
    environment = {
        **os.environ,
        "PYTHONPATH": str(HOOKS),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SWANSONG_SOCKET": str(tmp_path / "nobody"),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(scripts)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-2000:]}"
    for name, _ in scripts:
        assert name in done.stdout.splitlines()
