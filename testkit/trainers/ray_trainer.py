# SPDX-License-Identifier: Apache-2.0
"""The training function of docs/trainers/ray.md with two workers; it appends JSON lines to a file.

    python ray_trainer.py ADDRESS STEPS DIRECTORY [EVERY_STEPS]
    python ray_trainer.py alone STEPS DIRECTORY

With EVERY_STEPS, it saves at that interval, and Train restarts the workers once after a failure.
``alone`` trains without Ray and without a daemon.  All ranks draw the same numbers, so the weights are the
same to the bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from typing import Any

import ray
import ray.train
import swansong
import torch
from ray.train.torch import TorchTrainer, prepare_model
from swansong.torch import TrainingState


def train(config: dict[str, Any]) -> None:
    def emit(**facts: object) -> None:
        with open(config["log"], "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    if not config["alone"]:
        model = prepare_model(model)
    optimizer = torch.optim.Adam(model.parameters())
    guard = swansong.attach(
        TrainingState(model, optimizer),
        socket=config["socket"],
        every_steps=config["every_steps"],
    )
    start = guard.restore()
    emit(rank=rank, resumed=start, socket=os.environ.get("SWANSONG_SOCKET"))
    pause = threading.Event()
    for step in range(start + 1, config["steps"] + 1):
        pause.wait(config["pause_s"])
        loss = model(torch.randn(4, 8)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        guard.step(step, loss=loss)
        if step % 5 == 0:
            emit(rank=rank, step=step)
    guard.finish()
    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    emit(rank=rank, digest=hashlib.sha256(weights).hexdigest())


def main() -> None:
    address, steps, directory, *interval = sys.argv[1:]
    alone = address == "alone"
    config = {
        "alone": alone,
        "steps": int(steps),
        "every_steps": int(interval[0]) if interval else None,
        "log": f"{directory}/train.jsonl",
        "pause_s": 0.0 if alone else 0.05,
        "socket": f"{directory}/no-daemon.sock" if alone else None,
    }
    if alone:
        train(config)
        return
    ray.init(address=address)
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"slot": 1}),
        run_config=ray.train.RunConfig(
            storage_path=directory,
            name="run",
            failure_config=ray.train.FailureConfig(max_failures=len(interval)),
        ),
    ).fit()


if __name__ == "__main__":
    main()
