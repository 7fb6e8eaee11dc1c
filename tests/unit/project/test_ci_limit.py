# SPDX-License-Identifier: Apache-2.0
"""``.ci/limit`` ends a command with all its processes, and names what was running."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from testkit.waiting import is_running, until

CI = Path(__file__).parents[3] / ".ci"
LIMIT = CI / "limit"
STEP = 'echo "make test" >$SWANSONG_TESTS_RUNNING/step; '
DETACHED = "setsid sleep 1000 & echo $! >detached; "
"""A process of another session, which outlives its parent."""
A_TEST = """
import faulthandler, os, pathlib, signal
faulthandler.enable()
own = pathlib.Path(os.environ["SWANSONG_TESTS_RUNNING"], str(os.getpid()))
def test_stuck():
    own.write_text("test_x.py::test_stuck")
    pathlib.Path("has_started").touch()
    signal.pause()
test_stuck()
"""


def limited(directory: Path, limit_s: float, script: str) -> subprocess.Popen[str]:
    env = {**os.environ, "TMPDIR": str(directory)}
    return subprocess.Popen(
        [str(LIMIT), str(limit_s), "bash", "-c", script],
        cwd=directory,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def has_ended(directory: Path) -> bool:
    """Whether the detached process runs no longer, and no file of the run is left."""
    pid = int((directory / "detached").read_text())
    return not is_running(pid) and not list(directory.glob("ci-running-*"))


def test_a_command_in_time_keeps_its_status(tmp_path: Path) -> None:
    """A process that the command has left running is ended, too: the output of CI has an end."""
    run = limited(tmp_path, 200, f"echo output; {DETACHED} exit 3")
    assert run.communicate(timeout=60)[0] == "output\n"
    assert run.returncode == 3
    until(lambda: has_ended(tmp_path))


def test_the_tests_in_progress_are_named_with_their_stacks(tmp_path: Path) -> None:
    """Here a signal ends the run, so that no limit is shorter than the start of Python.

    A command that ignores signals ends, too.
    """
    (tmp_path / "stuck.py").write_text(A_TEST)
    ignoring = "trap '' INT TERM HUP;"
    run = limited(tmp_path, 200, f"{STEP} {DETACHED} {ignoring} {sys.executable} stuck.py; wait")
    until((tmp_path / "has_started").exists, what="the start of the test")
    run.send_signal(signal.SIGTERM)
    text = run.communicate(timeout=60)[0]
    assert run.returncode == 130
    assert "ci: a signal arrived, during: make test" in text
    assert "ci: test in progress: test_x.py::test_stuck" in text
    assert "in test_stuck" in text
    assert "sleep 1000" in text
    until(lambda: has_ended(tmp_path))


def test_ci_has_a_limit_and_names_its_step(tmp_path: Path) -> None:
    """Here with stubs for all tools: `make test` does not end, and nothing is installed."""
    shutil.copytree(CI, tmp_path / ".ci")
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    listed = (CI / "run").read_text().split("tools=(\n")[1].split("\n)")[0]
    for tool in {pair.split(":")[0] for pair in listed.split()} | {"apt-get"}:
        (stubs / tool).write_text("#!/bin/sh\n")
    (stubs / "id").write_text("#!/bin/sh\necho 0\n")
    (stubs / "make").write_text('#!/bin/sh\n[ "$*" != test ] || exec sleep 1000\n')
    for stub in stubs.iterdir():
        stub.chmod(0o755)
    ended = subprocess.run(
        [str(tmp_path / ".ci" / "run")],
        check=False,
        env={"PATH": f"{stubs}:{os.defpath}", "TMPDIR": str(tmp_path), "CI_LIMIT_S": "5"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 124, ended
    assert "ci: the limit of 5 s is reached, during: make test" in ended.stderr
    assert re.search(r"ci: running: \d+ sleep 1000", ended.stderr)
