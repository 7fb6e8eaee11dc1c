# SPDX-License-Identifier: Apache-2.0
"""A VM of a job disappears without a notice: the others save the last step, and train on without it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testkit import TRAINERS
from testkit.netns.cluster import RENDEZVOUS_PORT, Cluster, Machine, part
from testkit.rig import Process
from testkit.waiting import until

RANK = TRAINERS / "losing.py"


@pytest.fixture
def cluster(network: Any, tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("torch")
    with ExitStack() as started:
        yield Cluster(tmp_path, started)


def first_new_step(trainer: Process, world: int, *, after: int) -> dict[str, Any]:
    """The first line of a start with ``world`` VMs, once it has completed a step.

    Args:
        after: lines of the trainer before the loss: torchrun may have begun with one VM less.
    """
    trainer.lines.wait(90, after=after, event="launched", world=world)
    print(f"launched {time.monotonic():.1f}")
    resumed = trainer.lines.wait(90, after=after, event="resumed", world=world)
    print(f"resumed {time.monotonic():.1f}")
    trainer.lines.wait(60, after=after, step=resumed["from_step"] + 1, world=world)
    print(f"trained {time.monotonic():.1f}")
    return resumed


def launch(machines: list[Machine], first: Machine, count: int) -> list[Process]:
    """Start torchrun for a job of ``count`` VMs, which may continue with one VM less."""
    arguments = ("--resize", "--every-steps", "100000", "--timeout-s", "10", "--meet", str(count))
    nodes, endpoint = f"{count - 1}:{count}", first.address
    return [
        each.torchrun(*arguments, nodes=nodes, endpoint=endpoint, restarts=3, script=RANK)
        for each in machines
    ]


def train(cluster: Cluster, count: int) -> list[Process]:
    """Start a job, and wait for step 20."""
    machines = cluster.add(count)
    trainers = launch(machines, machines[0], count)
    for each in trainers:
        each.lines.wait(120, step=20, world=count)
    return trainers


@pytest.mark.fault("N12")
def test_a_vm_that_disappears_costs_the_job_no_step(cluster: Cluster) -> None:
    """Its network breaks first.  The remaining VMs resume the last step that they have completed.

    One of them may notice the loss only when the other has saved: it then takes no part.  One has a notice at
    this moment, which no checkpoint of all ranks can answer.  Its verdict is not SAFE: the position of the
    lost rank is unknown.
    """
    trainer, *_, other = train(cluster, 3)
    staying, doomed = cluster.machines[0], cluster.machines[-1]
    lost = other.lines.all(step=20, world=3)[-1]["rank"]
    subprocess.run(["ip", "link", "set", f"vm{doomed.number}", "down"], check=True, timeout=20)
    print(f"lost {time.monotonic():.1f}")
    before = len(trainer.lines.all())
    cluster.machines[1].notice(in_s=120)
    doomed.power_off()
    resumed = first_new_step(trainer, 2, after=before)
    committed = staying.vm.daemon.lines.wait(event="committed") if staying.vm.daemon else {}
    steps = [line for line in trainer.lines.all(world=3) if "step" in line]
    left_out = committed["without_ranks"]
    assert left_out in (str(lost), "0-1", "0, 2", "1-2")
    savers = 2 if left_out == str(lost) else 1
    assert resumed["from_step"] == committed["step"] == steps[-1]["step"] >= 20
    assert resumed["digest"] == steps[-1]["digest"]
    # A start with one VM less, before all have met, has taken the first generation; the next may save, too.
    where = committed["generation"], committed["step"]
    whole = {part(*where, node, savers) for node in range(savers)}
    assert {each for each in cluster.parts() if each <= max(whole)} == whole
    assert f"yes, without rank {left_out}" in staying.vm.swansong("ls", "--wide").stdout
    verdicts = staying.vm.daemon.lines.all(event="verdict") if staying.vm.daemon else []
    assert verdicts
    safe = [v["reason"] for v in verdicts if v["verdict"] == "SAFE" and v["step"] == where[1]]
    # Also before the next start has trained: it begins with exactly this state.
    assert all("training had completed no step" in reason for reason in safe)


@pytest.mark.fault("N09")
def test_after_safe_the_job_continues_with_a_replacement(cluster: Cluster) -> None:
    """A VM that ends after SAFE costs no step: the others resume the last step that they completed.

    torchrun on a replacement waits in the rendezvous, while its daemon fetches each commit of the job.
    """
    trainer, _ = train(cluster, 2)
    staying, doomed = cluster.machines
    (joining,) = cluster.add(1)
    (spare,) = launch([joining], staying, 2)
    sockets = Path(f"/proc/{spare.pid}/net/tcp6")
    until(lambda: f":{RENDEZVOUS_PORT:04X} 01 " in sockets.read_text(), what="the rendezvous")
    before = len(trainer.lines.all())
    doomed.notice(in_s=120)
    began_s = time.monotonic()
    assert doomed.vm.daemon is not None
    safe = doomed.vm.daemon.lines.wait(60, event="verdict", verdict="SAFE")
    print(f"SAFE {time.monotonic() - began_s:.1f} s after the notice")
    assert joining.vm.daemon is not None
    joining.vm.daemon.lines.wait(event="prefetched", step=safe["step"])
    print(f"prefetched {time.monotonic() - began_s:.1f} s after the notice")
    assert not joining.vm.daemon.lines.all(event="start_seen")
    print(f"lost {time.monotonic():.1f}")
    doomed.power_off()
    resumed = first_new_step(trainer, 2, after=before)
    lines = trainer.lines.all()
    steps = [line for line in lines[: lines.index(resumed)] if "step" in line]
    assert resumed["from_step"] == steps[-1]["step"] >= safe["step"]
    assert resumed["digest"] == steps[-1]["digest"]
    assert staying.vm.status()["generation"] > safe["generation"]
