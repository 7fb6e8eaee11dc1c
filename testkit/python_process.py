# SPDX-License-Identifier: Apache-2.0
"""Python processes that import the hooks of the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import swansong

HOOKS = Path(swansong.__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": str(HOOKS)}


def run_python(
    *arguments: object, python: str = sys.executable, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, in a new session, with further environment variables."""
    return subprocess.run(
        [python, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        start_new_session=True,
    )


def output_of(*arguments: object, python: str = sys.executable, **variables: str) -> str:
    """Return the standard output of :func:`run_python`, which must succeed."""
    done = run_python(*arguments, python=python, **variables)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
