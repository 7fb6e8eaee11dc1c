# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: a gradient overflows, and the scaler skips that optimizer step and halves the scale.

The batches come from a weighted sampler with a separate generator.
"""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.set_num_threads(1)
seed_all(12)
data = TensorDataset(torch.arange(20), torch.randn(20, 4), torch.randn(20, 1))
order = torch.Generator().manual_seed(12)
sampler = WeightedRandomSampler(torch.rand(20), 20, generator=order)
loader = ResumableLoader(DataLoader(data, batch_size=4, sampler=sampler))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
state = TrainingState(
    model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader, order=order
)
guard = swansong.attach(state)
step = guard.restore()
for _ in range(loader.epoch, 2):
    for ids, x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        if step in (4, 7):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            scheduler.step()
        step += 1
        rate = optimizer.param_groups[0]["lr"]
        value = loss.item() if step not in (5, 8) else None
        facts = {"step": step, "loss": value, "scale": scale, "lr": rate, "batch": ids.tolist()}
        print(json.dumps(facts), flush=True)
        guard.step(step)
guard.close()
