# SPDX-License-Identifier: Apache-2.0
"""The smallest trainer with the hooks: prints its events, and those of the guard, as JSON lines.

    python witness.py --steps 100 --every-steps 10

Its state is the number of the step, in a few files.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import swansong

FILES = ("weights.bin", "optimizer.bin", "loader.bin")


def content(step: int, name: str, size_bytes: int) -> bytes:
    """Return the content of a file at a step; every byte depends on the step."""
    words = f"{name} at step {step};".encode()
    return (words * (size_bytes // len(words) + 1))[:size_bytes]


def emit(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class Training:
    def __init__(self, size_bytes: int) -> None:
        self.step = 0
        self.size_bytes = size_bytes

    def save(self, directory: Path) -> None:
        for name in FILES:
            (directory / name).write_bytes(content(self.step, name, self.size_bytes))

    def load(self, directory: Path) -> None:
        first = (directory / FILES[0]).read_bytes()
        self.step = int(first.partition(b" at step ")[2].partition(b";")[0])
        for name in FILES:
            assert (directory / name).read_bytes() == content(self.step, name, len(first)), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--every-steps", type=int, default=None)
    parser.add_argument("--step-delay-s", type=float, default=0.01)
    parser.add_argument("--size-bytes", type=int, default=1000, help="of each file")
    parser.add_argument("--finish", action="store_true", help="mark the end of the run")
    parser.add_argument("--stop-after-save", action="store_true", help="end with code 75")
    options = parser.parse_args()
    training = Training(options.size_bytes)
    guard = swansong.attach(
        save=training.save,
        load=training.load,
        every_steps=options.every_steps,
        stop_after_save=options.stop_after_save,
    )
    start = guard.restore()
    assert training.step == start
    emit(event="resumed", from_step=start, finished=guard.finished)
    committed, fenced = None, False
    for step in range(start + 1, options.steps + 1):
        time.sleep(options.step_delay_s)
        training.step = step
        guard.step(step)
        emit(step=step, mono_s=time.monotonic())
        if guard.last_committed != committed:
            committed = guard.last_committed
            assert committed is not None
            emit(event="committed", committed=committed.step, generation=committed.generation)
        if guard.fenced and not fenced:
            fenced = True
            emit(event="fenced")
        if guard.should_stop:
            break
    if options.finish:
        emit(event="finished", committed=guard.finish())
    guard.close()
    emit(event="ended")
    if guard.should_stop:
        sys.exit(swansong.EXIT_SAVED)


if __name__ == "__main__":
    main()
