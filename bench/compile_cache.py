# SPDX-License-Identifier: Apache-2.0
"""Measures the first step of a compiled model after a resume: ``python -m bench.compile_cache``.

A transformer is trained with ``torch.compile`` in a fresh process, with an empty compile cache, with the
cache of a checkpoint, and without ``torch.compile``.  A fake daemon on a real socket answers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import swansong
import torch
from swansong._torch.compile_cache import ARCHIVE, ENV
from swansong.torch import TrainingState, seed_all

from bench.transfer.results import median_and_spread
from testkit.fake_daemon import FakeDaemon
from testkit.waiting import until

WAYS = {"empty": "empty cache", "resumed": "cache of the checkpoint", "eager": "not compiled"}
_LIMIT_S = 600.0


def train(*, is_eager: bool, width: int, layers: int) -> None:
    """Print the durations of three steps; the last one is saved."""
    seed_all(7)
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = swansong.attach(TrainingState(model, optimizer))
    first = guard.restore()
    forward = model if is_eager else torch.compile(model)
    inputs, took_s = torch.randn(8, 128, width), []
    for step in range(first + 1, first + 4):
        begun_mono_s = time.monotonic()
        forward(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        took_s.append(time.monotonic() - begun_mono_s)
        guard.step(step)
    until(lambda: guard.save(step), what="the welcome")
    guard.close()
    print(json.dumps(took_s))


def measured(way: str, place: Path, daemon: FakeDaemon, sizes: list[str]) -> list[float]:
    """The durations of three steps in a new process with an empty directory for the cache."""
    command = [sys.executable, "-m", "bench.compile_cache", "--train", way, *sizes]
    environment = {
        **os.environ, "SWANSONG_SOCKET": daemon.path, ENV: str(place / "cache"), "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, timeout=_LIMIT_S
    )
    seconds: list[float] = json.loads(ended.stdout)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", choices=tuple(WAYS))
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    if options.train:
        train(is_eager=options.train == "eager", width=options.width, layers=options.layers)
        return
    sizes = ["--width", str(options.width), "--layers", str(options.layers)]
    found: dict[str, list[list[float]]] = defaultdict(list)
    for _ in range(options.samples):
        with tempfile.TemporaryDirectory() as directory:
            for way in WAYS:
                place = Path(directory, way)
                place.mkdir()
                with FakeDaemon(place) as daemon:
                    daemon.is_signed = True
                    saved = Path(directory, "empty")
                    if way == "resumed":
                        (checkpoint,) = (saved / "run").glob("step-*")
                        daemon.restorable = lambda found=checkpoint: (found, 3)  # type: ignore[misc]
                        size = (checkpoint / "rank-00000" / ARCHIVE).stat().st_size
                        print(f"archive of {size / 1e6:.1f} MB")
                    found[way].append(measured(way, place, daemon, sizes))
    for way, name in WAYS.items():
        first = median_and_spread([seconds[0] for seconds in found[way]], ".2f")
        last = median_and_spread([seconds[-1] for seconds in found[way]], ".2f")
        print(f"{name}: first step {first} s, third step {last} s")


if __name__ == "__main__":
    main()
