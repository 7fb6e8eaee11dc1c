# SPDX-License-Identifier: Apache-2.0
"""The first module with a NaN is named, if the environment asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from swansong._ranks.agreement import Ranks
from swansong.torch import TrainingState
from torch import nn


class Block(nn.Module):
    """A layer, an operation, a layer, and a factor."""

    def __init__(
        self,
        operation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.operation, self.factor = operation, factor

    def forward(self, values: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        return {"hidden": [self.second(self.operation(self.first(values))) * self.factor]}


class Model(nn.Module):
    def __init__(self, middle: Block | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), middle or Block(), Block()])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)["hidden"][0]
        return values


def a_bad_weight() -> Model:
    model = Model()
    with torch.no_grad():
        model.blocks[1].second.weight[0, 0] = float("nan")
    return model


def infinite_gradient(values: torch.Tensor) -> torch.Tensor:
    """Zero, whose square root has an infinite derivative."""
    return (values - values).sqrt()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            a_bad_weight,
            "parameters of model.blocks.1.second (Linear) are not finite in this step: weight",
        ),
        (
            lambda: Model(Block(lambda values: values / 0.0)),
            "the input of model.blocks.1.second (Linear) is not finite in this step, after another operation",
        ),
        (
            lambda: Model(Block(factor=math.inf)),
            "the output of model.blocks.1 (Block) is not finite in this step, and its input is finite",
        ),
        (
            lambda: Model(Block(infinite_gradient)),
            "the gradient of the output of model.blocks.1.first (Linear) is not finite in this step",
        ),
    ],
    ids=["weight", "operation", "module", "gradient"],
)
def test_the_first_module_and_its_rank_are_named(
    make: Callable[[], Model],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once; the modules after it, and those around it, are not."""
    monkeypatch.setenv("SWANSONG_FIND_NAN", "1")
    model = make()
    state = TrainingState(model)
    state.ranks = Ranks(3, 4)
    state.rehearse()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert caplog.messages == [f"rank 3: {named}"]


def test_infinite_gradients_of_a_scaler_are_normal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SWANSONG_FIND_NAN", "1")
    model = Model(Block(infinite_gradient))
    TrainingState(model, scaler=torch.amp.GradScaler("cpu")).rehearse()
    model(torch.ones(1, 2)).sum().backward()
    assert not caplog.messages


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_checked_without_a_request(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check waits for the device."""
    if value is not None:
        monkeypatch.setenv("SWANSONG_FIND_NAN", value)
    model = Model()
    TrainingState(model).rehearse()
    assert not any(module._forward_hooks for module in model.modules())


def test_a_second_guard_does_not_check_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANSONG_FIND_NAN", "1")
    model = Model()
    state = TrainingState(model)
    state.rehearse()
    state.rehearse()
    assert {len(module._forward_hooks) for module in model.modules()} == {1}
