# SPDX-License-Identifier: Apache-2.0
"""LBFGS, whose state is a history of lists; its closure runs several times in each step.

The targets come from a generator of numpy, and a running mean of the losses is a value of the state.
"""

import json

import numpy as np
import swansong
import torch
from swansong.torch import TrainingState, seed_all
from torch import nn

torch.set_num_threads(1)
seed_all(15)
x = torch.randn(16, 4)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4)
noise = np.random.default_rng(15)
state = TrainingState(model, optimizer, noise=noise)
state.values["running"] = 0.0
guard = swansong.attach(state)
for step in range(guard.restore() + 1, 11):
    target = x.sum(1, keepdim=True) + 0.1 * torch.tensor(noise.standard_normal((16, 1))).float()

    def closure(target=target):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    state.values["running"] = 0.9 * state.values["running"] + 0.1 * loss.item()
    print(json.dumps({"step": step, "loss": loss.item(), **state.values}), flush=True)
    guard.step(step, loss=loss.item())
guard.close()
