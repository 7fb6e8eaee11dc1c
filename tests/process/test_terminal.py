# SPDX-License-Identifier: Apache-2.0
"""The commands in a real terminal of 80 columns: live view and progress bars."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef

from testkit.clouds import Aws, Bucket
from testkit.committed import commit, file_store, flip_bit, object_path
from testkit.rig import BIN, CREDENTIALS, environment
from testkit.tmux import Terminal
from testkit.waiting import until
from tests.process.conftest import WITNESS

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|4[0-7]|9[0-7]|10[0-7]|[34]8)[;m]")
DIGITS = re.compile("[▀▄█]{2}")
SWANSONG = str(BIN / "swansong")
NewTerminal = Callable[..., Terminal]


@pytest.fixture
def new_terminal(warm_python: str) -> Iterator[NewTerminal]:
    """Open terminals: ``new_terminal(config, "status", "--watch", NO_COLOR="1")``.

    The command is a fork of a warm Python.

    Args:
        program: starts the command in another way.
    """
    with ExitStack() as opened:

        def open_one(
            config: Path, *arguments: str, program: Sequence[str] = (), **env: str
        ) -> Terminal:
            words = [*(program or (warm_python, SWANSONG)), "--config", str(config), *arguments]
            return opened.enter_context(Terminal(words, env=environment(**{**CREDENTIALS, **env})))

        yield open_one


@pytest.mark.fault("OT01", "OT03")
def test_the_live_view_through_an_evacuation(
    aws: Aws, bucket: Bucket, new_vm: Any, new_terminal: NewTerminal
) -> None:
    """Countdown and verdict; the view survives a restart of the daemon and a resize, and Ctrl-C ends it."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=WITNESS)
    trainer.lines.wait(step=5)
    terminal = new_terminal(
        vm.config,
        "status",
        "--watch",
        "--interval",
        "200ms",
        program=[SWANSONG],
        COLUMNS="80",
        LINES="24",
    )
    terminal.wait("IDLE  no notice is in force", "last commit", "steps/s", "aws.spot")
    plain = new_terminal(vm.config, "status", "--watch", NO_COLOR="1")
    command = [SWANSONG, "--config", str(vm.config), "status", "--watch"]
    log = vm.spawn(command, lines_on="stdout")
    until(lambda: [line for line in log.lines.raw if "state: IDLE" in line], what="the first lines")

    aws.notice(in_s=100)
    lines = terminal.wait(" SAFE  generation 1 step", "aws.spot: ", "s left", "is committed")
    assert any(re.search(r" \d\d s left$", line) for line in lines)
    assert sum(bool(DIGITS.search(line)) for line in lines[3:6]) == 3, lines
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].startswith(" run, generation 1"), "no line is wrapped"
    (banner, *_) = terminal.screen(escapes=True)
    assert {"1", "7", "32"} <= set(re.findall(r"\d+", banner.partition("SAFE")[0])), banner
    plain.wait(" SAFE  generation 1 step")
    until(lambda: "verdict: SAFE" in "\n".join(log.lines.raw), what="a line with the verdict")
    escaped = "\n".join(plain.screen(escapes=True))
    assert "\x1b[" in escaped
    assert not COLOUR.search(escaped)

    daemon.kill()
    lines = terminal.wait("DAEMON NOT RESPONDING since", "s left")
    terminal.resize(60, 12)
    lines = until(lambda: [line for line in terminal.screen() if len(line) > 40], what="a picture")
    assert all(len(line) <= 60 for line in lines)
    terminal.wait("DAEMON NOT RESPONDING since", "aws.spot: reclaim: TAKE")
    until(lambda: "daemon: away: " in "\n".join(log.lines.raw), what="a line about the absence")
    vm.start_daemon()
    until(lambda: "NOT RESPONDING" not in terminal.text(), what="the end of the absence")
    terminal.wait(" SAFE  generation 1 step")

    assert terminal.modes() == "0 0 1"
    terminal.press("C-c")
    assert terminal.wait("exit 0")[0] == "before"
    assert terminal.modes() == "1 1 0"

    log.kill(signal.SIGTERM)
    assert log.wait() == 0
    told = "\n".join(log.lines.raw)
    for expected in ("evacuation: aws.spot", "verdict: SAFE", "daemon: away: ", "daemon: version"):
        assert re.search(rf"^20\d\d-\S+Z {expected}", told, re.MULTILINE), told
    assert "\x1b" not in told


@pytest.mark.fault("OT03")
def test_a_dumb_terminal_gets_lines(
    bucket: Bucket, new_vm: Any, new_terminal: NewTerminal, witness: str
) -> None:
    """TERM=dumb cannot move its cursor: there is one line per change, and Ctrl-C ends the command."""
    vm = new_vm("vm", bucket.store)
    vm.start_daemon()
    terminal = new_terminal(vm.config, "status", "--watch", TERM="dumb")
    terminal.wait("state: IDLE", "generation: -")
    vm.start_trainer(script=witness)
    terminal.wait("generation: 1")
    assert terminal.modes() == "1 1 0"
    terminal.press("C-c")
    terminal.wait("exit 0")


SHELL = ("bash", "--norc", "--noprofile", "-i")


def job(terminal: Terminal, *words: str) -> None:
    """Type a command."""
    terminal.press(" ".join(words))
    terminal.press("Enter")


def stays(terminal: Terminal, modes: str, *, for_s: float = 2.5) -> None:
    """The terminal keeps its modes for more than two frames, and shows no frame."""
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        assert terminal.modes() == modes
        assert "DAEMON NOT RESPONDING" not in terminal.text()
        time.sleep(0.1)


@pytest.mark.fault("OT03")
def test_the_live_view_does_not_draw_in_the_background(run_of_files: Path) -> None:
    """After Ctrl-Z and ``bg``, and when it was started there; ``fg`` shows it, and SIGTERM ends it."""
    with Terminal(SHELL, env=environment(PS1="ready> ")) as terminal:
        terminal.wait("ready>")
        watch = (SWANSONG, "--config", str(run_of_files), "status", "--watch", "--interval 200ms")
        job(terminal, *watch)
        terminal.wait("DAEMON NOT RESPONDING")
        terminal.press("C-z")
        terminal.wait("Stopped")
        job(terminal, "bg")
        stays(terminal, "1 1 0")
        job(terminal, "fg")
        terminal.wait("DAEMON NOT RESPONDING")
        assert terminal.modes() == "0 0 1"
        terminal.press("C-z")
        terminal.wait("Stopped")
        job(terminal, "clear; stty tostop; bg; kill %1; wait %1; echo code $?")
        terminal.wait("code 0")
        assert terminal.modes() == "1 1 0"

        job(terminal, "clear;", *watch, "&")
        stays(terminal, "1 1 0")
        job(terminal, "jobs")
        terminal.wait("Running")
        job(terminal, "fg")
        terminal.wait("DAEMON NOT RESPONDING")
        terminal.press("C-c")
        until(lambda: terminal.modes() == "1 1 0", what="the end of the view")


# ---------------------------------------------------------------- progress


@pytest.fixture
def run_of_files(tmp_path: Path) -> Path:
    """The configuration of a run with commits in a store of files: one referenced, one damaged."""
    store = file_store(tmp_path / "store")
    big = os.urandom(6_000_000)
    commit(store, {"a": big}, step=100, nonce="x", chunk_bytes=500_000)
    commit(store, {"b": big[:1000]}, step=12_345_678, nonce="y", nodes=2)
    commit(store, {"c": b"x"}, generation=12, step=200, nonce="z")
    made = RunKeys("r").commit(CommitRef(12, 200), 0, 1)
    flip_bit(object_path(tmp_path / "store", made), 99)
    config = tmp_path / "swansong.toml"
    config.write_text(
        f'[run]\nname = "r"\n[staging]\npath = "{tmp_path}/staging"\n'
        f'[store]\nurl = "file://{tmp_path}/store"\n'
    )
    return config


SLOW = """
import sys, threading
from swansong_tools.commands import main
from swansong_bucket.stores.file.store import FileStore
read, turn = FileStore.get_range, threading.Lock()
def get_range(self, *arguments):
    with turn:
        read(self, *arguments)
        threading.Event().wait(0.4)
FileStore.get_range = get_range
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_bar_shows_rate_and_time_left(
    run_of_files: Path, new_terminal: NewTerminal, warm_python: str, tmp_path: Path
) -> None:
    """It is one line of 80 columns, and Ctrl-C leaves the terminal as it was."""
    verify = new_terminal(run_of_files, "verify", "--rate", "2MB/s", NO_COLOR="1")
    restore = new_terminal(
        run_of_files, "restore", "--to", str(tmp_path / "to"), program=(warm_python, "-c", SLOW)
    )
    for name, terminal in (("verify", verify), ("restore", restore)):
        lines = terminal.wait(f"{name} ", " %, ", "of 6 MB", "MB/s", "s left")
        shown = [line for line in lines if line.startswith(f"{name} ")]
        assert len(shown) == 1, lines
        assert re.search(r"━+.* \d+ %, \S+ [kM]?B of 6 MB, \S+ MB/s, \S+ s left$", shown[0]), shown
        assert len(shown[0]) <= 80
    assert not COLOUR.search("\n".join(verify.screen(escapes=True)))
    for terminal in (verify, restore):
        terminal.press("C-c")
        terminal.wait("exit 9")
        assert terminal.modes() == "1 1 0"


# ---------------------------------------------------------------- ls
