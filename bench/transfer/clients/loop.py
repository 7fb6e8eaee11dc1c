# SPDX-License-Identifier: Apache-2.0
"""A loop instead of a trainer: steps per second of one thread, limited by the processor or by memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

WARMUP_S = 0.5


def step_of(kind: str) -> Callable[[], object]:
    if kind == "processor":
        left = np.random.default_rng(1).random((256, 256), dtype=np.float32)
        product = np.empty_like(left)
        return lambda: np.matmul(left, left, out=product)
    source: np.ndarray = np.ones(
        32 * 2**20, dtype=np.float32
    )  # 128 MiB each: larger than any cache
    target = np.zeros_like(source)
    return lambda: np.add(source, target, out=target)


def main() -> None:
    kind, seconds = sys.argv[1], float(sys.argv[2])
    step = step_of(kind)
    began = time.monotonic()
    while time.monotonic() < began + WARMUP_S:
        step()
    steps = 0
    began = time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        step()
        steps += 1
    print(steps / (now - began))


if __name__ == "__main__":
    main()
