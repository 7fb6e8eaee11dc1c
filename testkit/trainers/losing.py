# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that loses a rank, started by torchrun; prints JSON lines.

The model has ``BatchNorm``, whose buffers change in the forward pass.  With ``--die-at N --die-rank K`` that
rank is killed before the forward pass of the step after N, in a start that began at step 0.  With ``--block``
the other ranks wait there in Python code, and otherwise in the first collective of that step.  With
``--managed`` the guard is a context manager.  With ``--meet N`` a start of fewer ranks at step 0 trains
nothing: torchrun begins without a VM that is late, and starts all ranks again when it joins.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import threading
from datetime import timedelta
from typing import Any

import swansong
import torch
import torch.distributed as dist
from swansong._ranks import survivors
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SIZE = 64


def emit(**facts: object) -> None:
    print(json.dumps({"rank": dist.get_rank(), **facts}) + "\n", end="", flush=True)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of this rank's part of the weights, the buffers and the moments."""
    found = hashlib.sha256()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    for tensor in [*model.state_dict().values(), *moments]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def wrapped(how: str, model: nn.Module) -> nn.Module:
    """Wrap the model in DDP, in ``fully_shard``, or in ``fully_shard`` with two replicas."""
    if how == "ddp":
        return DistributedDataParallel(model)
    size = dist.get_world_size()
    shape, names = (
        ((2, size // 2), ("replicate", "shard")) if how == "hsdp" else ((size,), ("all",))
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=("ddp", "hsdp", "fsdp"), default="ddp")
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--die-rank", type=int, default=-1)
    parser.add_argument("--every-steps", type=int, default=1000)
    parser.add_argument("--resize", action="store_true")
    parser.add_argument("--meet", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--block", action="store_true")
    parser.add_argument("--managed", action="store_true")
    parser.add_argument("--quiet-s", type=float, default=survivors.QUIET_S)
    options = parser.parse_args()
    survivors.QUIET_S = options.quiet_s
    print(json.dumps({"event": "launched", "world": int(os.environ["WORLD_SIZE"])}), flush=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout_s))
    torch.set_num_threads(1)
    seed_all(7)
    norm: list[nn.Module] = [nn.BatchNorm1d(SIZE)] if options.how == "ddp" else []
    bare = nn.Sequential(nn.Linear(SIZE, SIZE), *norm, nn.Dropout(0.1), nn.Linear(SIZE, 1))
    model = wrapped(options.how, bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(4096).repeat_interleave(SIZE).reshape(-1, SIZE) / 4096.0)
    loader = ResumableLoader(DataLoader(data, 4, sampler=DistributedSampler(data)))

    def resize(_name: str, states: list[Any]) -> Any:
        return states[0]

    state = TrainingState(
        model, optimizer, loader=loader, resize=resize if options.resize else None
    )
    guard = swansong.attach(state, every_steps=options.every_steps)
    first = step = guard.restore()
    emit(
        event="resumed",
        from_step=first,
        digest=digest(model, optimizer),
        world=dist.get_world_size(),
        batches=loader.batches,
        restart=os.environ.get("TORCHELASTIC_RESTART_COUNT"),
    )
    if first == 0 and dist.get_world_size() < options.meet:
        threading.Event().wait()
    is_doomed = options.die_rank == dist.get_rank() and first == 0
    pause = threading.Event()
    with guard if options.managed else contextlib.nullcontext():
        while True:
            for (batch,) in loader:
                if is_doomed and step == options.die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                blocks = options.block and step == options.die_at and first == 0
                pause.wait(600.0 if blocks else 0.02)
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                step += 1
                guard.step(step)
                emit(step=step, world=dist.get_world_size(), digest=digest(model, optimizer))


if __name__ == "__main__":
    main()
