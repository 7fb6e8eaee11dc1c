# SPDX-License-Identifier: Apache-2.0
"""A compiled model in a wrapper of the script; the state has the wrapper, the optimizer the inner model."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class WithLoss(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, y):
        return nn.functional.mse_loss(self.module(x), y)


torch.set_num_threads(1)
seed_all(8)
data = TensorDataset(torch.arange(12), torch.randn(12, 4), torch.randn(12, 1))
loader = ResumableLoader(DataLoader(data, batch_size=3, shuffle=True))
inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
inner[2] = nn.utils.parametrizations.weight_norm(inner[2])
model = WithLoss(torch.compile(inner, backend="eager"))
optimizer = torch.optim.Adagrad(inner.parameters(), lr=0.05)
guard = swansong.attach(TrainingState(model, optimizer, loader=loader))
step = guard.restore()
for _ in range(loader.epoch, 2):
    for ids, x, y in loader:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        step += 1
        print(json.dumps({"step": step, "loss": loss.item(), "batch": ids.tolist()}), flush=True)
        guard.step(step, loss=loss.item())
guard.close()
