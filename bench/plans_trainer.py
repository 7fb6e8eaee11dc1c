# SPDX-License-Identifier: Apache-2.0
"""The trainer of :mod:`bench.plans`: a save writes equal files at a steady rate, and finishes each one."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import swansong
from swansong._checkpoint.staging import finish

STEP_S = 0.1
_PIECE_BYTES = 2**20


class Training:
    def __init__(self, size_bytes: int, files: int, save_s: float) -> None:
        self.step = 0
        self.size_bytes, self.files, self.save_s = size_bytes, files, save_s

    def save(self, directory: Path) -> None:
        begun_mono_s = time.monotonic()
        for number in range(self.files):
            # Each file has other bytes at each step: no byte is referenced.
            piece = os.urandom(2**16) * (_PIECE_BYTES // 2**16)
            with (directory / f"{number}.bin").open("wb") as file:
                for _ in range(self.size_bytes // self.files // _PIECE_BYTES):
                    file.write(piece)
            due_s = self.save_s * (number + 1) / self.files
            time.sleep(max(0.0, begun_mono_s + due_s - time.monotonic()))
            finish(directory / f"{number}.bin")

    def load(self, directory: Path) -> None:
        del directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--files", type=int, required=True)
    parser.add_argument("--save-s", type=float, required=True)
    parser.add_argument("--from-step", type=int, required=True)
    options = parser.parse_args()
    training = Training(options.size_bytes, options.files, options.save_s)
    guard = swansong.attach(save=training.save, load=training.load)
    training.step = options.from_step
    while True:
        time.sleep(STEP_S)
        training.step += 1
        if training.step == options.from_step + 5:
            guard.save(training.step)
        guard.step(training.step)


if __name__ == "__main__":
    main()
