# SPDX-License-Identifier: Apache-2.0
"""The state of the last ``guard.step()`` after a failed forward pass, or the reason why it is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from swansong._torch.last_boundary import LastBoundary
from swansong.torch import ResumableLoader
from torch import nn

from testkit.training_parts import DEVICE


class Loop:
    """A training loop with everything that a forward pass changes."""

    def __init__(self, **others: Any) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.loader = ResumableLoader(torch.utils.data.DataLoader(torch.randn(32, 4), 4))
        self.values: dict[str, Any] = {}
        objects = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        objects |= {"scheduler": self.scheduler, **others}
        self.boundary = LastBoundary(objects, self.values)
        self.batches = iter(self.loader)

    def forward(self) -> None:
        self.values["seen"] = self.values.get("seen", 0) + 1
        self.model(next(self.batches).to(DEVICE)).sum().backward()

    def step(self) -> None:
        self.forward()
        self.optimizer.step()
        self.scheduler.step()
        self.boundary.note()

    def facts(self) -> list[Any]:
        state = self.model.state_dict()
        return [{k: v.tolist() for k, v in state.items()}, self.loader.batches, dict(self.values)]


def test_a_forward_pass_is_undone() -> None:
    """Buffers, the position of the loader and plain values are those of the last step again."""
    loop = Loop()
    loop.step()
    loop.step()
    before = loop.facts()
    loop.forward()
    assert loop.facts() != before
    loop.boundary.return_to()
    assert loop.facts() == before


def test_a_state_that_the_optimizer_has_begun_to_change_is_refused() -> None:
    """Once the optimizer has begun a step, the state of the last step is lost."""
    loop = Loop()
    loop.step()
    loop.forward()
    loop.optimizer.step()
    with pytest.raises(RuntimeError, match="optimizer had begun the next step"):
        loop.boundary.return_to()


def test_an_object_that_steps_before_the_optimizer_is_refused() -> None:
    """A scheduler that has stepped since is named."""
    loop = Loop()
    loop.step()
    loop.scheduler.step()
    with pytest.raises(RuntimeError, match="changed scheduler"):
        loop.boundary.return_to()


class Opaque:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Around(Opaque, torch.optim.Optimizer):
    """An optimizer around another one, without the hooks that ``Optimizer.__init__`` creates."""

    def __init__(self) -> None: ...


@pytest.mark.parametrize("other", [Opaque(), Around()], ids=["no counter", "no hooks"])
def test_an_object_whose_changes_cannot_be_seen_is_refused(other: Any) -> None:
    """Nothing is assumed of an object without counters, and of an optimizer whose steps are not seen."""
    loop = Loop(other=other)
    loop.step()
    with pytest.raises(RuntimeError, match="changed other"):
        loop.boundary.return_to()


def test_before_the_first_step_nothing_is_saved() -> None:
    """A start that has completed no step is refused."""
    with pytest.raises(RuntimeError, match="no step is complete"):
        Loop().boundary.return_to()
