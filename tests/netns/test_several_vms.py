# SPDX-License-Identifier: Apache-2.0
"""A job over several VMs, each with its own network, metadata service, daemon and disk; one bucket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from swansongd.core.starts import FINISH_S

from testkit.netns.cluster import Cluster, part
from testkit.waiting import until


@pytest.fixture
def cluster(network: Any, tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("torch")
    with ExitStack() as started:
        yield Cluster(tmp_path, started)


@pytest.mark.fault("N09", "T12")
def test_a_notice_at_one_vm_saves_the_job_which_resumes_on_fewer_and_on_more(
    cluster: Cluster,
) -> None:
    """Both parts are committed and in the farewells; one VM resumes the job, and then three do."""
    doomed, other = cluster.add(2)
    first, _ = cluster.start([other, doomed])
    first.lines.wait(90, step=5)
    doomed.notice(in_s=60)
    assert doomed.vm.daemon is not None
    assert other.vm.daemon is not None
    verdict = doomed.vm.daemon.lines.wait(event="verdict", verdict="SAFE")
    peer = other.vm.daemon.lines.wait(event="notice", source="peer")
    assert peer["seconds_left"] <= 60
    other.vm.daemon.lines.wait(event="verdict", verdict="SAFE")
    generation, step = verdict["generation"], verdict["step"]
    until(
        lambda: {part(generation, step, node, 2) for node in (0, 1)} <= cluster.parts(),
        what="both parts",
    )
    until(
        lambda: (
            [f["complete"] for f in cluster.farewells() if f["verdict"] == "SAFE"].count(True) == 2
        ),
        what="two farewells with a whole checkpoint",
    )
    cluster.power_off()

    (alone,) = cluster.add(1)
    (trainer,) = cluster.start([alone], "--every-steps", "20")
    resumed = trainer.lines.wait(90, event="resumed")
    assert (resumed["from_step"], resumed["world"]) == (step, 1)
    assert alone.vm.daemon is not None
    grown = alone.vm.daemon.lines.wait(90, event="committed")
    alone.power_off()

    three = cluster.add(3)
    for trainer in cluster.start(three):
        resumed = trainer.lines.wait(120, event="resumed")
        assert resumed["from_step"] >= grown["step"]
        assert resumed["world"] == 3


@pytest.mark.fault("G17", "T03")
def test_no_vm_waits_for_the_share_of_a_rank_that_died_in_its_save(cluster: Cluster) -> None:
    """torchrun starts the job again on the same VMs, whose daemons have committed all their sets.

    No VM chooses the share that one of them has committed and holds on its disk.
    """
    machines = cluster.add(2)
    arguments = ("--every-steps", "10", "--die-in-save", "30", "--die-node", "1")
    trainers = cluster.start(machines, *arguments, restarts=3)
    until(
        lambda: any("/000000000030/" in name for name in cluster.parts()),
        timeout_s=90,
        what="a share",
    )
    died_mono_s = time.monotonic()
    for trainer in trainers:
        assert trainer.lines.wait(90, event="resumed", from_step=20)["world"] == 2
        trainer.lines.wait(90, step=21)
    took_s = time.monotonic() - died_mono_s
    print(f"the job trained again {took_s:.1f} s after the death")
    assert took_s < FINISH_S + 4, (
        "torchrun itself takes 6 to 29 s of it, by the load of the machine"
    )


@pytest.mark.fault("T12")
def test_a_nan_at_one_vm_rolls_the_whole_job_back_in_its_processes(cluster: Cluster) -> None:
    """All ranks load the newest healthy checkpoint as a new generation; no VM restores an unhealthy one."""
    first, second = cluster.add(2)
    arguments = ("--every-steps", "10", "--bad-from", "29", "--bad-rank", "1")
    trainers = cluster.start([first, second], *arguments)
    for trainer in trainers:
        back = trainer.lines.wait(90, event="rolled_back")
        assert (back["from_step"], back["to_step"]) == (30, 20), back
        trainer.lines.wait(step=45)
    # The first checkpoint of the new generation is taken immediately.
    until(lambda: {part(2, 21, node, 2) for node in (0, 1)} <= cluster.parts(), what="step 21")
    until(lambda: {part(2, 40, node, 2) for node in (0, 1)} <= cluster.parts(), what="step 40")
    assert all(trainer.popen.poll() is None for trainer in trainers)
    for vm in (first.vm, second.vm):
        assert vm.status()["generation"] == 2
    cluster.power_off()
    for machine in (first, second):
        machine.boot()
    for trainer in cluster.start([first, second]):
        assert trainer.lines.wait(90, event="resumed")["from_step"] >= 40
