# SPDX-License-Identifier: Apache-2.0
"""How long a checkpoint holds up the training loop, and how long until it is in staging.

    python bench/torch_snapshot.py --gb 1 --directory /dev/shm

Against torch.save and torch.distributed.checkpoint.async_save for the same state: blocking seconds, seconds
until all files are there.  With --ranks 2, only ours, with the state spread over the ranks by FSDP2.  One
JSON line for each; medians of --repeats after two saves that are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from swansong.torch import TrainingState
from torch import nn
from torch.distributed.fsdp import fully_shard

Save = Callable[[Path], Callable[[], object]]
"""Begins a save into a directory; what it returns waits until it is written."""


def trained(size_bytes: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose weights and Adam moments together have this size."""
    layers, width = 16, 1
    while layers * (width + 64) ** 2 * 4 * 3 < size_bytes:
        width += 64
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    if dist.is_initialized():
        fully_shard(model)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, width, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def measured(name: str, save: Save, root: Path, repeats: int, device: str) -> None:
    blocked, total, size_bytes = [], [], 0
    for number in range(repeats + 2):
        directory = root / f"{name}-{number}"
        directory.mkdir(exist_ok=True)
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        wait = save(directory)
        blocked.append(time.perf_counter() - begun)
        wait()
        total.append(time.perf_counter() - begun)
        if dist.is_initialized():
            dist.barrier()
        size_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        if dist.is_initialized():
            dist.barrier()
        shutil.rmtree(directory, ignore_errors=True)
    result = {
        "what": name,
        "rank": os.environ.get("RANK", "0"),
        "device": device,
        "size_mb": round(size_bytes / 1e6),
        "blocked_s": round(statistics.median(blocked[2:]), 4),
        "written_s": round(statistics.median(total[2:]), 4),
        "first_blocked_s": round(blocked[0], 4),
    }
    print(json.dumps(result), flush=True)


def swansong_save(state: TrainingState) -> Save:
    def save(directory: Path) -> Callable[[], object]:
        write = state.snapshot()
        own = directory / f"rank-{int(os.environ.get('RANK', '0')):05d}"
        own.mkdir(exist_ok=True)
        return lambda: write(own)

    return save


def run(options: argparse.Namespace, root: Path) -> None:
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    model, optimizer = trained(int(options.gb * 1e9), device)
    state = TrainingState(model, optimizer)
    measured("swansong", swansong_save(state), root, options.repeats, device)
    if dist.is_initialized():
        return

    def whole() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def torch_save(directory: Path) -> Callable[[], object]:
        torch.save(whole(), directory / "state.pt")
        return lambda: None

    measured("torch.save", torch_save, root, options.repeats, device)
    # async_save wants a process group even for one process.
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)

    def async_save(directory: Path) -> Callable[[], object]:
        future = dcp.async_save(whole(), checkpoint_id=str(directory), no_dist=True)
        return future.result

    measured("dcp.async_save", async_save, root, options.repeats, device)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Blocking time of a snapshot.")
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where to write; else the usual one")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--store", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.store:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo", init_method=f"file://{options.store}/store", rank=rank, world_size=ranks
        )
        run(options, Path(options.store))
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        if options.ranks == 1:
            run(options, Path(directory))
            return
        size = str(options.ranks)
        command = [sys.executable, __file__, *sys.argv[1:], "--store", directory, "--cpu"]
        children = [
            subprocess.Popen(
                command,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
            )
            for rank in range(options.ranks)
        ]
        for child in children:
            child.wait()


if __name__ == "__main__":
    main()
