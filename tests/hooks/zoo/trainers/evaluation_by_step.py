# SPDX-License-Identifier: Apache-2.0
"""Evaluation every four steps, in the middle of epochs; before the next batch is taken."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
seed_all(6)
data = TensorDataset(torch.arange(20), torch.randn(20, 4), torch.randint(3, (20,)))
loader = ResumableLoader(DataLoader(data, batch_size=4, shuffle=True))
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
optimizer = torch.optim.NAdam(model.parameters(), lr=0.02)
state = TrainingState(model, optimizer, loader=loader)
guard = swansong.attach(state)
step = guard.restore()


@torch.no_grad()
def evaluate():
    model.eval()
    right = 0
    for place in range(0, 20, 10):
        guard.poll()
        _, x, y = data[place : place + 10]
        right += (model(x).argmax(1) == y).sum().item()
    model.train()
    print(json.dumps({"at": step, "accuracy": right / 20}), flush=True)


batches = iter(loader)
while step < 9:
    if step and step % 4 == 0:
        evaluate()
    batch = next(batches, None)
    if batch is None:
        batches = iter(loader)
        continue
    ids, x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    step += 1
    print(json.dumps({"step": step, "loss": loss.item(), "batch": ids.tolist()}), flush=True)
    guard.step(step, loss=loss.item())
guard.close()
