# SPDX-License-Identifier: Apache-2.0
"""A trainer whose save lasts until a file exists; prints JSON lines.

    python slow_save.py --gate /path/of/a/file

Each save writes and finishes ``weights.bin`` and ``small.bin``; then ``optimizer.bin`` grows until the gate
exists.  The first save does not wait for the gate.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import swansong
from swansong._checkpoint.staging import finish

WEIGHTS_BYTES = 6 * 2**20
SMALL_BYTES = 3 * 2**19
"""One request, and too large for a pack with parts of 5 MiB."""
OPTIMIZER_BYTES = 2 * 2**20
_PIECE_BYTES = 2**15


def content(step: int, name: str, size_bytes: int) -> bytes:
    """Return the content of a file at a step; every byte depends on the step."""
    words = f"{name} at step {step};".encode()
    return (words * (size_bytes // len(words) + 1))[:size_bytes]


def emit(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class Training:
    def __init__(self, gate: Path) -> None:
        self.step = 0
        self.saves = 0
        self.gate = gate

    def save(self, directory: Path) -> None:
        self.saves += 1
        for name, size_bytes in (("weights.bin", WEIGHTS_BYTES), ("small.bin", SMALL_BYTES)):
            (directory / name).write_bytes(content(self.step, name, size_bytes))
            finish(directory / name)
        data = content(self.step, "optimizer.bin", OPTIMIZER_BYTES)
        with (directory / "optimizer.bin").open("wb") as file:
            if self.saves > 1:
                emit(event="slow", step=self.step)
                while not self.gate.exists():
                    file.write(data[file.tell() % OPTIMIZER_BYTES :][:_PIECE_BYTES])
                    file.flush()
                    time.sleep(0.02)
                file.truncate(0)
                file.seek(0)
            file.write(data)

    def load(self, directory: Path) -> None:
        first = (directory / "small.bin").read_bytes()
        self.step = int(first.partition(b" at step ")[2].partition(b";")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gate", type=Path, required=True)
    options = parser.parse_args()
    training = Training(options.gate)
    guard = swansong.attach(save=training.save, load=training.load)
    guard.restore()
    emit(event="resumed", from_step=training.step)
    while True:
        time.sleep(0.01)
        training.step += 1
        if training.step == 1:
            guard.save(1)
        guard.step(training.step)
        emit(step=training.step)


if __name__ == "__main__":
    main()
