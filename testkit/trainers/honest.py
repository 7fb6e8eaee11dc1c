# SPDX-License-Identifier: Apache-2.0
"""A trainer whose state names the training that made it; prints JSON lines.

    python honest.py --every-steps 20

Each start of the training draws a word, its *line*: a process draws one, and so does each rollback.  The
state is the step and the line that trained it.  The printed steps are therefore a witness, independent of the
daemon: a restored state was trained if its step and line were printed.

With ``--abreast DIRECTORY`` no rank of the job is more than one step ahead of another, as with collectives.
With ``--rollbacks N`` it rolls back N times, each time ten steps after the last.  After its last
step it does what ``--at-end`` names: ``close`` the guard, ``finish`` the run, ``exit`` without either, or
``sit`` there without an end.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from pathlib import Path

import swansong

STEPS_BEFORE_ROLLBACK = 10
ENDS = ("close", "finish", "exit", "sit")
_LOOK_S = 0.01


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


class Abreast:
    """Keeps the ranks of a job within one step of each other."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.rank = os.environ.get("RANK", "0")
        self.ranks = [str(rank) for rank in range(int(os.environ.get("WORLD_SIZE", "1")))]

    def wait(self, step: int) -> None:
        """Report ``step`` as completed; return once every rank has completed the step before."""
        if self.directory is None:
            return
        new = self.directory / f"{self.rank}.new"
        new.write_text(str(step))
        new.replace(self.directory / self.rank)
        while any(self._step_of(rank) < step - 1 for rank in self.ranks):
            time.sleep(_LOOK_S)

    def _step_of(self, rank: str) -> int:
        assert self.directory is not None
        path = self.directory / rank
        return int(path.read_text()) if path.exists() else -1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10**9, help="last step")
    parser.add_argument("--every-steps", type=int, default=None)
    parser.add_argument("--step-delay-s", type=float, default=0.02)
    parser.add_argument("--padding-bytes", type=int, default=0)
    parser.add_argument("--rollbacks", type=int, default=0)
    parser.add_argument("--abreast", type=Path, default=None, metavar="DIRECTORY")
    parser.add_argument("--at-end", choices=ENDS, default="close")
    options = parser.parse_args()
    training = Training(options.padding_bytes)
    abreast = Abreast(options.abreast)
    guard = swansong.attach(save=training.save, load=training.load, every_steps=options.every_steps)
    step = start = guard.restore()
    assert training.step == start
    emit(event="resumed", from_step=start, line=training.line, finished=guard.finished)
    rollbacks = 0
    while step < options.steps:
        abreast.wait(step)
        time.sleep(options.step_delay_s)
        step = training.step = step + 1
        guard.step(step, loss=1.0)
        emit(step=step, line=training.line)
        if rollbacks < options.rollbacks and step >= start + STEPS_BEFORE_ROLLBACK:
            rollbacks += 1
            training.line = secrets.token_hex(4)
            step = start = guard.rollback()
            emit(event="rolled_back", number=rollbacks, to_step=step, line=training.line)
    if options.at_end == "finish":
        emit(event="finished", committed=guard.finish())
    elif options.at_end == "close":
        guard.close()
    emit(event="ended", step=step)
    while options.at_end == "sit":
        time.sleep(1)


if __name__ == "__main__":
    main()
