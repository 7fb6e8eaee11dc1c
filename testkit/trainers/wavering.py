# SPDX-License-Identifier: Apache-2.0
"""A trainer whose loss is NaN for some steps, and that then rolls back; prints JSON lines.

    python wavering.py --bad-after 3

The daemon schedules its periodic checkpoints.  With ``--bad-after N`` its loss is NaN from the N-th commit
that the daemon reports until the rollback.  It ends as a script should that sees ``should_stop``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import swansong


def emit(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class Training:
    """Its weights are the number of the step, or NaN after a loss of NaN."""

    def __init__(self) -> None:
        self.weights = 0.0

    def save(self, directory: Path) -> None:
        (directory / "weights").write_text(repr(self.weights))

    def load(self, directory: Path) -> None:
        self.weights = float((directory / "weights").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bad-after", type=int, default=sys.maxsize, help="commits")
    options = parser.parse_args()
    training = Training()
    guard = swansong.attach(save=training.save, load=training.load, stop_after_save=True)
    step = guard.restore()
    commits, last, bad_from = 0, None, sys.maxsize
    while not guard.should_stop:
        time.sleep(0.01)
        step += 1
        loss = 1.0 / step if not math.isnan(training.weights) else math.nan
        training.weights = (
            float(step) if step < bad_from else math.nan
        )  # the loss is that of the next step
        guard.step(step, loss=loss)
        if not guard.healthy and guard.last_committed != last:
            came_from, step, bad_from = step, guard.rollback(), sys.maxsize
            assert training.weights == step, "what was saved with a finite loss can be NaN already"
            emit(event="rolled_back", from_step=came_from, to_step=step)
        if guard.last_committed != last:
            last = guard.last_committed
            commits += 1
            emit(event="committed", generation=last.generation, step=last.step)
            if commits == options.bad_after:
                bad_from = step + 1
                emit(event="bad", from_step=bad_from)
    guard.close()
    emit(event="stopped", step=step)
    return swansong.EXIT_SAVED


if __name__ == "__main__":
    sys.exit(main())
