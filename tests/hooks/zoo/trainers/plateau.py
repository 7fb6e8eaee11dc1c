# SPDX-License-Identifier: Apache-2.0
"""Evaluation by epoch: the best metric is kept, and the rate falls on a plateau."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
seed_all(9)
data = TensorDataset(torch.arange(16), torch.randn(16, 4), torch.randn(16, 1))
loader = ResumableLoader(DataLoader(data, batch_size=4, shuffle=True))
held_out = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 1)), batch_size=4)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
state = TrainingState(model, optimizer, scheduler=scheduler, loader=loader)
state.values["best"] = float("inf")
guard = swansong.attach(state)
step = guard.restore()


@torch.no_grad()
def evaluate():
    model.eval()
    total = 0.0
    for x, y in held_out:
        guard.poll()
        total += nn.functional.mse_loss(model(x), y).item()
    model.train()
    return total / len(held_out)


for epoch in range(loader.epoch, 3):
    for ids, x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        rate = optimizer.param_groups[0]["lr"]
        facts = {"step": step, "loss": loss.item(), "lr": rate, "batch": ids.tolist()}
        print(json.dumps(facts), flush=True)
        guard.step(step, loss=loss.item())
    metric = evaluate()
    scheduler.step(metric)
    state.values["best"] = min(metric, state.values["best"])
    facts = {"epoch": epoch, "validation": metric, "best": state.values["best"]}
    print(json.dumps(facts), flush=True)
guard.close()
