# SPDX-License-Identifier: Apache-2.0
"""A trainer with the hooks whose state is its step.

    python positioned.py --save-at 20,60

It prints the step that it has loaded, and whether the daemon refused it, as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import swansong
from swansong import RestoreError


def emit(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class Training:
    def __init__(self) -> None:
        self.step = 0

    def save(self, directory: Path) -> None:
        (directory / "step").write_text(str(self.step))

    def load(self, directory: Path) -> None:
        self.step = int((directory / "step").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10**9, help="last step")
    parser.add_argument("--save-at", default="", help="steps after which it saves")
    parser.add_argument("--pause-after", type=int, help="step after which it waits")
    parser.add_argument("--continue-when", type=Path, help="the wait ends when this file exists")
    options = parser.parse_args()
    save_at = {int(step) for step in options.save_at.split(",") if step}
    training = Training()
    with swansong.attach(save=training.save, load=training.load) as guard:
        try:
            assert guard.restore() == training.step
        except RestoreError as error:
            emit(event="error", reason=str(error))
            return
        emit(event="resumed", step=training.step)
        while training.step < options.steps:
            time.sleep(0.01)
            training.step += 1
            guard.step(training.step)
            if training.step in save_at:
                assert guard.save(training.step)
                assert guard.wait_saved()
            while training.step == options.pause_after and not options.continue_when.exists():
                time.sleep(0.02)


if __name__ == "__main__":
    main()
