# SPDX-License-Identifier: Apache-2.0
"""One ordinary user runs daemon, socket, trainer and store, with the configuration of the docs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import REPOSITORY
from testkit.rig import Process

PAGE = REPOSITORY / "docs" / "trainers" / "signals.md"
USER = 12002
"""The user if the tests run as root; otherwise it is the user of the tests."""
# All modules are imported before the user changes: the interpreter may be readable only for root.
AS_USER = f"""
import os, sys
from testkit.daemon_as import preload
preload()
import swansong
from swansong_tools.commands import main
from swansongd.service import main as daemon
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid({USER}, {USER}, {USER})
    os.setresuid({USER}, {USER}, {USER})
assert os.geteuid() != 0
"""
DAEMON = "daemon.main(['--config', sys.argv[1]])"
COMMAND = "sys.exit(main.main(['--config', *sys.argv[1:]]))"
TRAINER = """
import json, threading
step = 0
def save(directory):
    (directory / "step").write_text(str(step))
def load(directory):
    global step
    step = int((directory / "step").read_text())
guard = swansong.attach(save=save, load=load, stop_after_save=True)
print(json.dumps({"resumed": guard.restore()}), flush=True)
pause = threading.Event()
while not guard.should_stop:
    pause.wait(0.01)
    step += 1
    guard.step(step)
guard.close()
print(json.dumps({"ended": step}), flush=True)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """The home directory of the user; pytest's directories are below one of mode 0700."""
    path = Path(tempfile.mkdtemp(prefix="swansong-home-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()


def test_everything_runs_as_one_ordinary_user(
    home: Path, processes: list[Process], warm_python: str
) -> None:
    """A drill ends SAFE, and the next start of the trainer resumes; the configuration is that of the page."""
    toml = re.search(r"## Without root\n.*?```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert toml is not None
    base = home / "swansong"
    for directory in (base, base / "staging", base / "store"):
        directory.mkdir(mode=0o700)
    config = base / "swansong.toml"
    config.write_text(toml[1].replace("/home/me", str(home)))
    if os.geteuid() == 0:
        for path in (home, base, config, base / "staging", base / "store"):
            os.chown(path, USER, USER)

    def start(script: str, *arguments: str, lines_on: str = "stdout") -> Process:
        variables = {
            "HOME": str(home),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "SWANSONG_SOCKET": str(base / "trainer.sock"),
        }
        command = [sys.executable, "-c", AS_USER + script, *arguments]
        processes.append(Process(command, lines_on=lines_on, warm=warm_python, **variables))
        return processes[-1]

    daemon = start(DAEMON, str(config), lines_on="stderr")
    daemon.lines.wait(event="started")
    trainer = start(TRAINER)
    trainer.lines.wait(resumed=0)
    drill = start(COMMAND, str(config), "drill", "--in", "60s", "--wait")
    assert drill.wait() == 0, drill.lines.raw
    assert trainer.wait() == 0
    (ended,) = [line["ended"] for line in trainer.lines.all() if "ended" in line]
    listing = start(COMMAND, str(config), "ls", "--json")
    assert listing.wait() == 0
    assert json.loads("\n".join(listing.lines.raw))[0]["step"] == ended
    start(TRAINER).lines.wait(resumed=ended)
