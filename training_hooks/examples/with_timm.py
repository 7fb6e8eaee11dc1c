# SPDX-License-Identifier: Apache-2.0
"""timm: its loader, scheduler and averaged model, in a loop that survives the loss of its VM.

    python with_timm.py

The same command line starts and resumes the run.  The images are random, so the example needs no data.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import swansong  # Swansong
import timm
import torch
from PIL import Image
from swansong.torch import ResumableLoader, TrainingState, seed_all  # Swansong
from timm.data import create_loader
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, NativeScaler

CLASSES = 4


class Images(torch.utils.data.Dataset[tuple[Image.Image, int]]):
    """Random images; ``create_loader`` sets ``transform``."""

    transform = None

    def __len__(self) -> int:
        return 96

    def __getitem__(self, place: int) -> tuple[Image.Image, int]:
        pixels = np.random.default_rng(place).integers(0, 255, (40, 40, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        return image if self.transform is None else self.transform(image), place % CLASSES


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network of timm.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--reprob", type=float, default=0.25)
    options = parser.parse_args()

    seed_all(1609)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = timm.create_model("test_convnext", num_classes=CLASSES, drop_path_rate=0.1).to(device)
    average = ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    scaler = NativeScaler(device=device.type)
    mixup = Mixup(mixup_alpha=0.2, num_classes=CLASSES)
    batches = create_loader(
        Images(),
        (3, 32, 32),
        16,
        is_training=True,
        num_workers=options.workers,
        re_prob=options.reprob,
        color_jitter=0.4,
        device=device,
        persistent_workers=options.workers > 0,
    )
    loader = ResumableLoader(batches)  # Swansong
    scheduler, _ = create_scheduler_v2(
        optimizer,
        num_epochs=options.epochs,
        warmup_epochs=1,
        step_on_epochs=False,
        updates_per_epoch=len(loader),
    )
    loss_of = SoftTargetCrossEntropy()

    state = TrainingState(  # Swansong
        model,
        optimizer,
        scheduler=scheduler,
        loader=loader,
        ema=average,
        scaler=scaler._scaler,  # noqa: SLF001
    )
    guard = swansong.attach(state)  # Swansong
    step = guard.restore()  # Swansong
    while loader.epoch < options.epochs:
        for inputs, targets in loader:
            mixed, soft = mixup(inputs, targets)
            loss = loss_of(model(mixed), soft)
            optimizer.zero_grad()
            scaler(loss, optimizer, parameters=model.parameters())
            step += 1
            average.update(model, step=step)
            scheduler.step_update(step)
            print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
            guard.step(step, loss=loss)  # Swansong
    guard.finish()  # Swansong


if __name__ == "__main__":
    main()
