# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its containers of optimizers and schedulers, in a loop that survives the loss of its VM.

    python with_torchtitan.py

The same command line starts and resumes the run.  The loop is short; its objects are those of torchtitan.
"""

from __future__ import annotations

import argparse
import json

import swansong  # Swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all  # Swansong
from torch.utils.data import DataLoader
from torch_ddp import Transformer, Windows, loss_of, read_text
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the sonnets with torchtitan's containers.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--windows", type=int, default=128, help="per epoch")
    options = parser.parse_args()

    seed_all(1609)
    codes, vocabulary = read_text()
    model_parts = [Transformer(vocabulary)]
    optimizers = OptimizersContainer(model_parts, torch.optim.AdamW, {"lr": 3e-3})
    lr_schedulers = LRSchedulersContainer(optimizers, lambda step: min(1.0, (step + 1) / 20))
    loader = ResumableLoader(  # Swansong
        DataLoader(Windows(codes, options.windows), 16, shuffle=True)
    )

    # The containers merge the states of their parts, so pass the parts.
    parts = {f"model_{number}": part for number, part in enumerate(model_parts[1:], 1)}
    parts |= {f"optimizer_{number}": each for number, each in enumerate(list(optimizers)[1:], 1)}
    state = TrainingState(  # Swansong
        model_parts[0],
        optimizers.optimizers[0],
        scheduler=lr_schedulers,
        loader=loader,
        **parts,
    )
    guard = swansong.attach(state)  # Swansong
    step = guard.restore()  # Swansong
    while loader.epoch < options.epochs:
        for text, target in loader:
            optimizers.zero_grad()
            loss = loss_of(model_parts[0], text, target)
            loss.backward()
            optimizers.step()
            lr_schedulers.step()
            step += 1
            print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
            guard.step(step, loss=loss)  # Swansong
    guard.finish()  # Swansong


if __name__ == "__main__":
    main()
