# SPDX-License-Identifier: Apache-2.0
"""Starts its own ranks, so that no environment variable describes them; prints a JSON line for each step.

With ``--end-early`` each rank destroys the process group before it closes the guard.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys

import swansong
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from swansong.torch import TrainingState, seed_all
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def train(rank: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    seed_all(5)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    if options.fsdp:
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seed_all(5 + rank)
    guard = swansong.attach(TrainingState(model, optimizer))
    step = guard.restore()
    while step < options.steps:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
        guard.step(step, loss=loss)
    if options.end_early:
        dist.destroy_process_group()
        guard.finish()
    guard.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10**9)
    for name in ("--fsdp", "--end-early"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(train, (port, options), nprocs=RANKS, start_method="fork")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
