# SPDX-License-Identifier: Apache-2.0
"""A trainer without the hooks whose state is its position, as in ``positioned.py``; prints JSON lines.

    python signalled.py --training old --checkpoints DIR --pid-file FILE --save-when FILE --save-s 2

It saves ``checkpoint-N`` at once when the file of ``--save-when`` appears, and slowly after SIGUSR1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

POSITION = "position.json"


def emit(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def save(directory: Path, training: str, step: int, save_s: float) -> None:
    """Write a checkpoint whose one file grows for ``save_s`` seconds."""
    directory.mkdir()
    with (directory / POSITION).open("w") as file:
        file.write(json.dumps({"training": training, "step": step}))
        end = time.monotonic() + save_s
        while time.monotonic() < end:
            file.write(" ")
            file.flush()
            time.sleep(0.02)
    emit(event="saved", step=step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--training", required=True, help="name of this training, part of its state"
    )
    parser.add_argument("--checkpoints", type=Path, required=True, help="place of checkpoint-N/")
    parser.add_argument("--pid-file", type=Path, required=True)
    parser.add_argument("--save-when", type=Path, required=True, help="file that requests a save")
    parser.add_argument(
        "--save-s", type=float, default=0.0, help="duration of a save after SIGUSR1"
    )
    options = parser.parse_args()
    signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    options.pid_file.write_text(f"{os.getpid()}\n")
    step = 0
    while True:
        time.sleep(0.01)
        step += 1
        emit(step=step)
        directory = options.checkpoints / f"checkpoint-{step}"
        if options.save_when.exists():
            options.save_when.unlink()
            save(directory, options.training, step, 0.0)
        elif signals:
            signals.clear()
            emit(event="signalled", step=step)
            save(directory, options.training, step, options.save_s)


if __name__ == "__main__":
    main()
