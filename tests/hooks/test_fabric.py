# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric: a preempted and resumed run is equal to an uninterrupted run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import swansong
import swansong.fabric
import torch
from lightning.fabric import Fabric
from swansong import layout
from swansong.testing import check_resume
from swansong.torch import ResumableLoader, seed_all
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from testkit import EXAMPLES
from testkit.fake_daemon import FakeDaemon
from testkit.python_process import ENVIRONMENT
from testkit.waiting import until

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

Story = list[tuple[int, float]]


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def unchanged(model: nn.Module) -> nn.Module:
    return model


def train(
    daemon: FakeDaemon,
    stop_at: int,
    *,
    before: Callable[[nn.Module], nn.Module] = unchanged,
    after: Callable[[nn.Module], nn.Module] = unchanged,
    strategy: str = "auto",
) -> tuple[Story, dict[str, Any]]:
    """Train to a step; ``before`` and ``after`` wrap the model before and after Fabric does."""
    seed_all(3)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    model = before(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    model, optimizer = fabric.setup(model, optimizer)
    # A sampler whose order depends on the epoch, which Fabric counts itself.
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader = ResumableLoader(fabric.setup_dataloaders(DataLoader(data, 8, sampler=sampler)))
    state = {"model": after(model), "optimizer": optimizer, "loader": loader, "step": 0}
    guard = swansong.fabric.attach(fabric, state, socket=daemon.path)
    guard.restore()
    story = []
    while True:
        for text, target in loader:
            loss = nn.functional.mse_loss(state["model"](text), target)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            story.append((state["step"], loss.item()))
            guard.step(state["step"])
            if state["step"] == stop_at:
                daemon.request(f"r{len(daemon.sealed())}")
                until(lambda: guard.request is not None)
                guard.close()
                return story, state


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the process group and the environment variables that Fabric leaves."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "wraps",
    [{}, {"before": compiled, "strategy": "ddp"}, {"after": compiled}],
    ids=["plain", "ddp-compiled-before", "compiled-after"],
)
@pytest.mark.usefixtures("alone")
def test_one_process(daemon: FakeDaemon, wraps: dict[str, Any]) -> None:
    """In the third epoch: losses with dropout, order of the samples, weights and plain values."""
    expected, reference = train(daemon, 17, **wraps)
    daemon.restorable = lambda: None
    begin, _ = train(daemon, 12, **wraps)
    sets = {layout.parse_sealed_name(path.name)[0]: path for path in daemon.wait_sealed(2)}
    daemon.restorable = lambda: (sets[12], 12)
    rest, state = train(daemon, 17, **wraps)
    assert begin + rest == expected
    assert rest[0][0] == 13
    for one, other in zip(
        state["model"].parameters(), reference["model"].parameters(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.fault("T12")
def test_two_ranks_that_fabric_launches(tmp_path: Path, warm_frameworks: str) -> None:
    """The example with DDP: no environment variable describes its ranks fully."""
    report = check_resume(
        [
            *(warm_frameworks, str(EXAMPLES / "with_fabric.py")),
            *("--windows", "256", "--devices", "2"),
        ],
        steps=6,
        kill_at=[3],
        ranks=2,
        has_launcher=True,
        directory=tmp_path,
        environment=ENVIRONMENT,
    )
    assert report.saved_steps == [3]
    assert report.losses == 6


def test_refused_at_attach() -> None:
    """A strategy that cannot be saved by rank, and a loader without state, are named with the fix."""

    class Other:
        strategy = object()

    with pytest.raises(TypeError, match="FSDP2"):
        swansong.fabric.attach(Other(), {})
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(4)), 2))
    with pytest.raises(TypeError, match=r"state\['data'\] has no state_dict.*ResumableLoader"):
        swansong.fabric.attach(fabric, {"data": loader})
