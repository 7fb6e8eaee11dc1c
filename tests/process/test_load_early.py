# SPDX-License-Identifier: Apache-2.0
"""A trainer loads tensors while the daemon still fetches the last files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import swansong
import torch
from swansong.torch import TrainingState
from torch import nn

from testkit.clouds import Bucket
from testkit.rig import Vm
from testkit.waiting import until


class Job:
    def __init__(self, vm: Vm, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(1100, 1000)  # too large for a pack
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.guard = swansong.attach(
            TrainingState(self.model, self.optimizer), socket=vm.socket, every_steps=1
        )

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 1100)).square().sum().backward()
        self.optimizer.step()
        self.guard.step(step)
        assert self.guard.wait_saved(30)

    def weights(self) -> list[torch.Tensor]:
        return [each.clone() for each in self.model.state_dict().values()]

    def state(self) -> list[torch.Tensor]:
        moments = [each for state in self.optimizer.state.values() for each in state.values()]
        return [*self.weights(), *(each.clone() for each in moments), torch.get_rng_state()]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture
def two_steps(bucket: Bucket, new_vm: Any) -> list[list[torch.Tensor]]:
    """The states at steps 1 and 2, both committed by a VM that is gone."""
    # Parts of 5 MiB: the optimizer's file is an object of its own, the others share a pack.
    vm = new_vm("first", bucket.store, settings={"flush": {"chunk_bytes": "5MiB"}})
    daemon = vm.start_daemon()
    job, states = Job(vm, 1), []
    with job.guard:
        assert job.guard.restore() == 0
        for step in (1, 2):
            job.train(step)
            states.append(job.state())
            daemon.lines.wait(event="committed", step=step)
    vm.power_off()
    return states


@pytest.mark.fault("G26")
@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "damaged"])
def test_weights_are_in_place_before_the_last_byte_is_sent(
    bucket: Bucket, new_vm: Any, two_steps: list[list[torch.Tensor]], *, is_damaged: bool
) -> None:
    """The store refuses the optimizer's file.  If that file is damaged, step 1 is restored instead."""
    newest = bucket.manifests()[0]
    (held,) = [each for each in newest["shards"] if "optimizer-" in each["path"]]
    if is_damaged:
        bucket.damage(held)
    match = Path(held["key"]).name
    bucket.order("answer", status=503, method="GET", match=match, times=1_000_000)
    vm = new_vm("second", bucket.store)
    daemon = vm.start_daemon()
    job, restored = Job(vm, 2), []
    thread = threading.Thread(target=lambda: restored.append(job.guard.restore()))
    with job.guard:
        thread.start()
        until(lambda: are_equal(job.weights(), two_steps[1][:2]), what="the weights of step 2")
        assert not job.optimizer.state
        assert restored == []
        bucket.order("clear")
        thread.join(120)
        assert restored == [1 if is_damaged else 2]
        assert are_equal(job.state(), two_steps[restored[0] - 1])
    assert bool(daemon.lines.all(event="commit_skipped")) == is_damaged
