# SPDX-License-Identifier: Apache-2.0
"""A trainer whose state is its step: it resumes, makes 100 steps a second, and saves at given steps."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import swansong
from swansong import RestoreError


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def emit(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=0, help="last step")
    parser.add_argument("--forever", action="store_true")
    parser.add_argument("--save-at", default="", help="steps after which it saves")
    parser.add_argument("--pause-after", type=int, help="step after which it waits")
    parser.add_argument("--continue-when", type=Path, help="the wait ends when this file exists")
    args = parser.parse_args()
    wanted = {int(step) for step in args.save_at.split(",") if step}
    counter = Counter()
    with swansong.attach({"counter": counter}) as guard:
        try:
            step = guard.restore()
        except RestoreError as error:
            emit(event="error", reason=str(error))
            return
        assert step == counter.value
        emit(event="resumed", step=step)
        while args.forever or step < args.steps:
            step += 1
            counter.value = step
            guard.step(step)
            if step in wanted:
                assert guard.save(step)
            if step == args.pause_after:
                while not args.continue_when.exists():
                    time.sleep(0.01)
            time.sleep(0.01)
        guard.wait_saved()


if __name__ == "__main__":
    main()
