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
from testkit.netns.cluster import Cluster, part

RANK = TRAINERS / "losing.py"


@pytest.fixture
def cluster(network: Any, tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("torch")
    with ExitStack() as started:
        yield Cluster(tmp_path, started)


@pytest.mark.fault("N12")
@pytest.mark.parametrize("how", ["its processes are killed", "its packets are lost, too"])
def test_a_vm_that_disappears_costs_the_job_no_step(cluster: Cluster, how: str) -> None:
    """The remaining VM resumes the last step that it has completed, although no checkpoint was due."""
    staying, doomed = cluster.add(2)
    arguments = ("--resize", "--every-steps", "100000", "--timeout-s", "10")
    trainer, other = cluster.start(
        [staying, doomed], *arguments, nodes="1:2", restarts=3, script=RANK
    )
    for each in (trainer, other):
        each.lines.wait(90, step=20)
    (rank,) = {line["rank"] for line in trainer.lines.all(step=20)}
    gone_mono_s = time.monotonic()
    if how != "its processes are killed":
        subprocess.run(["ip", "link", "set", f"vm{doomed.number}", "down"], check=True, timeout=20)
    doomed.power_off()
    assert staying.vm.daemon is not None
    committed = staying.vm.daemon.lines.wait(60, event="committed")
    committed_s = time.monotonic() - gone_mono_s
    resumed = trainer.lines.wait(90, event="resumed", world=1)
    resumed_s = time.monotonic() - gone_mono_s
    trainer.lines.wait(60, step=resumed["from_step"] + 1, world=1)
    trained_s = time.monotonic() - gone_mono_s
    figures = f"committed {committed_s:.1f}, resumed {resumed_s:.1f}, trained {trained_s:.1f} s"
    print(f"{how}: {figures} after the loss")
    steps = [line for line in trainer.lines.all(world=2) if "step" in line]
    assert committed["without_ranks"] == str(1 - rank)
    assert resumed["from_step"] == committed["step"] == steps[-1]["step"] >= 20
    assert resumed["digest"] == steps[-1]["digest"]
    assert cluster.parts() == {part(1, committed["step"], 0, 1)}
    assert f"yes, without rank {1 - rank}" in staying.vm.swansong("ls").stdout
