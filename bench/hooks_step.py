# SPDX-License-Identifier: Apache-2.0
"""Measures ``guard.step()`` without a checkpoint request: the median in nanoseconds per call.

python bench/hooks_step.py
"""

from __future__ import annotations

import json
import statistics
import timeit
from collections.abc import Callable

import swansong

CALLS, REPEATS = 200_000, 15


class Nothing:
    def step(self, step: int, loss: object = None, **metrics: object) -> None:
        """The cheapest possible call with these arguments."""


def median_ns(call: Callable[[int], None]) -> float:
    def loop() -> None:
        for step in range(CALLS):
            call(step)

    return round(statistics.median(timeit.repeat(loop, number=1, repeat=REPEATS)) / CALLS * 1e9, 1)


def main() -> None:
    guard = swansong.attach(
        save=lambda _: None, load=lambda _: None, every_steps=10**9, socket="/nonexistent"
    )
    nothing = Nothing()
    print(
        json.dumps(
            {
                "empty_call_ns": median_ns(lambda step: nothing.step(step, loss=1.0)),
                "guard_step_ns": median_ns(lambda step: guard.step(step, loss=1.0)),
            }
        )
    )


if __name__ == "__main__":
    main()
