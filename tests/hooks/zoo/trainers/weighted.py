# SPDX-License-Identifier: Apache-2.0
"""A weighted sampler with a generator of its own, which the loader draws from."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.set_num_threads(1)
seed_all(10)
data = TensorDataset(torch.arange(16), torch.randn(16, 4), torch.randn(16, 1))
order = torch.Generator().manual_seed(10)
sampler = WeightedRandomSampler(torch.rand(16), 16, generator=order)
loader = ResumableLoader(DataLoader(data, batch_size=4, sampler=sampler))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
guard = swansong.attach(TrainingState(model, optimizer, loader=loader, order=order))
step = guard.restore()
for _ in range(loader.epoch, 3):
    for ids, x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        print(json.dumps({"step": step, "loss": loss.item(), "batch": ids.tolist()}), flush=True)
        guard.step(step, loss=loss.item())
guard.close()
