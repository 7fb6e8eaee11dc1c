# SPDX-License-Identifier: Apache-2.0
"""An average of the weights that is swapped in for the evaluation at the end of each epoch."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
seed_all(3)
data = TensorDataset(torch.arange(16), torch.randn(16, 4), torch.randn(16, 1))
loader = ResumableLoader(DataLoader(data, batch_size=4, shuffle=True))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
state = TrainingState(model, optimizer, loader=loader, average=average)
state.values["best"] = float("inf")
guard = swansong.attach(state)
step = guard.restore()


def swap():
    for one, other in zip(model.parameters(), average.module.parameters(), strict=True):
        one.data, other.data = other.data, one.data


def evaluate():
    with guard.critical(), torch.no_grad():  # a checkpoint that is due waits for the second swap
        swap()
        total = 0.0
        for place in range(0, 16, 8):
            guard.poll()
            _, x, y = data[place : place + 8]
            total += nn.functional.mse_loss(model(x), y).item()
        swap()
    state.values["best"] = min(total, state.values["best"])
    return total


for epoch in range(loader.epoch, 3):
    for ids, x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        step += 1
        print(json.dumps({"step": step, "loss": loss.item(), "batch": ids.tolist()}), flush=True)
        guard.step(step, loss=loss.item())
    facts = {"epoch": epoch, "validation": evaluate(), "best": state.values["best"]}
    print(json.dumps(facts), flush=True)
guard.close()
