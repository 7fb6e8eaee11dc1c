# SPDX-License-Identifier: Apache-2.0
"""LBFGS, whose state is a history of lists; its closure runs several times in each step."""

import json

import swansong
import torch
from swansong.torch import TrainingState, seed_all
from torch import nn

torch.set_num_threads(1)
seed_all(15)
x = torch.randn(16, 4)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4)
guard = swansong.attach(TrainingState(model, optimizer))
for step in range(guard.restore() + 1, 11):
    target = x.sum(1, keepdim=True) + 0.1 * torch.randn(16, 1)

    def closure(target=target):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
    guard.step(step, loss=loss.item())
guard.close()
