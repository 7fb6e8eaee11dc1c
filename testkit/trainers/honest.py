# SPDX-License-Identifier: Apache-2.0
"""A trainer whose state names the training that made it; prints JSON lines.

    python honest.py --every-steps 20

Each start of the training draws a word, its *line*.  The state is the step and the line that trained it.  The
printed steps are therefore a witness, independent of the daemon: a restored state was trained if its step and
line were printed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from pathlib import Path

import swansong


def emit(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class Training:
    """The state, in one small file, and bytes that have no meaning."""

    def __init__(self, padding_bytes: int) -> None:
        self.step = 0
        self.line = secrets.token_hex(4)
        self.padding_bytes = padding_bytes

    def save(self, directory: Path) -> None:
        state = {"step": self.step, "line": self.line}
        (directory / "state.json").write_text(json.dumps(state))
        if self.padding_bytes:
            (directory / "padding.bin").write_bytes(os.urandom(self.padding_bytes))

    def load(self, directory: Path) -> None:
        self.step = json.loads((directory / "state.json").read_text())["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10**9, help="last step")
    parser.add_argument("--every-steps", type=int, default=None)
    parser.add_argument("--step-delay-s", type=float, default=0.02)
    parser.add_argument("--padding-bytes", type=int, default=0)
    parser.add_argument("--finish", action="store_true", help="mark the end of the run")
    options = parser.parse_args()
    training = Training(options.padding_bytes)
    guard = swansong.attach(save=training.save, load=training.load, every_steps=options.every_steps)
    step = guard.restore()
    assert training.step == step
    emit(event="resumed", from_step=step, line=training.line)
    while step < options.steps:
        time.sleep(options.step_delay_s)
        step = training.step = step + 1
        guard.step(step, loss=1.0)
        emit(step=step, line=training.line)
    if options.finish:
        assert guard.finish()
    guard.close()


if __name__ == "__main__":
    main()
