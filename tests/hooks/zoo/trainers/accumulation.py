# SPDX-License-Identifier: Apache-2.0
"""Gradients of two batches for each optimizer step, a warm-up, and a last step of one batch in each epoch."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2

torch.set_num_threads(1)
seed_all(2)
data = TensorDataset(torch.arange(20), torch.randn(20, 4), torch.randn(20, 1))
loader = ResumableLoader(DataLoader(data, batch_size=4, shuffle=True))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ],
    milestones=[4],
)
state = TrainingState(model, optimizer, scheduler=scheduler, loader=loader)
guard = swansong.attach(state)
step = guard.restore()
for _ in range(loader.epoch, 3):
    total, seen = 0.0, []
    for number, (ids, x, y) in enumerate(loader, loader.batches + 1):
        loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
        loss.backward()
        total += loss.item()
        seen += ids.tolist()
        if number % ACCUMULATE and number < len(loader):
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        step += 1
        print(json.dumps({"step": step, "loss": total, "lr": rate, "batch": seen}), flush=True)
        guard.step(step, loss=total)
        total, seen = 0.0, []
guard.close()
