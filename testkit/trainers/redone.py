# SPDX-License-Identifier: Apache-2.0
"""A trainer whose resume may forget something; prints JSON lines.

``--forgets`` names what a resumed run does not continue: ``loader`` (its position), ``weights`` (a bit flips
in the second step, as in faulty memory), or ``nothing``.  Under torchrun it is a job with DDP, in which
only the last rank forgets.
"""

from __future__ import annotations

import argparse
import json
import os
import threading

import swansong
import torch
import torch.distributed as dist
from swansong._checkpoint import redone
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def emit(**facts: object) -> None:
    # In one write: ranks share a pipe.
    print(
        json.dumps({"rank": int(os.environ.get("RANK", "0")), **facts}) + "\n", end="", flush=True
    )


def flip_a_bit(weights: torch.Tensor) -> None:
    """Flip the lowest bit of the mantissa of one weight."""
    with torch.no_grad():
        weights.view(torch.int32).view(-1)[0] ^= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forgets", default="nothing")
    forgets = parser.parse_args().forgets
    redone.BUDGET = 1e9  # a loaded machine must not leave out the weights of the second step
    seed_all(7)
    noise = torch.Generator().manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.arange(8 * 512, dtype=torch.float32).reshape(512, 8).sin()
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = ResumableLoader(DataLoader(data, batch_size=8, shuffle=True))
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        if dist.get_rank() < dist.get_world_size() - 1:
            forgets = "nothing"
    state = TrainingState(model, optimizer, loader=loader, noise=noise)
    guard = swansong.attach(state)
    first = guard.restore()
    is_resumed = first > 0
    if is_resumed and forgets == "loader":
        loader.end_epoch()
    emit(event="resumed", from_step=first)
    pause, step = threading.Event(), first
    while True:
        for batch, target in loader:
            pause.wait(0.05)
            moved = batch + 0.01 * torch.randn(batch.shape, generator=noise)
            loss = (model(moved) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if is_resumed and forgets == "weights" and step == first + 2:
                flip_a_bit(next(model.parameters()))
            guard.step(step, loss=loss)
            emit(step=step)


if __name__ == "__main__":
    main()
