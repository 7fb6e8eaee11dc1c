# SPDX-License-Identifier: Apache-2.0
"""No test outlives its time limit: its process ends, its name is reported, and the other tests run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from testkit.time_limits import RUNNING_ENV
from testkit.waiting import is_running, until

ROOT = Path(__file__).parents[3]
LIMIT_S = 1
HANGING = """
import itertools, os, pathlib, signal, subprocess, sys
import pytest
from hypothesis import given, strategies as st


@given(st.integers())
def test_spins_in_hypothesis(number):
    print("printed by the test")
    asleep = [sys.executable, "-c", "import signal; signal.pause()"]
    child = subprocess.Popen(asleep, start_new_session=True)
    pathlib.Path(os.environ["CHILD"]).write_text(str(child.pid))
    while True:
        pass


def test_holds_the_interpreter_lock():
    all(itertools.repeat(True))


@pytest.fixture
def hangs_at_its_end():
    yield
    while True:
        pass


def test_fails_and_hangs_in_a_fixture(hangs_at_its_end):
    assert False


def test_passes():
    pass
"""


def run_pytest(tmp_path: Path, *options: str) -> tuple[int, str]:
    """Run the tests above with the configuration and the rules of this project."""
    (tmp_path / "test_hanging.py").write_text(HANGING)
    rules = ("-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider")
    # In CI, Hypothesis draws the same examples each time, and prints no seed.
    skipped = ("PYTEST_", "CI")
    own = {name: value for name, value in os.environ.items() if not name.startswith(skipped)}
    with tempfile.TemporaryDirectory() as temporary:  # short: it contains sockets
        ended = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *rules,
                f"--timeout={LIMIT_S}",
                *options,
                str(tmp_path),
            ],
            check=False,
            cwd=ROOT,
            env={
                **own,
                "CHILD": str(tmp_path / "child"),
                RUNNING_ENV: str(tmp_path),
                "TMPDIR": temporary,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
    return ended.returncode, ended.stdout


def test_each_test_that_hangs_is_ended_and_named(tmp_path: Path) -> None:
    """With pytest-xdist: the worker ends with the processes of its test, and another one continues."""
    code, text = run_pytest(tmp_path, "-n", "2", "--dist", "worksteal")
    assert code == 1
    names = set(re.findall(r"^def (test_\w+)", HANGING, re.MULTILINE)) - {"test_passes"}
    crashed = re.findall(r"crashed while running '[^']*::(\w+)'", text)
    assert set(crashed) == names, text
    assert "1 passed" in text
    assert "printed by the test" in text
    assert re.search(r"test_spins_in_hypothesis exceeded its time limit of 1 s", text)
    assert re.search(r"repeat its examples with --hypothesis-seed=\d+", text)
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_running(child), timeout_s=10, what="the end of the child of a test")
