# SPDX-License-Identifier: Apache-2.0
"""A trainer whose resume is not exact; prints JSON lines.

The resumed run forgets the position of its loader.
"""

from __future__ import annotations

import json
import threading

import swansong
import torch
from swansong._checkpoint import redone
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch.utils.data import DataLoader, TensorDataset


def emit(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    redone.BUDGET = 1e9  # a loaded machine must not leave out the weights of the second step
    seed_all(7)
    noise = torch.Generator().manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.arange(8 * 512, dtype=torch.float32).reshape(512, 8).sin()
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = ResumableLoader(DataLoader(data, batch_size=8, shuffle=True))
    state = TrainingState(model, optimizer, loader=loader, noise=noise)
    guard = swansong.attach(state)
    first = guard.restore()
    if first > 0:
        loader.end_epoch()
    emit(event="resumed", from_step=first)
    pause, step = threading.Event(), first
    while True:
        for batch, target in loader:
            pause.wait(0.05)
            moved = batch + 0.01 * torch.randn(batch.shape, generator=noise)
            loss = (model(moved) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            guard.step(step, loss=loss)
            emit(step=step)


if __name__ == "__main__":
    main()
