# SPDX-License-Identifier: Apache-2.0
"""The fixes of a trainer that is signalled work as printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from swansong_tools.doctor import daemon

from testkit.other_users import needs_root
from tests.unit.doctor.test_doctor import installation


def writable_for_all(path: Path, pid: int) -> None:
    path.write_text(str(pid))
    path.chmod(0o666)


def of_another_user(path: Path, pid: int) -> None:
    path.write_text(str(pid))
    os.chown(path, 4_000_000, -1)


def stale(path: Path, _pid: int) -> None:
    path.write_text("4194303")


HANDLES = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: None)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.fault("S11")
@pytest.mark.parametrize(
    "breaks",
    [
        writable_for_all,
        pytest.param(of_another_user, marks=needs_root),
        stale,
    ],
)
def test_a_fix_of_the_pid_file_works_as_printed(
    tmp_path: Path, breaks: Callable[[Path, int], None]
) -> None:
    """Afterwards the pid file is right, or gone until the training script writes it again."""
    path = tmp_path / "trainer's.pid"
    vm = installation(trainer={"signal": "SIGUSR1", "pid_file": str(path)})
    with subprocess.Popen([sys.executable, "-c", HANDLES], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        try:
            trainer.stdout.readline()
            breaks(path, trainer.pid)
            judged = daemon.signal(vm)
            assert judged.level == "failure"
            subprocess.run(judged.fix.removeprefix("sudo "), shell=True, check=True)
            after = daemon.signal(vm)
        finally:
            trainer.kill()
    assert after.level == ("ok" if path.exists() else "warning"), after.found
