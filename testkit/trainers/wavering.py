# SPDX-License-Identifier: Apache-2.0
"""A trainer whose loss stops to be finite once, and that then goes back; prints JSON lines.

    python wavering.py --bad-after 3

The daemon plans its periodic checkpoints.  With ``--bad-after N`` its loss is NaN from the N-th commit on
that it hears of, until it has gone back.  It ends as a script should that was told to stop.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import swansong


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class Training:
    """Its weights are the number of the step, and NaN once the loss was."""

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
        )  # the loss shows at the next step
        guard.step(step, loss=loss)
        if not guard.healthy and guard.last_committed != last:
            came_from, step, bad_from = step, guard.rollback(), sys.maxsize
            assert training.weights == step, "what was saved with a finite loss can be NaN already"
            say(event="rolled_back", from_step=came_from, to_step=step)
        if guard.last_committed != last:
            last = guard.last_committed
            commits += 1
            say(event="committed", generation=last.generation, step=last.step)
            if commits == options.bad_after:
                bad_from = step + 1
                say(event="bad", from_step=bad_from)
    guard.close()
    say(event="stopped", step=step)
    return swansong.EXIT_SAVED


if __name__ == "__main__":
    sys.exit(main())
