# SPDX-License-Identifier: Apache-2.0
"""Accelerate: the model of ``torch_ddp.py``, in a loop that survives the loss of its VM.

    python with_accelerate.py
    accelerate launch --cpu --num-processes 2 with_accelerate.py

The same command line starts and resumes the run.
"""

from __future__ import annotations

import argparse
import json

import swansong.accelerate  # Swansong
import torch
from accelerate import Accelerator
from swansong.torch import ResumableLoader, seed_all, shield_worker  # Swansong
from torch.utils.data import DataLoader
from torch_ddp import Transformer, Windows, loss_of, read_text


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the sonnets with Accelerate.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--windows", type=int, default=1024, help="per epoch")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()

    is_cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=is_cpu, gradient_accumulation_steps=2)
    codes, vocabulary = read_text()
    seed_all(1609)
    model = Transformer(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    data = DataLoader(
        Windows(codes, options.windows),
        16,
        shuffle=True,
        num_workers=options.workers,
        worker_init_fn=shield_worker,
    )
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    seed_all(1609 + accelerator.process_index)  # each rank has its own dropout

    loader = ResumableLoader(data)  # Swansong
    guard = swansong.accelerate.attach(accelerator, loader=loader)  # Swansong
    step = guard.restore()  # Swansong
    while loader.epoch < options.epochs:
        for text, target in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, text, target)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                if accelerator.is_main_process:
                    print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
                guard.step(step, loss=loss)  # Swansong
    guard.finish()  # Swansong
    accelerator.end_training()


if __name__ == "__main__":
    main()
