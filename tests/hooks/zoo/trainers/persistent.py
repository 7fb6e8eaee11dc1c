# SPDX-License-Identifier: Apache-2.0
"""A loader with persistent workers that change the samples at random."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all, shield_worker
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, place):
        return place, torch.full((4,), place / 16) + 0.1 * torch.randn(4)


torch.set_num_threads(1)
seed_all(4)
loader = ResumableLoader(
    DataLoader(
        Noisy(),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=shield_worker,
    )
)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
guard = swansong.attach(TrainingState(model, optimizer, loader=loader))
step = guard.restore()
for _ in range(loader.epoch, 2):
    for ids, x in loader:
        optimizer.zero_grad()
        loss = (model(x) - ids[:, None] / 16).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        print(json.dumps({"step": step, "loss": loss.item(), "batch": ids.tolist()}), flush=True)
        guard.step(step, loss=loss.item())
guard.close()
