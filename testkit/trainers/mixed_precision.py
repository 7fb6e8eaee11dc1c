# SPDX-License-Identifier: Apache-2.0
"""Trains a small convolutional network on a GPU, if there is one, with all that is hard to resume there.

``mixed_precision.py STEPS``: automatic mixed precision with a gradient scaler, cuDNN, dropout, a fused
optimizer, weights in channels-last order, a generator on the GPU, and a worker that pins its batches.  Prints
a line for each step, and at the end the digest of the weights.
"""

from __future__ import annotations

import hashlib
import json
import sys

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all, shield_worker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    seed_all(7)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout2d(0.2),
        nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(64 * 6 * 6, 10),
    )  # fmt: skip
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
    scaler = torch.amp.GradScaler(
        device, growth_interval=5
    )  # its scale changes, and some steps are skipped
    noise = torch.Generator(device).manual_seed(8)
    data = TensorDataset(torch.randn(1024, 3, 16, 16), torch.randint(10, (1024,)))
    loader = ResumableLoader(
        DataLoader(
            data,
            16,
            shuffle=True,
            num_workers=1,
            worker_init_fn=shield_worker,
            pin_memory=device == "cuda",
        )
    )
    state = TrainingState(
        model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader, noise=noise
    )
    guard = swansong.attach(state)
    step, steps = guard.restore(), int(sys.argv[1])
    while step < steps:
        for batch, labels in loader:
            images = batch.to(device, non_blocking=True)
            images += 0.1 * torch.randn(images.shape, generator=noise, device=device)
            with torch.autocast(device, dtype):
                loss = nn.functional.cross_entropy(model(images).float(), labels.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
            guard.step(step, loss=loss)
            if step == steps:
                break
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    print(json.dumps({"weights_sha256": digest.hexdigest()}), flush=True)
    guard.finish()


if __name__ == "__main__":
    main()
