# SPDX-License-Identifier: Apache-2.0
"""Early stopping: training ends when the validation has not improved for two epochs."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
seed_all(11)
data = TensorDataset(torch.arange(9), torch.randn(9, 4), torch.randn(9, 1))
x_held, y_held = torch.randn(6, 4), torch.randn(6, 1)
loader = ResumableLoader(DataLoader(data, batch_size=3, shuffle=True))
model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.2)
state = TrainingState(model, optimizer, loader=loader)
state.values.update(best=float("inf"), worse=0)
guard = swansong.attach(state)
step = guard.restore()
while state.values["worse"] < 2:
    for ids, x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        print(json.dumps({"step": step, "loss": loss.item(), "batch": ids.tolist()}), flush=True)
        guard.step(step, loss=loss.item())
    model.eval()
    with torch.no_grad():
        guard.poll()
        metric = nn.functional.mse_loss(model(x_held), y_held).item()
    model.train()
    is_better = metric < state.values["best"]
    state.values["worse"] = 0 if is_better else state.values["worse"] + 1
    state.values["best"] = min(metric, state.values["best"])
    print(json.dumps({"validation": metric, **state.values}), flush=True)
guard.close()
