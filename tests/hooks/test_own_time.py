# SPDX-License-Identifier: Apache-2.0
"""The time of a step in which a rank of DDP waits for no other, with a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from swansong._torch import own_time
from swansong._torch.own_time import OwnTime
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from testkit.waiting import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(own_time, "time", clock)
    return clock


class Slow(nn.Module):
    """Another time passes before the forward pass, as for the buffers of rank 0, than in it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2))
        self.clock, self.seconds = clock, 0.3
        self.register_forward_pre_hook(lambda *_: clock.advance(5.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.clock.advance(self.seconds)
        return self.layers(values)


def step(measured: OwnTime, clock: Clock, model: nn.Module) -> None:
    measured.note_boundary()
    clock.advance(0.2)  # the batch
    model(torch.ones(1, 2))
    clock.advance(7.0)  # the backward pass
    model(torch.ones(1, 2))  # of a second batch of the step


@pytest.mark.usefixtures("process_group")
def test_batch_and_forward_pass_are_measured(clock: Clock) -> None:
    """Without the wait for buffers before it; the usual time is the median of the last nine."""
    slow = Slow(clock)
    model = DistributedDataParallel(slow)
    measured = OwnTime({"other": {"no": "module"}, "model": nn.Sequential(model)})
    assert measured.usual_s() is None
    step(measured, clock, model)
    assert measured.usual_s() == pytest.approx(0.5)
    slow.seconds = 60.0
    step(measured, clock, model)
    slow.seconds = 0.4
    for _ in range(9):
        step(measured, clock, model)
    assert measured.usual_s() == pytest.approx(0.6)
    measured.end()
    slow.seconds = 1.0
    for _ in range(9):
        step(measured, clock, model)
    assert measured.usual_s() == pytest.approx(0.6)


@pytest.mark.usefixtures("process_group")
def test_one_step_in_a_second_is_measured(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(clock)
    model = DistributedDataParallel(slow)
    measured = OwnTime({"model": model})
    marks: list[Any] = []
    monkeypatch.setattr(measured, "_measured", marks)
    monkeypatch.setattr(
        clock, "advance", lambda seconds: setattr(clock, "now", clock.now + seconds / 100)
    )
    for _ in range(50):
        step(measured, clock, model)  # 0.18 s
    assert 6 <= len(marks) <= 9


@pytest.mark.usefixtures("process_group")
def test_a_forward_pass_in_which_ranks_wait_is_not_measured(clock: Clock) -> None:
    """Such as with SyncBatchNorm, or without DDP."""
    plain = Slow(clock)
    synced = DistributedDataParallel(Slow(clock))
    synced.module.layers.append(nn.SyncBatchNorm(2))  # DDP itself refuses it on a CPU
    for model in (plain, synced):
        measured = OwnTime({"model": model})
        measured.note_boundary()
        plain(torch.ones(1, 2))
        assert measured.usual_s() is None
        assert not measured._hooks
