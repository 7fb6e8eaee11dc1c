# SPDX-License-Identifier: Apache-2.0
"""Over several VMs, SAFE means that a restore returns what every rank had trained when it was asked.

Two witnesses are independent of the daemons: the ranks print their steps, and a VM that takes no part in the
job restores from the bucket.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testkit import TRAINERS
from testkit.netns.cluster import Cluster, Machine
from testkit.rig import Process, Vm
from testkit.waiting import until

RANK = TRAINERS / "job_witness.py"


class Job:
    """A job of two VMs with one rank each, and an S3 server."""

    def __init__(self, directory: Path, started: ExitStack) -> None:
        pytest.importorskip("torch")
        self.cluster = Cluster(directory, started, has_s3=True)
        self.machines = self.cluster.add(2)
        self.ranks: list[Process] = []
        self._elsewhere = directory / "elsewhere"

    def start(self, *arguments: str) -> None:
        """Start the job; returns after 25 steps."""
        arguments = ("--every-steps", "10", *arguments)
        self.ranks = self.cluster.start(self.machines, *arguments, script=RANK)
        for rank in self.ranks:
            rank.lines.wait(90, step=25)

    def trained(self) -> list[dict[str, Any]]:
        """The newest step that each rank has printed, with its line."""
        steps = [[s for s in rank.lines.all() if "step" in s] for rank in self.ranks]
        return [each[-1] for each in steps]

    def expect_safe(self, trained: list[dict[str, Any]]) -> None:
        """Require SAFE on both VMs, and that a new VM restores these steps or later ones."""
        for machine in self.machines:
            verdict = daemon(machine).lines.wait(event="verdict")
            assert verdict["verdict"] == "SAFE", verdict
        self._elsewhere.mkdir()
        vm = Vm(self._elsewhere, self.cluster.store, warm=self.machines[0].vm.warm)
        place = vm.disk / "restored"
        answer = vm.swansong("restore", "--to", str(place))
        assert answer.returncode == 0, answer.stderr
        states = [json.loads(path.read_text()) for path in sorted(place.rglob("position.json"))]
        assert [state["rank"] for state in states] == [0, 1]
        assert len({state["step"] for state in states}) == 1, states
        for state, witness in zip(states, trained, strict=True):
            assert state["line"] == witness["line"]
            assert state["step"] >= witness["step"]


def daemon(machine: Machine) -> Process:
    assert machine.vm.daemon is not None
    return machine.vm.daemon


@pytest.fixture
def job(network: Any, tmp_path: Path) -> Iterator[Job]:
    with ExitStack() as started:
        yield Job(tmp_path, started)


@pytest.mark.fault("G17", "O02")
def test_a_vm_that_cannot_reach_the_store_delays_safe_on_both(job: Job) -> None:
    """The other VM has the notice and commits its part; SAFE comes once the first VM can commit again."""
    healthy, noticed = job.machines
    job.start()
    healthy.lose_store()
    trained = job.trained()
    noticed.notice(in_s=60)
    until(lambda: noticed.vm.status()["state"] == "WAITING_FOR_PEERS", what="its own part")
    daemon(healthy).lines.wait(event="evacuation", phase="sealed")
    for machine in job.machines:
        assert not daemon(machine).lines.all(event="verdict")
    healthy.find_store()
    job.expect_safe(trained)


@pytest.mark.fault("G17", "O03")
def test_a_vm_that_flushes_slowly_delays_safe_by_its_flush_only(job: Job) -> None:
    """Meanwhile the other VM commits its parts of many newer sets, which the slow VM skips."""
    noticed = job.machines[1]
    job.start("--padding-rank", "0", "--padding-bytes", "300000")
    job.cluster.bucket.order("pace", connection_bytes_per_s=100_000)
    trained = job.trained()
    noticed.notice(in_s=60)
    verdict = daemon(noticed).lines.wait(30, event="verdict")
    assert verdict["verdict"] == "SAFE"
    assert len(daemon(noticed).lines.all(event="committed")) > 6, "it was not slow"
    job.cluster.bucket.order("clear")
    job.expect_safe(trained)
