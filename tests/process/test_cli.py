# SPDX-License-Identifier: Apache-2.0
"""The ``swansong`` command: output, errors in one line, exit codes.

It runs in this process, and as a process where signals, a terminal or the limits of a process matter.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import swansongd
from swansong.protocol import Message, Refused, Status, StatusQuery, Welcome, decode, encode
from swansong_bucket import errors
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CheckpointKind, CommitRef
from swansong_bucket.stores.file.store import FileStore
from swansong_tools.commands.completion import SHELLS
from swansong_tools.commands.finished import EXIT_UNFINISHED
from swansong_tools.commands.main import COMMANDS, EXIT_CODES, main
from swansong_tools.commands.notify import EXIT_BY_VERDICT
from swansong_tools.commands.run_supervisor import EXIT_SAVED
from swansongd.observe.status import DaemonStatus, from_json, to_json

from testkit.committed import commit, file_store, flip_bit, object_path, tree
from testkit.rig import BIN, CREDENTIALS
from testkit.waiting import until

YOUNG = ["younger than 24 h"]
CUTS = ["daily of its start", "hourly", "daily", "weekly"]
FILES = {"model.pt": os.urandom(50_000), "deep/rng.pt": b"seed"}
SWANSONG = [sys.executable, "-m", "swansong_tools"]


class Place:
    """A configuration, a store and a directory to restore to."""

    def __init__(self, tmp_path: Path, warm_python: str, shown: pytest.CaptureFixture[str]) -> None:
        self.tmp_path = tmp_path
        self.warm_python = warm_python
        self._shown = shown
        self.store: FileStore = file_store(tmp_path / "store")
        self.to = tmp_path / "restored" / "here"
        self.socket = tmp_path / "s"
        self.config = tmp_path / "swansong.toml"
        self.configure()

    def configure(self, more: str = "") -> None:
        self.config.write_text(
            f"""
            [run]
            name = "r"
            [staging]
            path = "{self.tmp_path}/staging"
            [store]
            url = "file://{self.tmp_path}/store"
            [trainer]
            socket = "{self.socket}"
            {more}
            """
        )

    def command(self, *arguments: str) -> list[str]:
        return [*SWANSONG, "--config", str(self.config), *arguments]

    def forked(self, *arguments: str, script: str = "") -> list[str]:
        """The same in a fork of the warm Python; with ``script``, of this program instead of the command."""
        program = ["-c", script] if script else [str(BIN / "swansong")]
        return [self.warm_python, *program, "--config", str(self.config), *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command in this process."""
        self._shown.readouterr()
        try:
            code = main(["--config", str(self.config), *arguments])
        except SystemExit as usage:
            code = int(usage.code or 0)
        shown = self._shown.readouterr()
        return subprocess.CompletedProcess(arguments, code, shown.out, shown.err)

    def run_json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def place(tmp_path: Path, warm_python: str, capfd: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, warm_python, capfd)


def is_one_line_of_swansong(text: str) -> bool:
    return text.startswith("swansong: ") and text.count("\n") == 1 and text.endswith("\n")


# ---------------------------------------------------------------- restore


def test_restore_prints_a_summary(place: Place) -> None:
    """The bytes are on disk; one line states step, run, generation, bytes, time and speed."""
    commit(place.store, FILES, step=100)
    done = place.run("restore", "--to", str(place.to))
    assert done.returncode == 0, done.stderr
    assert tree(place.to) == FILES
    assert done.stdout.startswith("restored step 100 of run r (generation 1): 50 kB in ")
    assert done.stdout.endswith(" MB/s\n")
    assert done.stderr == ""


def test_restore_as_json_with_every_option(place: Place) -> None:
    """``--run`` and ``--step`` select an older commit of another run; the facts are JSON."""
    commit(place.store, FILES, run="q", step=100)
    commit(place.store, {"a": b"newer"}, run="q", step=200)
    got = place.run_json("restore", "--run", "q", "--step", "100", "--to", str(place.to))
    assert got.pop("seconds") > 0
    assert got == {
        "run": "q",
        "generation": 1,
        "step": 100,
        "path": str(place.to),
        "size_bytes": 50_004,
        "reused_bytes": 0,
        "from_mirror": [],
        "skipped": [],
    }
    assert tree(place.to) == FILES


@pytest.mark.fault("G10")
def test_each_skipped_commit_is_named_with_its_reason(place: Place) -> None:
    """Standard error names the commit for people, the JSON for programs."""
    commit(place.store, FILES, step=100)
    made = commit(place.store, {"a": b"x"}, step=200)
    object_path(place.tmp_path / "store", made.chunks[0].key).unlink()
    done = place.run("restore", "--to", str(place.to), "--json")
    assert done.returncode == 0
    reason = "a is missing from the store"
    assert f"swansong: skipped generation 1 step 200: {reason}\n" in done.stderr
    got = json.loads(done.stdout)
    assert got["step"] == 100
    assert got["skipped"] == [{"generation": 1, "step": 200, "reason": reason}]


def test_a_fresh_run_has_an_exit_code_of_its_own(place: Place) -> None:
    """17 by default; 0 with --fresh-ok, which the boot unit uses."""
    done = place.run("restore", "--to", str(place.to))
    assert done.returncode == 17
    assert is_one_line_of_swansong(done.stderr)
    done = place.run("restore", "--to", str(place.to), "--fresh-ok")
    assert (done.returncode, done.stdout) == (
        0,
        "nothing to restore: run r has no commit yet\n",
    )
    got = place.run_json("restore", "--to", str(place.to), "--fresh-ok")
    assert (got["step"], got["path"]) == (None, None)
    assert not place.to.exists()


def test_a_run_with_only_damaged_commits_is_not_a_fresh_one(place: Place) -> None:
    """--fresh-ok must not let a trainer start from scratch over commits that an operator could repair."""
    commit(place.store, FILES)
    flip_bit(
        object_path(place.tmp_path / "store", RunKeys("r").commit(CommitRef(1, 100), 0, 1)), 99
    )
    assert place.run("restore", "--to", str(place.to), "--fresh-ok").returncode == 17


@pytest.mark.fault("G12")
def test_a_write_error_of_the_target_does_not_select_an_older_commit(place: Place) -> None:
    """A write exceeds a limit: the exit code is 15, the older commit is not restored, no file is left."""
    commit(place.store, {"a": b"small"}, step=50)
    commit(place.store, FILES, step=100)
    limited = 'ulimit -f 8; PYTHONDONTWRITEBYTECODE=1 exec "$@"'
    done = subprocess.run(
        ["bash", "-c", limited, "bash", *place.command("restore", "--to", str(place.to))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 15
    assert "File too large" in done.stderr
    assert os.listdir(place.to.parent) == []


SLOW = """
import itertools, sys, threading
from swansong_tools.commands import main
from swansong_bucket.stores.file.store import FileStore
read, requests = FileStore.get_range, itertools.count()
def get_range(self, key, offset, size_bytes, sink):
    read(self, key, offset, size_bytes, sink)
    if "/data/" in key and next(requests):
        threading.Event().wait(0.5 if {mild} else 60)
FileStore.get_range = get_range
sys.exit(main.main(sys.argv[1:]))
"""


@contextmanager
def slow_restore(place: Place, *, mild: bool) -> Iterator[subprocess.Popen[str]]:
    """A restore that has written its first chunk and blocks in the store from the second request on."""
    process = subprocess.Popen(
        place.forked("restore", "--to", str(place.to), script=SLOW.format(mild=mild)),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:

        def has_chunk() -> bool:
            journals = place.to.parent.glob(".here.partial-*/journal")
            return any(path.read_bytes().count(b"\n") > 1 for path in journals)

        until(lambda: has_chunk() or process.poll() is not None, what="the first chunk")
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


@pytest.mark.fault("G11")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_restore_keeps_the_fetched_bytes(
    place: Place, number: signal.Signals
) -> None:
    """After Ctrl-C or a stop of the unit the exit code is 9, and the hint names the way to resume."""
    commit(place.store, FILES)
    with slow_restore(place, mild=True) as process:
        process.send_signal(number)
        _, complaint = process.communicate(timeout=30)
    assert process.returncode == 9
    assert "swansong: stopped before it was done. The fetched chunks stay" in complaint
    assert "Traceback" not in complaint
    assert not place.to.exists()
    done = place.run("restore", "--to", str(place.to))
    assert done.returncode == 0, done.stderr
    assert "were already on disk" in done.stdout
    assert tree(place.to) == FILES
    assert os.listdir(place.to.parent) == ["here"]


def test_a_second_signal_ends_a_blocked_restore(place: Place) -> None:
    """The second SIGINT kills the process immediately."""
    commit(place.store, FILES)
    with slow_restore(place, mild=False) as process:

        def interrupt() -> bool:
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        until(interrupt, what="the process to end")
    assert process.returncode == -signal.SIGINT
    assert not place.to.exists()


# ---------------------------------------------------------------- ls and verify


def test_ls_shows_all_commits_newest_first(place: Place) -> None:
    """Complete, incomplete and damaged commits are listed, each with the facts that are readable."""
    commit(place.store, FILES, step=100, loss=1.25)
    commit(place.store, {"a": b"x"}, step=200, node=1, nodes=2)
    commit(place.store, {"a": b"x"}, generation=2, step=50)
    flip_bit(object_path(place.tmp_path / "store", RunKeys("r").commit(CommitRef(2, 50), 0, 1)), 99)
    damaged, incomplete, whole = place.run_json("ls")
    assert (damaged["generation"], damaged["step"], damaged["complete"]) == (2, 50, False)
    assert "manifest" in damaged["problem"]
    assert (incomplete["nodes_committed"], incomplete["nodes"], incomplete["complete"]) == (
        1,
        2,
        False,
    )
    age_s = whole.pop("age_s")
    assert 0 <= age_s < 60
    assert whole == {
        "generation": 1,
        "step": 100,
        "final": False,
        "nodes": 1,
        "nodes_committed": 1,
        "complete": True,
        "kind": "periodic",
        "size_bytes": 50_004,
        "added_bytes": 50_004,
        "created": "2030-01-01T00:00:00Z",
        "loss": 1.25,
        "health": {"loss": 1.25},
        "healthy": None,
        "protected": ["newest", *YOUNG, "last 3", *CUTS, "best loss"],
        "pins": [],
        "problem": None,
        "without_ranks": None,
    }
    done = place.run("ls", "--wide")
    assert done.returncode == 0
    header, first, second, third = done.stdout.splitlines()
    assert header.split() == [
        "GEN",
        "STEP",
        "KIND",
        "NODES",
        "COMPLETE",
        "SIZE",
        "ADDED",
        "AGE",
        "CREATED",
        "LOSS",
        "HEALTHY",
        "PROTECTED",
    ]
    assert first.split()[:3] == ["2", "50", "-"]
    assert second.split()[:5] == ["1", "200", "periodic", "1/2", "no"]
    assert third.split()[:9] == ["1", "100", "periodic", "1/1", "yes", "50", "kB", "50", "kB"]
    assert third.split()[10:14] == ["s", "2030-01-01T00:00:00Z", "1.25", "-"]
    assert third.endswith("daily, weekly, best loss")
    assert [row["step"] for row in place.run_json("ls", "--newest", "2")] == [50, 200]
    assert place.run("ls", "--newest", "0").returncode == 2
    assert place.run("ls", "--run", "other").returncode == 17
    assert "has no run other" in place.run("ls", "--run", "other").stderr


def test_ls_names_the_newest_healthy_and_the_best_commit(place: Place) -> None:
    """Only complete commits are marked; --best selects the metric, --highest its direction."""
    for step, loss, accuracy, is_finite in ((1, 2.0, 0.7, 1.0), (2, 3.0, 0.9, 1.0), (3, 0, 0.5, 0)):
        health = {"accuracy": accuracy, "loss_is_finite": is_finite}
        commit(
            place.store,
            {"a": b"x"},
            step=step,
            health={**health, **({"loss": loss} if loss else {})},
        )
    commit(place.store, {"a": b"x"}, step=4, nodes=2, health={"loss": 0.1, "loss_is_finite": 1.0})
    incomplete, bad, healthy, best = place.run_json("ls")
    assert [row["healthy"] for row in (incomplete, bad, healthy, best)] == [True, False, True, True]
    assert [row["protected"] for row in (incomplete, bad, healthy, best)] == [
        [*YOUNG, "not yet whole"],
        ["newest", *YOUNG, "last 3", *CUTS],
        ["healthy", *YOUNG, "last 3"],
        [*YOUNG, "last 3", "best loss"],
    ]
    rows = place.run_json("ls", "--best", "accuracy", "--highest")
    assert rows[2]["protected"] == ["healthy", *YOUNG, "last 3", "best accuracy"]
    header, *lines = place.run("ls", "--best", "accuracy", "--wide").stdout.splitlines()
    assert header.split()[-4:] == ["LOSS", "ACCURACY", "HEALTHY", "PROTECTED"]
    assert lines[1].split()[12:16] == ["not", "finite", "0.5", "no"]
    header, *lines = place.run("ls").stdout.splitlines()
    assert header.split() == [
        "GEN", "STEP", "KIND", "WHOLE", "AGE", "SIZE", "ADDED", "LOSS", "PROTECTED",
    ]  # fmt: skip
    assert "not finite" in lines[1]


def test_pins_and_prune(place: Place) -> None:
    """A pinned commit survives the prune that deletes its neighbours; the restored bytes are the same."""
    old_s = time.time() - 40 * 86400
    for step in (100, 200, 300, 400):
        commit(place.store, FILES, step=step, nonce=f"u{step}", loss=step)
        for path in (place.tmp_path / "store").rglob("*"):
            if path.is_file() and step < 400:
                os.utime(path, (old_s + step, old_s + step))
    assert place.run("pin", "150", "--name", "paper").returncode == 17
    assert place.run("pin", "200", "--name", "a/b").returncode == 2
    done = place.run("pin", "200", "--name", "paper", "--note", "figure 2")
    assert done.stdout == "pinned generation 1 step 200 of run r as paper\n", done.stderr
    taken = place.run("pin", "100", "--name", "paper")
    assert (taken.returncode, taken.stderr) == (
        2,
        (
            "swansong: --name: the name paper is taken by generation 1 step 200 (got 'paper'); "
            "choose another name, or remove that pin with: swansong unpin paper\n"
        ),
    )
    unknown = place.run("unpin", "papers")
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "swansong: NAME: is not a pin of run r (got 'papers'); choose one of its pins: paper\n",
    )
    foretold = place.run_json("prune", "--dry-run", "--price", "gb_month=1e5")
    assert [found["kept_by"] for found in foretold["commits"]][1:] == [
        [
            "newest before the last 24 h",
            "last 3",
            "newest before the last 7 d",
            "hourly",
            "daily",
            "weekly",
        ],
        ["pin paper", "last 3"],
        ["best loss"],
    ]
    assert foretold["freed_bytes"] == 0
    none = "keep_starts_s = 1\nkeep_best = 0"
    place.configure(f"[retention]\nkeep_last = 1\n{none}\nkeep_hourly = 1\nkeep_daily = 1")
    foretold = place.run_json("prune", "--dry-run", "--price", "gb_month=1e5")
    assert (foretold["freed_bytes"], foretold["freed_cost_per_month"]) == (50_004, 4.66)
    text = place.run("prune")
    assert "deleted 1 of 4 commits and 51 objects, 50 kB; 150 kB stay" in text.stdout, text.stderr
    assert [row["step"] for row in place.run_json("ls")] == [400, 300, 200]
    assert "pin paper (figure 2)" in place.run("ls").stdout
    assert place.run("restore", "--step", "200", "--to", str(place.to)).returncode == 0
    assert tree(place.to) == FILES
    assert place.run("unpin", "paper").returncode == 0
    assert place.run("unpin", "paper").returncode == 2
    assert place.run_json("prune")["objects"] == 51
    assert place.run("restore", "--step", "200", "--to", str(place.to) + "2").returncode == 17


@pytest.mark.fault("O80")
def test_a_damaged_pin_is_named_and_repaired(place: Place) -> None:
    """``ls`` and ``verify`` name it, the other pins stay usable, and the mirror has a copy."""
    commit(place.store, FILES, step=100)
    for name in ("paper", "other"):
        assert place.run("pin", "100", "--name", name).returncode == 0
    file_store(place.tmp_path / "mirror")
    shutil.copytree(place.tmp_path / "store/r", place.tmp_path / "mirror/r")
    flip_bit(object_path(place.tmp_path / "store", "r/pins/paper.json"), 3)
    listed = place.run("ls")
    assert listed.returncode == 0
    assert "the pin paper is damaged, and keeps all older commits" in listed.stderr
    assert "pin other" in listed.stdout
    done = place.run("verify")
    assert done.returncode == 8
    assert done.stdout.startswith("pin paper: ")
    assert place.run("prune").returncode == 0
    place.configure(f"""
            [mirror]
            url = "file://{place.tmp_path}/mirror"
    """)
    report = place.run_json("verify", "--repair")
    assert report["damaged_pins"] == []
    assert [each["key"] for each in report["repairs"]] == ["r/pins/paper.json"]
    assert tree(place.tmp_path / "store/r") == tree(place.tmp_path / "mirror/r")


def test_restore_healthy_takes_the_newest_healthy_commit(place: Place) -> None:
    """Newer commits are skipped; without a commit that is known to be healthy the exit code is 17."""
    commit(place.store, {"a": b"unknown"}, step=1, nonce="x")
    refused = place.run("restore", "--healthy", "--fresh-ok", "--to", str(place.to))
    assert refused.returncode == 17
    commit(place.store, {"a": b"good"}, step=2, nonce="y", health={"loss_is_finite": 1.0})
    commit(place.store, {"a": b"bad"}, step=3, nonce="z", health={"loss_is_finite": 0.0})
    restored = place.run_json("restore", "--healthy", "--to", str(place.to))
    assert (restored["step"], restored["skipped"]) == (2, [])
    assert (place.to / "a").read_bytes() == b"good"


@pytest.mark.fault("O20")
def test_verify_finds_damage(place: Place) -> None:
    """The exit code is 0 if all bytes match, else 8 with one line per damaged object."""
    commit(place.store, FILES, step=100)
    made = commit(place.store, {"a": b"xyz"}, step=200)
    done = place.run("verify")
    counts = "52 objects read, 0 of them shared by several commits"
    assert done.returncode == 0
    assert done.stdout == f"all stored bytes of run r match their names: {counts}\n"
    assert place.run_json("verify")["defects"] == []
    flip_bit(object_path(place.tmp_path / "store", made.chunks[0].key), 3)
    done = place.run("verify")
    assert done.returncode == 8
    assert done.stdout == "generation 1 step 200: a does not match its digest\n"
    done = place.run("verify", "--json")
    assert done.returncode == 8
    assert json.loads(done.stdout)["defects"] == [
        {"generation": 1, "step": 200, "problem": "a does not match its digest"}
    ]
    assert place.run("verify", "--step", "100").returncode == 0
    assert place.run("verify", "--step", "7").returncode == 17


@pytest.mark.fault("O80", "O81")
def test_verify_repairs_from_the_mirror(place: Place) -> None:
    """Without an intact copy the exit code is 8 and nothing is written; with a mirror it is 0."""
    made = commit(place.store, FILES, step=100)
    file_store(place.tmp_path / "mirror")
    shutil.copytree(place.tmp_path / "store/r", place.tmp_path / "mirror/r")
    key = made.chunks[0].key
    flip_bit(object_path(place.tmp_path / "store", key), 3)
    damaged = tree(place.tmp_path / "store")
    done = place.run("verify", "--repair")
    assert done.returncode == 8
    assert f"not repaired: {key}: there is no intact copy of its" in done.stdout
    assert tree(place.tmp_path / "store") == damaged
    place.configure(f"""
            [mirror]
            url = "file://{place.tmp_path}/mirror"
    """)
    report = place.run_json("verify", "--repair", "--rate", "500MB/s")
    assert report["defects"] == []
    (repair,) = report["repairs"]
    assert (repair["key"], repair["repaired"]) == (key, True)
    assert repair["commits"] == [{"generation": 1, "step": 100}]
    assert tree(place.tmp_path / "store/r") == tree(place.tmp_path / "mirror/r")


def test_verify_reads_a_share_of_the_bytes(place: Place) -> None:
    """The sample and the rate are checked; sizes are compared in any case."""
    commit(place.store, FILES, step=100)
    report = place.run_json("verify", "--sample", "5%", "--rate", "50MB/s")
    assert report["sample"] == 0.05
    assert 0 < report["bytes_read"] < report["bytes"] == sum(map(len, FILES.values()))
    for wrong in ("0%", "5", "101%", "x%"):
        assert place.run("verify", "--sample", wrong).returncode == 2
    for wrong in ("1", "fast", "-1MB"):
        assert place.run("verify", f"--rate={wrong}").returncode == 2


# ---------------------------------------------------------------- finished


@pytest.mark.fault("T18")
def test_finished_reports_the_end_of_a_run(place: Place) -> None:
    """Only while the final commit is the newest one; 16 and not 18 if the store cannot be read."""
    done = place.run("finished")
    assert (done.returncode, done.stdout) == (18, "run r is not finished: it has no whole commit\n")
    commit(place.store, FILES, step=100, kind=CheckpointKind.FINAL)
    commit(place.store, FILES, step=100)
    done = place.run("finished", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"run": "r", "finished": True, "generation": 1, "step": 100}
    assert [row["kind"] for row in place.run_json("ls")] == ["final", "periodic"]
    condition = f"! {' '.join(place.command('finished'))}"
    assert subprocess.run(["/bin/sh", "-c", condition], check=False).returncode == 1
    commit(place.store, FILES, generation=2, step=50)
    done = place.run("finished")
    assert done.returncode == 18
    assert "its newest commit is generation 2 step 50" in done.stdout
    shutil.rmtree(place.tmp_path / "store")
    assert place.run("finished").returncode == 16


# ---------------------------------------------------------------- status

REPORT = {
    "run": "r",
    "generation": 3,
    "state": "FLUSHING",
    "verdict": None,
    "sources": [
        {"name": "aws.spot", "health": "ok", "reason": "answers", "for_s": 7200},
        {"name": "logind", "health": "blind", "reason": "\x1b[2Jgone [bold]", "for_s": 3},
    ],
    "trainers": [{"pid": 4242, "rank": 0, "world_size": 1, "step": 1234, "connected": True}],
    "last_commit": {"generation": 2, "step": 1200, "age_s": 12.5},
    "failed_saves": {
        "count": 2,
        "last": {"step": 1100, "rank": 0, "reason": "disk\x1b full", "age_s": 240},
    },
    "replication_lag": {"steps": 34, "seconds": 41.0, "bytes": 1_234_000_000},
    "unsent": {"sets": 1, "bytes": 2_000_000},
    "evacuation": {
        "id": "e", "reason": "aws.spot", "seconds_left": 87.0, "plan": "TAKE", "why": "",
        "phase": "flush",
    },
    "version": "0.1.0",
    "pid": 77,
    "uptime_s": 90000,
}  # fmt: skip
STARTED = {"run": "r", "state": "IDLE", "version": "0.1.0", "pid": 77, "uptime_s": 1}


@contextmanager
def daemon_that_answers(path: Path, *answers: bytes) -> Iterator[list[Message]]:
    """A real socket that sends ``answers`` to one StatusQuery, then closes."""
    received: list[Message] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(60)

    def serve() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            received.append(decode(connection.recv(65536)))
            for answer in answers:
                connection.send(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        thread.join(60)
        listener.close()


def test_status_as_json_is_the_report(place: Place) -> None:
    """The JSON has all fields, even if the daemon sends a Welcome first, and a search of this VM."""
    welcome = encode(Welcome(run="r", staging="/x"))
    with daemon_that_answers(place.socket, welcome, encode(Status(REPORT))) as received:
        status = place.run_json("status")
    assert set(status.pop("unconnected")) == {"processes", "complete"}
    assert status == json.loads(json.dumps(to_json(from_json(REPORT))))
    assert set(REPORT) < set(status) == {field.name for field in fields(DaemonStatus)}
    assert received == [StatusQuery()]


def test_status_for_people(place: Place) -> None:
    """Every field of the report is shown with its unit; control characters are escaped."""
    with daemon_that_answers(place.socket, encode(Status(REPORT))):
        done = place.run("status")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for part in (
        "run r (generation 3)",
        "state FLUSHING",
        "verdict -",
        "last commit generation 2 step 1200, 12.5 s ago",
        "replication lag 34 steps, 41 s, 1.23 GB",
        "pending 2 MB in 1 set",
        "failed saves 2, the last one 4 min ago at step 1100 of rank 0: disk\\x1b full",
        "evacuation aws.spot: TAKE, flush, 87 s left",
        "daemon version 0.1.0, pid 77, up 25 h",
        "SOURCE NAME HEALTH REASON FOR aws.spot ok answers 2 h",
        "logind blind \\x1b[2Jgone [bold] 3 s",
        "TRAINER PID RANK STEP 4242 0 1234",
    ):
        assert part in text
    assert "\x1b" not in done.stdout


def test_status_shows_unknown_facts_in_words(place: Place) -> None:
    """Facts that a daemon does not know yet.  A commit of unknown age was made before the daemon started."""
    found = {
        "last_commit": {"generation": 2, "step": 1200, "age_s": None},
        "replication_lag": {"steps": 34, "seconds": None, "bytes": 0},
    }
    for report, commit_words, lag in (
        (STARTED, "none", "0 steps, unknown time"),
        (
            STARTED | found,
            "generation 2 step 1200, from before the daemon started",
            "34 steps, unknown time, 0 B",
        ),
    ):
        with daemon_that_answers(place.socket, encode(Status(report))):
            done = place.run("status")
        place.socket.unlink()
        assert done.returncode == 0
        text = " ".join(done.stdout.split())
        assert "no generation claimed yet" in text
        assert f"last commit {commit_words}" in text
        assert f"replication lag {lag}" in text


def test_status_without_a_daemon(place: Place) -> None:
    """No socket, no listener, a refusal, a closed connection or an invalid message: exit 13 and one line."""

    def status() -> subprocess.CompletedProcess[str]:
        command = place.forked("status")
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    for prepare in ("nothing", "dead"):
        if prepare == "dead":
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
                dead.bind(str(place.socket))
        done = status()
        assert (done.returncode, done.stdout) == (13, "")
        assert is_one_line_of_swansong(done.stderr)
        assert "systemctl status swansongd" in done.stderr
    for answers in ([encode(Refused("uid 7 is not allowed"))], [], [b"not json"]):
        place.socket.unlink()
        with daemon_that_answers(place.socket, *answers):
            done = status()
        assert (done.returncode, done.stdout) == (13, "")
        assert is_one_line_of_swansong(done.stderr)


def test_a_status_of_another_version_is_refused_with_its_field(place: Place) -> None:
    """The line names the field, and the restart that an upgrade needs; unknown fields are ignored."""
    other = STARTED | {"sources": [{"name": "x", "health": "fine", "reason": "", "for_s": 1}]}
    for answer, exit_code in ((STARTED | {"new": 1}, 0), (other, 13)):
        with daemon_that_answers(place.socket, encode(Status(answer))):
            done = place.run("status")
        place.socket.unlink()
        assert done.returncode == exit_code, done.stderr
    assert "status.sources[0].health is 'fine', not one of ok, " in done.stderr
    assert "Restart the daemon" in done.stderr


# ---------------------------------------------------------------- the command line itself


def test_every_problem_of_the_configuration_has_a_line(place: Place) -> None:
    """The exit code is 2; each problem has a line, and the last line is a hint."""
    place.configure(
        """
        signal = "SIGKILL"
        settle_s = 0
        [log]
        colour = true
        """
    )
    done = place.run("ls")
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("swansong: ") for line in lines)
    place.config.unlink()
    done = place.run("status")
    assert done.returncode == 2
    assert "no such file" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["restore"],
        ["restore", "--to", "x", "--step", "-1"],
        ["restore", "--to", ""],
        ["export", "--to", ""],
        ["drill", "--restore", "--to", ""],
        ["ls", "--run", "../x"],
        ["ls", "--highest"],
        ["exporter", "--once", "--store", ""],
        ["notify"],
        ["notify", "--in", "soon"],
        ["notify", "--in", "0"],
        ["notify", "--in", "5s", "--withdraw"],
        ["dance"],
        [],
    ],
)
def test_an_invalid_command_line_is_exit_2(place: Place, arguments: list[str]) -> None:
    """Usage errors have the exit code of configuration errors, and the daemon gets no message."""
    done = place.run(*arguments)
    assert done.returncode == 2
    assert not arguments or arguments[-1] or f"argument {arguments[-2]}: ''" in done.stderr


def test_a_store_that_fails_is_exit_16(place: Place) -> None:
    """A missing store is neither a fresh run nor a crash."""
    shutil.rmtree(place.tmp_path / "store")
    for command in (["ls"], ["verify"], ["restore", "--fresh-ok", "--to", str(place.to)]):
        done = place.run(*command)
        assert done.returncode == 16
        assert is_one_line_of_swansong(done.stderr)


def test_version_and_help(place: Place) -> None:
    """The version needs no configuration; the help lists every exit code of errors.py."""
    place.config.unlink()
    assert place.run("version").stdout == place.run("--version").stdout
    assert place.run("--version").stdout == f"swansong {swansongd.__version__}\n"
    shown = place.run("--help").stdout
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert {kind.exit_code for kind in kinds if issubclass(kind, errors.SwansongError)} | {
        0,
        *EXIT_BY_VERDICT.values(),
        EXIT_UNFINISHED,
        EXIT_SAVED,
    } == set(EXIT_CODES)
    for code, text in EXIT_CODES.items():
        assert f"  {code:<3} {text}" in shown


COMPLETE = """
source <("$@" completion bash)
while read -r line; do
	read -r -a COMP_WORDS <<<"$line"
	[[ $line == *"." ]] && COMP_WORDS[-1]=
	COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
	_shtab_swansong
	echo "${COMPREPLY[@]}"
done
"""
COMPLETED = {
    "swansong re": {"report", "restore"},
    "swansong restore --f": {"--fresh-ok"},
    "swansong notify --w": {"--wait", "--withdraw"},
    "swansong completion .": set(SHELLS),
    "swansong --config swansong.t": {"swansong.toml"},
}
"""Words that bash offers for a command line; a dot stands for an empty word."""


def test_bash_completes_commands_options_and_files(place: Place) -> None:
    """A real bash reads the script; the words that it offers are those of the parser."""
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE, "bash", *SWANSONG],
        input="".join(f"{line}\n" for line in COMPLETED),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=place.tmp_path,
    )
    offered = [set(line.split()) for line in done.stdout.splitlines()]
    assert dict(zip(COMPLETED, offered, strict=True)) == COMPLETED, done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script_that_names_every_command(place: Place, shell: str) -> None:
    """No configuration is needed; where the shell is installed, the shell accepts the script."""
    place.config.unlink()
    done = place.run("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert command in done.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.stdout, text=True, check=True, timeout=60)


def test_a_closed_pipe_is_not_an_error(place: Place) -> None:
    """``swansong ls | head -1`` prints no error."""
    commit(place.store, FILES)
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    done = subprocess.run(
        place.command("ls"), stdout=write_fd, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write_fd)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("command", [["version"], ["ls"], ["ls", "--json"]])
def test_an_output_on_a_full_disk_is_an_error_of_one_line(place: Place, command: list[str]) -> None:
    """Also if the buffer hides it until the end of the command."""
    commit(place.store, FILES)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            place.command(*command), stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    words = b"swansong: writing the output failed: No space left on device; redirect it to another file\n"
    assert (done.returncode, done.stderr) == (15, words)


CLOSED = 'exec "$@" <&- >&- 2>&-'
OPEN = "import os; [os.fstat(fd) for fd in range(3)]"
"""A trainer that fails if it gets no standard streams."""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["swansong", "version"], 0),
        (["swansong", "run", "--run", "r", "--", sys.executable, "-c", OPEN], 0),
        (["swansongd", "--config", "missing.toml"], errors.ConfigError.exit_code),
        (["swansongd", "--check", "--config", "swansong.toml"], 0),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else value,
)
def test_closed_standard_streams_change_nothing(
    place: Place, command: list[str], code: int
) -> None:
    """A service manager may start a program without them; files and sockets never get their numbers."""
    done = subprocess.run(
        ["sh", "-c", CLOSED, "sh", str(BIN / command[0]), *command[1:]],
        cwd=place.config.parent,
        env={**os.environ, **CREDENTIALS, "XDG_STATE_HOME": str(place.tmp_path / "state")},
        timeout=120,
        check=False,
    )
    assert done.returncode == code
