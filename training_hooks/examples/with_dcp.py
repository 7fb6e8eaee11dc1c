# SPDX-License-Identifier: Apache-2.0
"""A loop that saves with ``torch.distributed.checkpoint`` and survives the loss of its VM.

    python with_dcp.py
    torchrun --standalone --nproc-per-node=2 with_dcp.py

The same command line starts and resumes the run.  Under torchrun the model is sharded with FSDP2.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import swansong  # Swansong
import torch
import torch.distributed as dist
from swansong.dcp import DcpState  # Swansong
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch_ddp import CONTEXT, Transformer, loss_of, read_text


class App:
    """The state that DCP saves; the script had this class before Swansong."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        self.model, self.optimizer, self.rank = model, optimizer, rank

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        # DCP stores one value per name, so the state of each rank needs its own name.
        return {"model": model, "optimizer": optimizer, f"rng-{self.rank}": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        torch.set_rng_state(state[f"rng-{self.rank}"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the sonnets with DCP.")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()

    is_distributed = "WORLD_SIZE" in os.environ
    if is_distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if is_distributed else 0
    codes, vocabulary = read_text()
    torch.manual_seed(1609)
    model = Transformer(vocabulary)
    if is_distributed:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1609 + rank)

    guard = swansong.attach(DcpState({"app": App(model, optimizer, rank)}))  # Swansong
    for step in range(guard.restore() + 1, options.steps + 1):  # Swansong
        places = torch.randint(len(codes) - CONTEXT, (16,))
        windows = torch.stack([codes[place : place + CONTEXT + 1] for place in places])
        loss = loss_of(model, windows[:, :-1], windows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
        guard.step(step, loss=loss)  # Swansong
    guard.finish()  # Swansong
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
