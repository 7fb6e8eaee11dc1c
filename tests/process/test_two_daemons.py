# SPDX-License-Identifier: Apache-2.0
"""Two VMs with one run: the older is fenced, and neither damages the objects of the other."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from swansong.layout import sealed_name

from testkit.clouds import Bucket
from testkit.rig import Process
from testkit.staged import seal_files
from testkit.waiting import until

FENCED = 14


@pytest.mark.fault("G03")
def test_the_older_of_two_daemons_is_fenced(bucket: Bucket, new_vm: Any, witness: str) -> None:
    """A trainer starts on a second VM: the first daemon exits, and its trainer is notified and continues.

    The second daemon alone takes nothing over.
    """
    older = new_vm("older", bucket.store)
    first = older.start_daemon()
    orphan = older.start_trainer("--every-steps", "20", script=witness)
    first.lines.wait(event="committed", step=20)

    newer = new_vm("newer", bucket.store)
    second = newer.start_daemon()
    second.lines.wait(event="health", source="store", health="ok")
    committed = first.lines.all(event="committed")[-1]["step"]
    first.lines.wait(event="committed", step=committed + 40)
    assert newer.status()["generation"] is None
    newer.start_trainer("--every-steps", "20", script=witness).lines.wait(event="resumed")
    assert newer.status()["generation"] == 2
    before = bucket.objects()  # nearly everything that the first daemon wrote before the take-over

    assert first.wait(timeout_s=60) == FENCED
    assert first.lines.all(event="fenced", generation=1, newer_generation=2)
    orphan.lines.wait(event="fenced")
    steps = [line["step"] for line in orphan.lines.all() if "step" in line]
    orphan.lines.wait(step=steps[-1] + 30)
    assert orphan.popen.poll() is None

    until(lambda: second.lines.all(event="committed", generation=2), what="a commit of the second")
    after = bucket.objects()
    assert before.items() <= after.items()
    assert second.popen.poll() is None
    assert newer.commits()[0]["generation"] == 2


@pytest.mark.fault("G18")
def test_two_vms_never_commit_under_one_generation(bucket: Bucket, new_vm: Any) -> None:
    """The prefix is emptied under a daemon: it claims its generation again, and the next set is committed.

    Emptied once more, another VM claims the generation first: the daemon is fenced and writes nothing.
    """
    older, newer = new_vm("older", bucket.store), new_vm("newer", bucket.store)
    first = older.start_daemon()
    same = bytes(100_000)
    seal_files(older.run_directory, 10, {"weights": b"10", "same": same})
    first.lines.wait(event="committed", generation=1, step=10)
    wipe(bucket)
    seal_files(older.run_directory, 20, {"weights": b"20", "same": same})
    first.lines.wait(event="committed", generation=1, step=20)
    assert first.lines.all(event="claim_made_again", generation=1)
    assert older.swansong("verify").returncode == 0
    assert bucket.keys("run/generations/") == ["run/generations/00000001.json"]

    first.kill(signal.SIGSTOP)
    wipe(bucket)
    second = newer.start_daemon()
    seal_files(newer.run_directory, 5, {"weights": b"5"}, start_id="0ther")
    second.lines.wait(event="committed", generation=1, step=5)
    before = bucket.objects("run/generations/") | bucket.objects("run/commits/")
    first.kill(signal.SIGCONT)
    seal_files(older.run_directory, 30, {"weights": b"30"})

    assert first.wait(timeout_s=60) == FENCED
    assert first.lines.all(event="fenced", generation=1, newer_generation=1)
    assert bucket.objects("run/generations/") | bucket.objects("run/commits/") == before
    assert (older.run_directory / sealed_name(30, "abc")).is_dir()
    assert second.popen.poll() is None


@pytest.mark.fault("G03")
def test_a_command_that_waits_for_a_verdict_is_told_of_the_fence(
    bucket: Bucket, new_vm: Any
) -> None:
    """``notify --wait`` exits with 14 and names the newer generation; so does the farewell in the bucket."""
    older, newer = new_vm("older", bucket.store), new_vm("newer", bucket.store)
    first, second = older.start_daemon(), newer.start_daemon()
    seal_files(older.run_directory, 10, {"weights": b"10"})
    first.lines.wait(event="committed", generation=1, step=10)
    waiting = older.spawn(
        [str(Path(sys.executable).with_name("swansong")), "--config", str(older.config),
         "notify", "--in", "110s", "--wait"],
        lines_on="stdout",
    )  # fmt: skip
    first.lines.wait(event="evacuation", phase="waiting_for_trainer")
    seal_files(newer.run_directory, 5, {"weights": b"5"}, start_id="0ther")
    second.lines.wait(event="committed", generation=2, step=5)
    seal_files(older.run_directory, 30, {"weights": b"30"})

    assert first.wait(timeout_s=60) == FENCED
    assert waiting.wait() == FENCED
    shown = "FENCED: generation 1 step 10 is committed; generation 2 has taken the run over"
    until(lambda: shown in "".join(waiting.lines.raw))
    last = [each for each in bucket.farewells() if "as generation 2" in each["reason"]]
    assert [farewell["verdict"] for farewell in last] == ["PARTIAL"]


def wipe(bucket: Bucket) -> None:
    """Delete everything, as ``aws s3 rm --recursive`` does."""
    for key in bucket.keys("run/"):
        bucket.delete(key)


def newest(daemon: Process, event: str) -> int:
    """The step of the newest line with this event."""
    step: int = daemon.lines.all(event=event)[-1]["step"]
    return step
