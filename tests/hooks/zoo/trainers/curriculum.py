# SPDX-License-Identifier: Apache-2.0
"""A curriculum: short samples in small batches first, and then long samples in large batches."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
seed_all(14)
data = TensorDataset(torch.arange(24), torch.randn(24, 6))
short = ResumableLoader(DataLoader(data, batch_size=4, shuffle=True))
long = ResumableLoader(DataLoader(data, batch_size=8, shuffle=True))
model = nn.GRU(1, 4, batch_first=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=13)
state = TrainingState(model, optimizer, scheduler=scheduler, short=short, long=long)
guard = swansong.attach(state)
step = guard.restore()
for loader, length, epochs in ((short, 3, 1), (long, 6, 2)):
    while loader.epoch < epochs:
        for ids, x in loader:
            optimizer.zero_grad()
            outputs, _ = model(x[:, : length - 1, None])
            loss = (outputs.mean(2) - x[:, 1:length]).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            facts = {
                "step": step,
                "loss": loss.item(),
                "lr": scheduler.get_last_lr(),
                "batch": ids.tolist(),
            }
            print(json.dumps(facts), flush=True)
            guard.step(step, loss=loss.item())
guard.close()
