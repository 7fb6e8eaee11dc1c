# SPDX-License-Identifier: Apache-2.0
"""The lines of the README, as they stand there, resume to the bit."""

from __future__ import annotations

import re

import pytest
from swansong.testing import check_resume

from testkit import REPOSITORY
from testkit.python_process import ENVIRONMENT

PLAIN = """
import random

class Item:
    value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]

model, optimizer, loader = Item(), Item(), {"seen": [0, [1, 2]]}
total_steps = 6
random.seed(1)

def train_one_step():
    model.value += random.random()
    loader["seen"][0] += 1
    return model.value * loader["seen"][0]
"""
TORCH = """
import torch
from torch.utils.data import DataLoader
from swansong.torch import ResumableLoader

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = ResumableLoader(DataLoader(torch.randn(32, 3), batch_size=4, shuffle=True))
total_steps = 6
batches = None

def train_one_step():
    global batches
    batches = batches or iter(loader)
    optimizer.zero_grad()
    loss = model(next(batches)).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""


@pytest.mark.parametrize(("objects", "ranks"), [(PLAIN, 1), (TORCH, 2)], ids=["plain", "torch"])
def test_the_lines_of_the_readme_resume(objects: str, ranks: int, warm_python: str) -> None:
    """One process with plain objects, and two with objects of PyTorch, reach the end of the run."""
    readme = (REPOSITORY / "README.md").read_text()
    (lines,) = re.findall(r"```python\n(import swansong\n.*?)```", readme, re.DOTALL)
    report = check_resume(
        [warm_python, "-c", objects + lines],
        kill_at=[3],
        ranks=ranks,
        environment=ENVIRONMENT,
    )
    assert (report.saved_steps, report.last_step) == ([3], 6)
