# SPDX-License-Identifier: Apache-2.0
"""A trainer without the hooks: on SIGUSR1 it writes ``checkpoint-N/`` and continues to train.

    python usr1_trainer.py --checkpoints run --pid-file run.pid --steps 2000 --out weights.npz
    python usr1_trainer.py --checkpoints run --resume run/checkpoint-500 --steps 2000 --out weights.npz

Like many scripts, this one writes several files directly below the final name, without a marker for the end.
The daemon watches the directory until the checkpoint is complete.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from char_lm import Training, arguments, report


def write_slowly(file: BinaryIO, data: bytes, delay_s: float) -> None:
    """Write two halves with a pause, as with a slow disk or a large model."""
    half = len(data) // 2
    file.write(data[:half])
    file.flush()
    time.sleep(delay_s)
    file.write(data[half:])


def save(training: Training, directory: Path, step: int, delay_s: float) -> None:
    """Write all files of the checkpoint, ``trainer_state.json`` last."""
    directory.mkdir(parents=True, exist_ok=True)
    optimizer, loader = training.optimizer, training.loader
    arrays: dict[str, dict[str, Any]] = {
        "model.npy": training.model.weights,
        "optimizer.npy": {
            "trace": optimizer.trace,
            "order": loader.order,
            **{
                f"{name}.{place}": moment
                for name, pair in optimizer.moments.items()
                for place, moment in enumerate(pair)
            },
        },
    }
    for name, members in arrays.items():
        with open(directory / name, "wb") as file:
            for member in members.values():  # in the order of a new model
                np.save(file, member)
            file.flush()
            time.sleep(delay_s)
    facts = {
        "rng.json": {"generator": training.rng.bit_generator.state, "python": random.getstate()},
        "trainer_state.json": {
            "step": step,
            "optimizer_step": optimizer.step,
            "position": loader.position,
        },
    }
    for name, values in facts.items():
        with open(directory / name, "wb") as file:
            write_slowly(file, json.dumps(values).encode(), delay_s)


def load(training: Training, directory: Path) -> int:
    """Load a checkpoint into ``training``; returns its number of completed steps."""
    state = json.loads((directory / "trainer_state.json").read_text())
    optimizer, loader = training.optimizer, training.loader
    with open(directory / "model.npy", "rb") as file:
        for name in training.model.weights:
            training.model.weights[name] = np.load(file)
    with open(directory / "optimizer.npy", "rb") as file:
        optimizer.trace, loader.order = np.load(file), np.load(file)
        for name in optimizer.moments:
            optimizer.moments[name] = [np.load(file), np.load(file)]
    optimizer.step, loader.position = state["optimizer_step"], state["position"]
    generators = json.loads((directory / "rng.json").read_text())
    training.rng.bit_generator.state = generators["generator"]
    version, internal, gauss = generators["python"]
    random.setstate((version, tuple(internal), gauss))
    return int(state["step"])


def main() -> None:
    parser = arguments("Learn the sonnets and save on SIGUSR1.")
    parser.add_argument("--checkpoints", default=".", help="directory for checkpoint-N/")
    parser.add_argument("--pid-file", default="", help="file for the process id")
    parser.add_argument(
        "--file-delay-s", type=float, default=0.3, help="pause while each file is written"
    )
    parser.add_argument("--resume", default="", help="checkpoint-N/ directory to resume from")
    options = parser.parse_args()

    wanted: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: wanted.append(number))
    if options.pid_file:  # after the handler is installed: without it the signal kills the process
        temporary = Path(f"{options.pid_file}.tmp")
        temporary.write_text(f"{os.getpid()}\n")
        temporary.replace(options.pid_file)

    training = Training(options.seed, options.pad_mb)
    start = load(training, Path(options.resume)) if options.resume else 0
    for step in range(start + 1, options.steps + 1):
        loss = training.one_step()
        time.sleep(options.step_delay_s)
        report(options.log, step, loss)
        if wanted or (options.every_steps and step % options.every_steps == 0):
            wanted.clear()
            directory = Path(options.checkpoints, f"checkpoint-{step}")
            save(training, directory, step, options.file_delay_s)
    training.finish(options.out)


if __name__ == "__main__":
    main()
