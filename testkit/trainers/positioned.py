# SPDX-License-Identifier: Apache-2.0
"""A trainer with the hooks whose state is its position: the name of its training, and its step.

    python positioned.py --training new --save-at 20,60

It prints the position that it has loaded, and each step that it has completed, as JSON lines.  They are a
witness that is independent of the daemon: a restored state was trained if its training and step were printed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from pathlib import Path

import swansong
from swansong import RestoreError

POSITION = "position.json"


def emit(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def wait_for(path: Path | None) -> None:
    """Block until this file exists, as in an import or a compilation that takes long."""
    while path is not None and not path.exists():
        time.sleep(0.02)


class Training:
    """The position, in one small file, and bytes that have no meaning."""

    def __init__(self, name: str, padding_bytes: int) -> None:
        self.name = name
        self.step = 0
        self.padding_bytes = padding_bytes

    def save(self, directory: Path) -> None:
        position = {"training": self.name, "step": self.step}
        (directory / POSITION).write_text(json.dumps(position))
        if self.padding_bytes:
            (directory / "padding.bin").write_bytes(os.urandom(self.padding_bytes))

    def load(self, directory: Path) -> None:
        position = json.loads((directory / POSITION).read_text())
        self.step = position["step"]
        emit(event="loaded", **position)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--training", default=secrets.token_hex(4), help="name of this training, part of its state"
    )
    parser.add_argument("--steps", type=int, default=10**9, help="last step")
    parser.add_argument("--step-delay-s", type=float, default=0.01)
    parser.add_argument("--every-steps", type=int, default=None, help="interval of its saves")
    parser.add_argument("--save-at", default="", help="steps after which it saves")
    parser.add_argument("--padding-bytes", type=int, default=0, help="further size of its state")
    parser.add_argument("--attach-when", type=Path, help="file that attach() waits for")
    parser.add_argument("--pause-after", type=int, help="step after which it waits")
    parser.add_argument("--continue-when", type=Path, help="the wait ends when this file exists")
    parser.add_argument("--finish", action="store_true", help="mark the end of the run")
    options = parser.parse_args()
    save_at = {int(step) for step in options.save_at.split(",") if step}
    training = Training(options.training, options.padding_bytes)
    emit(event="started")
    wait_for(options.attach_when)
    with swansong.attach(
        save=training.save, load=training.load, every_steps=options.every_steps
    ) as guard:
        try:
            assert guard.restore() == training.step
        except RestoreError as error:
            emit(event="error", reason=str(error))
            return
        emit(event="resumed", step=training.step)
        while training.step < options.steps:
            time.sleep(options.step_delay_s)
            training.step += 1
            guard.step(training.step)
            emit(training=training.name, step=training.step)
            if training.step in save_at:
                assert guard.save(training.step)
                assert guard.wait_saved()
            if training.step == options.pause_after:
                wait_for(options.continue_when)
        if options.finish:
            assert guard.finish()


if __name__ == "__main__":
    main()
