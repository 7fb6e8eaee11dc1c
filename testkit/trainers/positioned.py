# SPDX-License-Identifier: Apache-2.0
"""A trainer with the hooks whose state is its position: the name of its training, and its step.

    python positioned.py --training new --attach-when /path/of/a/file

It prints the position that it has loaded, and each step, as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import swansong

POSITION = "position.json"


def emit(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def wait_for(path: Path | None) -> None:
    """Block until this file exists, as in an import or a compilation that takes long."""
    while path is not None and not path.exists():
        time.sleep(0.02)


class Training:
    def __init__(self, name: str) -> None:
        self.name = name
        self.step = 0

    def save(self, directory: Path) -> None:
        position = {"training": self.name, "step": self.step}
        (directory / POSITION).write_text(json.dumps(position))

    def load(self, directory: Path) -> None:
        position = json.loads((directory / POSITION).read_text())
        self.step = position["step"]
        emit(event="loaded", **position)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--training", required=True, help="name of this training, part of its state"
    )
    parser.add_argument("--save-at", default="", help="steps after which it saves")
    parser.add_argument("--attach-when", type=Path, help="file that attach() waits for")
    options = parser.parse_args()
    save_at = {int(step) for step in options.save_at.split(",") if step}
    training = Training(options.training)
    emit(event="started")
    wait_for(options.attach_when)
    guard = swansong.attach(save=training.save, load=training.load)
    guard.restore()
    while True:
        time.sleep(0.01)
        training.step += 1
        guard.step(training.step)
        emit(step=training.step)
        if training.step in save_at:
            assert guard.save(training.step)
            assert guard.wait_saved()


if __name__ == "__main__":
    main()
