# SPDX-License-Identifier: Apache-2.0
"""A rank of a job on one VM dies: the others save the last step without it, if they hold its whole state."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

from testkit import TRAINERS
from testkit.clouds import Bucket
from testkit.rig import Process, Vm
from testkit.waiting import until
from testkit.warm import python_of

STEP = 3


class Job:
    """A job on one VM, whose ranks are forks of a warm Python."""

    def __init__(self, vm: Vm) -> None:
        self.vm = vm
        self.daemon = vm.start_daemon()

    def start(self, count: int, *arguments: str) -> list[Process]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        warm = python_of(os.environ["SWANSONG_TEST_WARM"], "torch")
        ranks = []
        for rank in range(count):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
            process = Process(
                [sys.executable, str(TRAINERS / "losing.py"), *arguments],
                lines_on="stdout",
                warm=warm,
                SWANSONG_SOCKET=str(self.vm.socket),
                MASTER_ADDR="127.0.0.1",
                LOCAL_WORLD_SIZE=str(count),
                **{name: str(value) for name, value in place.items()},
            )
            self.vm.processes.append(process)
            ranks.append(process)
        return ranks

    def lose(self, count: int, dead: int, *arguments: str) -> list[str]:
        """Train until a rank dies after :data:`STEP`; returns the digest that each rank had then."""
        doomed = (
            "--managed",
            "--quiet-s",
            "5",
            "--die-at",
            str(STEP),
            "--die-rank",
            str(dead),
            *arguments,
        )
        self.ranks = self.start(count, *doomed)
        digests = [each.lines.wait(60, step=STEP)["digest"] for each in self.ranks]
        self.ranks[dead].wait()
        for rank, process in enumerate(self.ranks):
            if rank != dead:  # as torchrun does; a rank may wait for other living ranks
                os.kill(process.pid, signal.SIGTERM)
        return [str(digest) for digest in digests]

    def resumed(self, count: int, *arguments: str) -> list[dict[str, Any]]:
        """Start the job again; returns the first line of each rank."""
        return [each.lines.wait(60, event="resumed") for each in self.start(count, *arguments)]


@pytest.fixture
def job(bucket: Bucket, new_vm: Callable[..., Vm]) -> Job:
    pytest.importorskip("torch")
    return Job(new_vm("a", bucket.store))


def test_the_living_ranks_of_a_data_parallel_job_save_the_last_step(job: Job) -> None:
    """Weights, moments and each living rank's buffers and position resume, although no checkpoint was due."""
    digests = job.lose(3, 0)
    for process in job.ranks[1:]:
        assert process.wait() != 0
    committed = job.daemon.lines.wait(event="committed")
    assert (committed["step"], committed["without_ranks"]) == (STEP, "0")
    assert "yes, without rank 0" in job.vm.swansong("ls", "--wide").stdout
    resumed = job.resumed(3)
    assert [line["from_step"] for line in resumed] == [STEP] * 3
    assert [line["batches"] for line in resumed] == [STEP] * 3
    assert [line["digest"] for line in resumed[1:]] == digests[1:]


def test_ranks_that_a_launcher_ends_save_first(job: Job) -> None:
    """SIGTERM of a launcher reaches ranks that have not noticed the death in a collective yet."""
    job.lose(3, 1, "--block")
    living = [job.ranks[0], job.ranks[2]]
    assert [process.wait() for process in living] == [-signal.SIGTERM] * 2
    committed = job.daemon.lines.wait(event="committed")
    assert (committed["step"], committed["without_ranks"]) == (STEP, "1")


def test_ranks_that_a_launcher_ends_save_nothing_while_all_are_alive(job: Job) -> None:
    """Ranks of a job that is ended as a whole end at once, and leave no checkpoint without a rank."""
    ranks = job.start(2, "--block", "--die-at", str(STEP))
    for process in ranks:
        process.lines.wait(60, step=STEP)
    for process in ranks:
        os.kill(process.pid, signal.SIGTERM)
    assert [process.wait() for process in ranks] == [-signal.SIGTERM] * 2
    until(lambda: not job.vm.status()["trainers"], what="both ranks left")
    assert not job.daemon.lines.all(event="committed")


def test_ranks_that_are_ended_with_the_daemon_save_first(job: Job) -> None:
    """A pod or a shutdown sends SIGTERM to ranks and daemon at once: all ranks save the same step, SAFE."""
    ranks = job.start(2)
    for process in ranks:
        process.lines.wait(60, step=STEP)
    for process in (*ranks, job.daemon):
        os.kill(process.pid, signal.SIGTERM)
    assert job.daemon.wait() == 0
    verdict = job.daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "SAFE"
    assert [process.wait() for process in ranks] == [-signal.SIGTERM] * 2
    committed = job.daemon.lines.wait(event="committed")
    assert (committed["step"], committed.get("without_ranks", "")) == (verdict["step"], "")


def test_replicas_of_a_sharded_job_save_the_shards_of_a_dead_rank(job: Job) -> None:
    """With two replicas of each shard, the other holder of a dead rank's shard writes it."""
    digests = job.lose(4, 1, "--how", "hsdp")
    assert job.daemon.lines.wait(event="committed")["without_ranks"] == "1"
    resumed = job.resumed(4, "--how", "hsdp")
    assert [(line["from_step"], line["digest"]) for line in resumed] == [
        (STEP, digest) for digest in digests
    ]


def test_missing_shards_are_named_and_nothing_is_committed(job: Job) -> None:
    """Without a replica, the checkpoint is refused, and the reason names the shards of the dead rank."""
    job.lose(2, 1, "--how", "fsdp")
    failed = job.daemon.lines.wait(event="save_failed")
    assert (
        "only the lost rank 1 held parts of the state: model.0.weight of rank 1" in failed["reason"]
    )
    job.ranks[0].wait()
    assert job.resumed(2, "--how", "fsdp")[0]["from_step"] == 0
    assert not job.daemon.lines.all(event="committed")
