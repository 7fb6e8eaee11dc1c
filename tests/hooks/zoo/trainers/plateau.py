# SPDX-License-Identifier: Apache-2.0
"""Evaluation by epoch: the rate falls on a plateau, and two epochs without a better metric end the run."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
seed_all(9)
data = TensorDataset(torch.arange(12), torch.randn(12, 4), torch.randn(12, 1))
loader = ResumableLoader(DataLoader(data, batch_size=4, shuffle=True))
held_out = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=4)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
state = TrainingState(model, optimizer, scheduler=scheduler, loader=loader)
state.values.update(best=float("inf"), worse=0)
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


while state.values["worse"] < 2:
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
    is_better = metric < state.values["best"]
    state.values["worse"] = 0 if is_better else state.values["worse"] + 1
    state.values["best"] = min(metric, state.values["best"])
    print(json.dumps({"validation": metric, **state.values}), flush=True)
guard.close()
