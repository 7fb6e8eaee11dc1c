# SPDX-License-Identifier: Apache-2.0
"""Digests of what a step has used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from swansong._torch.digests import of_step
from swansong.torch import ResumableLoader
from torch.utils.data import DataLoader, TensorDataset


def as_mapping(samples: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"inputs": torch.stack([sample for (sample,) in samples])}


def digests(
    rate: float | torch.Tensor = 0.1, momentum: float = 0.9, first: float = 1.0, collate: Any = None
) -> dict[str, Any]:
    """Those of a script with two optimizers after its first batch."""
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    data = TensorDataset(torch.tensor([[first], [2.0]]))
    loader = ResumableLoader(DataLoader(data, 2, collate_fn=collate))
    next(iter(loader))
    parts = of_step(
        {
            "loader": loader,
            "sgd": torch.optim.SGD(models[0].parameters(), lr=rate, momentum=momentum),
            "adam": torch.optim.Adam(models[1].parameters()),
        }
    )
    return {name: part() if callable(part) else part for name, part in parts.items()}


@pytest.mark.parametrize("collate", [None, as_mapping])
@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, set()),
        ({"rate": 0.2}, {"rates.sgd"}),
        ({"momentum": 0.8}, {"rates.sgd"}),
        ({"first": 1.5}, {"batch.loader"}),
    ],
)
def test_a_step_with_another_batch_or_option_has_another_digest(
    change: dict[str, float], names: set[str], collate: Any
) -> None:
    """And no other digest of the step changes."""
    wanted, got = digests(collate=collate), digests(**change, collate=collate)
    assert wanted.keys() == {"batch.loader", "rates.sgd", "rates.adam"}
    assert {name for name in wanted if got[name] != wanted[name]} == names


def test_a_rate_on_a_device_counts() -> None:
    """A tensor as the learning rate, as compiled optimizers have it."""
    one, other = (digests(rate=torch.tensor(rate))["rates.sgd"] for rate in (0.1, 0.2))
    assert one != other
