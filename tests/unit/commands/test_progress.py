# SPDX-License-Identifier: Apache-2.0
"""Progress on standard error: lines at intervals without a terminal, else a bar."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path

import pytest
from swansong_tools.commands import main
from swansong_tools.commands import progress as module
from swansong_tools.commands.progress import ProgressDisplay

from testkit.committed import commit, configuration, file_store
from testkit.waiting import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Screen(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def work(clock: Clock, progress: ProgressDisplay, *, seconds: int, per_s: int, total: int) -> None:
    """Call the progress once a second."""
    for second in range(1, seconds + 1):
        clock.now += 1
        progress(second * per_s, total)


def test_long_work_prints_a_line_every_few_seconds(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line has share, amount, rate and time left; the last one is the end."""
    with ProgressDisplay("restore") as progress:
        progress.detail = "3 GB from this VM"
        work(clock, progress, seconds=12, per_s=10**9, total=12 * 10**9)
    out, err = capsys.readouterr()
    assert out == ""
    first, second, last = err.splitlines()
    assert first == ("swansong: restore: 41 %, 5 GB of 12 GB, 1 GB/s, 7 s left, 3 GB from this VM")
    assert "83 %, 10 GB of 12 GB" in second
    assert "100 %, 12 GB of 12 GB" in last


def test_short_work_prints_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("restore") as progress:
        work(clock, progress, seconds=4, per_s=1, total=4)
    assert capsys.readouterr() == ("", "")


def test_the_rate_follows_the_link(clock: Clock) -> None:
    """Bytes of long ago do not count, and a stalled transfer promises no time."""
    progress = ProgressDisplay("mirror")
    work(clock, progress, seconds=60, per_s=10**6, total=10**9)
    assert "1 MB/s, 15.7 min left" in progress.text()
    for step in range(1, 41):
        clock.now += 1
        progress(60 * 10**6 + step * 10**7, 10**9)
    assert "10 MB/s, 54 s left" in progress.text()
    clock.now += 1000
    assert "10 MB/s" not in progress.text()
    progress = ProgressDisplay("mirror")
    progress(0, 10)
    clock.now += 5
    assert progress.text() == "0 %, 0 B of 10 B"


def test_a_second_commit_of_the_same_size_does_not_go_backwards(clock: Clock) -> None:
    """The rate counts the bytes of all commits, and the share those of the current one."""
    progress = ProgressDisplay("mirror")
    for _ in range(3):
        work(clock, progress, seconds=4, per_s=250, total=1000)
    assert "1 kB of 1 kB, 250 B/s" in progress.text()
    clock.now += 1
    progress(250, 1000)
    assert progress.text().startswith("25 %, 250 B of 1 kB, 250 B/s, 3 s left")


def test_counts_have_their_noun(clock: Clock) -> None:
    """Objects and commits are no bytes."""
    progress = ProgressDisplay("deleting", "objects")
    progress.detail = "1.2 GB"
    work(clock, progress, seconds=10, per_s=1000, total=30_000)
    assert progress.text() == "33 %, 10000 of 30000 objects, 1000/s, 20 s left, 1.2 GB"


def test_output_for_a_file_does_not_go_to_the_terminal_of_the_bar(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``swansong mirror >copied`` has its lines in the file while the bar is drawn."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", screen := Screen())
    with ProgressDisplay("mirror") as progress:
        progress(1, 10)
        print("copied generation 1 step 2")
    assert sys.stderr is screen
    assert capsys.readouterr().out == "copied generation 1 step 2\n"
    assert "mirror" in screen.getvalue()
    assert not re.search("swansong:|copied", screen.getvalue())


def test_a_dumb_terminal_gets_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot move its cursor."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stderr", screen := Screen())
    with ProgressDisplay("restore") as progress:
        work(clock, progress, seconds=6, per_s=1, total=10)
    assert "swansong: restore: 50 %" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


@pytest.mark.parametrize("command", ["restore", "verify", "prune", "mirror"])
def test_quiet_and_json_commands_draw_no_bar(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a terminal each of these commands has a bar, unless the operator or a program wants none."""
    commit(file_store(tmp_path / "bucket"), {"a": b"x" * 3000})
    config = configuration(tmp_path, mirror=f"file://{tmp_path}/mirror")
    monkeypatch.setenv("TERM", "xterm")
    drawn = {}
    for number, flag in enumerate(("--quiet", "--json", "")):
        file_store(tmp_path / "mirror")
        monkeypatch.setattr("sys.stderr", screen := Screen())
        options = ["--to", str(tmp_path / f"to{number}")] if command == "restore" else []
        words = ["--config", str(config), command, *options, *([flag] if flag else [])]
        assert main.main(words) == 0, screen.getvalue()
        drawn[flag] = screen.getvalue()
        shutil.rmtree(tmp_path / "mirror")
    assert (drawn["--quiet"], drawn["--json"]) == ("", "")
    assert "\x1b[" in drawn[""]
