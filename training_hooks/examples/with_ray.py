# SPDX-License-Identifier: Apache-2.0
"""Ray Train: a training function that survives the loss of its VM, with one worker on one VM.

    python with_ray.py

The same command line starts and resumes the run.  Ray and the daemon must run on the same VM.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import ray
import swansong  # Swansong
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from swansong.torch import ResumableLoader, TrainingState, seed_all  # Swansong
from torch.utils.data import DataLoader
from torch_ddp import Transformer, Windows, loss_of, read_text


def train(config: dict[str, Any]) -> None:
    seed_all(1609)
    codes, vocabulary = read_text()
    model = prepare_model(Transformer(vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = ResumableLoader(  # Swansong
        DataLoader(Windows(codes, config["windows"]), 16, shuffle=True)
    )
    guard = swansong.attach(TrainingState(model, optimizer, loader=loader))  # Swansong
    step = guard.restore()  # Swansong
    while loader.epoch < config["epochs"]:
        for text, target in loader:
            loss = loss_of(model, text, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            with open(config["log"], "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
            guard.step(step, loss=loss)  # Swansong
        ray.train.report({"loss": loss.item()})
    guard.finish()  # Swansong


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the sonnets with Ray Train.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--windows", type=int, default=128, help="per epoch")
    parser.add_argument("--storage", default="output", help="directory of Ray's own results")
    parser.add_argument("--log", default="/dev/stdout")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "epochs": options.epochs,
            "windows": options.windows,
            "log": options.log,
        },
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=options.storage, name="sonnets"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
