# SPDX-License-Identifier: Apache-2.0
"""A job with ``fully_shard`` over several VMs: each VM fetches the shards that its ranks read."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from testkit import TRAINERS
from testkit.clouds import Bucket
from testkit.rig import Process, Vm
from testkit.waiting import until
from testkit.warm import python_of

STEPS = 2


class Job:
    """A job over several VMs, whose ranks are forks of a warm Python."""

    def __init__(self, bucket: Bucket, new_vm: Callable[..., Vm], *, has_prefetch: bool) -> None:
        self.bucket = bucket
        self.has_prefetch = has_prefetch
        self._new_vm = new_vm
        self._ranks: list[Process] = []

    def new_vm(self, name: str) -> Vm:
        settings = {"restore": {"prefetch": self.has_prefetch}}
        vm = self._new_vm(name, self.bucket.store, settings=settings)
        vm.start_daemon()
        return vm

    def start(self, vms: dict[Vm, int]) -> list[dict[str, Any]]:
        """Start these numbers of ranks on the VMs; returns the states that the ranks report."""
        for rank in self._ranks:
            rank.kill()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        places = [(vm, local) for vm, count in vms.items() for local in range(count)]
        self._ranks = []
        for rank, (vm, local) in enumerate(places):
            process = Process(
                [sys.executable, str(TRAINERS / "sharded_trainer.py"), str(STEPS)],
                lines_on="stdout",
                warm=python_of(os.environ["SWANSONG_TEST_WARM"], "torch"),
                SWANSONG_SOCKET=str(vm.socket),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                RANK=str(rank),
                WORLD_SIZE=str(len(places)),
                LOCAL_RANK=str(local),
                LOCAL_WORLD_SIZE=str(vms[vm]),
                GROUP_RANK=str(list(vms).index(vm)),
                GROUP_WORLD_SIZE=str(len(vms)),
            )
            vm.processes.append(process)
            self._ranks.append(process)
        return [rank.lines.wait(event="state") for rank in self._ranks]

    def damage(self, rank: int, step: int) -> None:
        """Flip one bit of the weights of a rank in the commit of a step."""
        (manifest,) = (m for m in self.bucket.manifests() if (m["step"], m["node"]) == (step, rank))
        (shard,) = (each for each in manifest["shards"] if "/model-" in each["path"])
        self.bucket.damage(shard)


@pytest.fixture
def new_job(bucket: Bucket, new_vm: Callable[..., Vm]) -> Callable[..., Job]:
    return partial(Job, bucket, new_vm)


def restored_ranks(vm: Vm) -> set[str]:
    """The ranks whose shards the daemon has published to the trainers of its VM."""
    (restored,) = (vm.run_directory / "restored").glob("step-*")
    return {path.name for path in restored.iterdir() if path.is_dir()}


def committed(vm: Vm) -> int | None:
    commit = vm.status()["last_commit"]
    return None if commit is None else int(commit["step"])


def test_each_vm_fetches_the_shards_of_its_own_ranks(new_job: Callable[..., Job]) -> None:
    """One of two VMs is replaced: the new one fetches only the shards of its rank.

    Then the job continues with three ranks.  They need the shards of both old ranks, and get the same state.
    """
    job = new_job(has_prefetch=False)
    first, gone = job.new_vm("first"), job.new_vm("gone")
    saved = job.start({first: 1, gone: 1})
    assert [state["from_step"] for state in saved] == [0, 0]
    for vm in (first, gone):
        until(lambda vm=vm: committed(vm) == STEPS, timeout_s=60, what="the commit of all VMs")
    gone.power_off()

    second = job.new_vm("second")
    states = job.start({first: 1, second: 1})
    assert [state["from_step"] for state in states] == [STEPS, STEPS]
    assert {state["digest"] for state in states} == {saved[0]["digest"]}
    assert restored_ranks(second) == {"rank-00001"}

    states = job.start({first: 1, second: 2})
    assert [state["from_step"] for state in states] == [STEPS] * 3
    assert {state["digest"] for state in states} == {saved[0]["digest"]}
    assert restored_ranks(second) == {"rank-00000", "rank-00001"}


@pytest.mark.fault("G30")
def test_all_vms_resume_from_an_older_commit_if_one_of_them_finds_damage(
    new_job: Callable[..., Job],
) -> None:
    """Only the second VM reads the damaged shard.  Both continue from the step before, and report it.

    The ranks repeat the lost step and get the same state: no tensor of the damaged commit is left.
    """
    job = new_job(has_prefetch=True)
    vms = [job.new_vm("first"), job.new_vm("second")]
    saved = job.start(dict.fromkeys(vms, 1))
    for vm in vms:
        until(lambda vm=vm: committed(vm) == STEPS, timeout_s=60, what="the commit of all VMs")
        vm.power_off()
    job.damage(rank=1, step=STEPS)

    vms = [job.new_vm("third"), job.new_vm("fourth")]
    states = job.start(dict.fromkeys(vms, 1))
    assert [state["from_step"] for state in states] == [STEPS - 1, STEPS - 1]
    assert {state["digest"] for state in states} == {saved[0]["digest"]}
    for vm in vms:
        assert vm.daemon is not None
        # A prefetch reads the shards of all VMs, so it may find the damage before a rank asks.
        events = ("commit_refused", "commit_skipped")
        (refused, *_) = (line for line in vm.daemon.lines.all() if line["event"] in events)
        assert refused["commit"] == f"generation 1 step {STEPS}"
        assert "rank-00001" in refused["reason"]
        until(lambda vm=vm: committed(vm) == STEPS, timeout_s=60, what="the repeated step")
