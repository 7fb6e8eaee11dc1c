# SPDX-License-Identifier: Apache-2.0
"""One rank of a job with ``fully_shard``; prints the digest of the whole state as JSON lines.

It restores, trains up to the step of its argument, saves each step, and waits to be killed.  The last layer
has fewer rows than the job has ranks, so some ranks hold no part of it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterable

import swansong
import torch
import torch.distributed as dist
from swansong.torch import TrainingState, seed_all
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of the whole tensors, which all ranks gather."""
    found = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    seed_all(9)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = swansong.attach(TrainingState(model, optimizer), every_steps=1)
    first = guard.restore()
    for step in range(first + 1, int(sys.argv[1]) + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        guard.step(step)
        assert guard.wait_saved(60)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    found = digest([*model.state_dict().values(), *moments])
    print(json.dumps({"event": "state", "from_step": first, "digest": found}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
