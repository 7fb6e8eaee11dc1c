# SPDX-License-Identifier: Apache-2.0
"""A loop over steps that takes batches with ``next()``, and begins the loader again when it is exhausted."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
seed_all(16)
data = TensorDataset(torch.arange(14), torch.randn(14, 4), torch.randn(14, 1))
loader = ResumableLoader(DataLoader(data, batch_size=4, shuffle=True))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adamax(model.parameters(), lr=0.02)
guard = swansong.attach(TrainingState(model, optimizer, loader=loader))
batches = None
for step in range(guard.restore() + 1, 13):
    batches = batches or iter(loader)
    try:
        ids, x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        ids, x, y = next(batches)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    print(json.dumps({"step": step, "loss": loss.item(), "batch": ids.tolist()}), flush=True)
    guard.step(step, loss=loss.item())
guard.close()
