# SPDX-License-Identifier: Apache-2.0
"""``guard.poll()`` saves only the state of the last ``guard.step()``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import swansong
import torch
from swansong.layout import parse_sealed_name
from swansong.protocol import Hello
from swansong.torch import ResumableLoader, TrainingState
from torch import nn
from torch.utils.data import DataLoader

from testkit.fake_daemon import FakeDaemon
from testkit.waiting import until


class Job:
    """A training job at the end of its first step."""

    def __init__(self, socket: str) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = ResumableLoader(DataLoader(torch.randn(64, 4), batch_size=8))
        state = TrainingState(self.model, self.optimizer, loader=self.loader)
        self.guard = swansong.attach(state, socket=socket)
        self.guard.restore()
        self.batches = iter(self.loader)
        self.update()
        self.guard.step(1)

    def update(self) -> None:
        self.model(next(self.batches)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def make_job(daemon: FakeDaemon) -> Iterator[Callable[[], Job]]:
    with ExitStack() as stack:

        def make() -> Job:
            job = Job(daemon.path)
            stack.callback(job.guard.close)
            return job

        yield make


@pytest.fixture
def job(make_job: Callable[[], Job]) -> Job:
    return make_job()


def request(daemon: FakeDaemon, job: Job) -> None:
    daemon.request("r1")
    until(lambda: job.guard.request is not None)


def evaluate(job: Job) -> None:
    job.model.eval()
    with torch.no_grad():
        job.model(torch.randn(8, 4))
    job.model.train()


def change_learning_rate(job: Job) -> None:
    job.optimizer.param_groups[0]["lr"] = 0.01


@pytest.mark.parametrize("change", [evaluate, change_learning_rate])
def test_poll_saves_after_a_change_that_is_no_step(
    daemon: FakeDaemon, job: Job, change: Callable[[Job], object]
) -> None:
    """An evaluation after ``guard.step()`` leaves the weights and the position as they were."""
    change(job)
    request(daemon, job)
    job.guard.poll()
    daemon.wait_sealed(1)


def draw(job: Job) -> None:
    next(job.batches)


def step(job: Job) -> None:
    job.model(torch.randn(8, 4)).sum().backward()
    job.optimizer.step()


def fused_step(job: Job) -> None:
    """torch does not count the changes of a fused optimizer."""
    job.model(torch.randn(8, 4)).sum().backward()
    job.optimizer.param_groups[0]["fused"] = True
    job.optimizer.step()


def swap_in_place(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.zero_()


def swap_memory(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data = torch.zeros_like(parameter)


@pytest.mark.parametrize("change", [draw, step, fused_step, swap_in_place, swap_memory, Job.update])
def test_poll_in_the_middle_of_a_step_leaves_the_save_to_the_next_step(
    daemon: FakeDaemon,
    job: Job,
    change: Callable[[Job], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A set of step 1 with weights or a position of step 2 would train that step twice, or skip a batch."""
    change(job)
    request(daemon, job)
    with caplog.at_level(logging.WARNING, logger="swansong"):
        job.guard.poll()
        assert job.guard.poll() is not None
    assert [
        each.message for each in caplog.records if "guard.poll() saves nothing here" in each.message
    ]
    assert len(caplog.records) == 1
    assert daemon.sealed() == []
    job.guard.step(2)
    (sealed,) = daemon.wait_sealed(1)
    assert parse_sealed_name(sealed.name)[0] == 2


def test_a_daemon_that_starts_in_the_middle_of_a_step_gets_the_next_one(
    daemon: FakeDaemon, make_job: Callable[[], Job]
) -> None:
    """Without a daemon, step() does not look at the state, so the first poll() cannot compare it."""
    daemon.stop()
    job = make_job()
    job.update()
    daemon.start()
    until(lambda: daemon.all_of(Hello))
    request(daemon, job)
    assert job.guard.poll() is not None
    assert daemon.sealed() == []
    job.guard.step(2)
    (sealed,) = daemon.wait_sealed(1)
    assert parse_sealed_name(sealed.name)[0] == 2


def test_a_poll_in_a_critical_block_owes_its_save_to_the_end_of_the_block(
    daemon: FakeDaemon, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Averaged weights are swapped in for an evaluation: the save comes when they are swapped out."""
    with job.guard.critical(), torch.no_grad():
        for parameter in job.model.parameters():
            parameter.add_(1)
        request(daemon, job)
        job.guard.poll()
        assert daemon.sealed() == []
        for parameter in job.model.parameters():
            parameter.sub_(1)
    daemon.wait_sealed(1)
    assert not [each for each in caplog.messages if "guard.poll() saves nothing here" in each]


def test_a_poll_after_a_critical_block_saves(daemon: FakeDaemon, job: Job) -> None:
    """The block has undone its changes, so the state is that of the last step."""
    with job.guard.critical():
        swap_in_place(job)
    request(daemon, job)
    job.guard.poll()
    daemon.wait_sealed(1)
