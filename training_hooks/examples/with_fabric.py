# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric: the model of ``torch_ddp.py``, in a loop that survives the loss of its VM.

    python with_fabric.py
    python with_fabric.py --devices 2 --compile

The same command line starts and resumes the run.
"""

from __future__ import annotations

import argparse
import json

import swansong.fabric  # Swansong
import torch
from lightning.fabric import Fabric
from swansong.torch import ResumableLoader, seed_all, shield_worker  # Swansong
from torch.utils.data import DataLoader
from torch_ddp import Transformer, Windows, loss_of, read_text

ACCUMULATE = 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the sonnets with Fabric.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--windows", type=int, default=1024, help="per epoch")
    parser.add_argument("--devices", type=int, default=1, help="ranks on this VM")
    parser.add_argument("--compile", metavar="BACKEND", help="of torch.compile, such as inductor")
    options = parser.parse_args()

    fabric = Fabric(devices=options.devices, strategy="ddp" if options.devices > 1 else "auto")
    fabric.launch()
    codes, vocabulary = read_text()
    seed_all(1609)
    model = Transformer(vocabulary)
    if options.compile:
        model = torch.compile(model, backend=options.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    model, optimizer = fabric.setup(model, optimizer)
    data = DataLoader(
        Windows(codes, options.windows), 16, shuffle=True, worker_init_fn=shield_worker
    )
    loader = ResumableLoader(fabric.setup_dataloaders(data))  # Swansong
    seed_all(1609 + fabric.global_rank)  # each rank has its own dropout

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"loader": loader, "step": 0}
    guard = swansong.fabric.attach(fabric, state)  # Swansong
    guard.restore()  # Swansong
    while loader.epoch < options.epochs and not guard.finished:
        for number, (text, target) in loader.enumerate():
            is_last = (number + 1) % ACCUMULATE == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = loss_of(model, text, target)
                fabric.backward(loss)
            if is_last:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                state["step"] += 1
                if fabric.is_global_zero:
                    print(json.dumps({"step": state["step"], "loss": loss.item()}), flush=True)
                guard.step(state["step"], loss=loss)  # Swansong
    guard.finish()  # Swansong


if __name__ == "__main__":
    main()
