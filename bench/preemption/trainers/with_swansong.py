# SPDX-License-Identifier: Apache-2.0
"""Swansong, as in docs/trainers/pytorch.md: two lines, and the daemon plans the checkpoints."""

from __future__ import annotations

import itertools

import swansong
import work
from swansong.torch import TrainingState


def main() -> None:
    options = work.options()
    model = work.Model(options.size_bytes, options.step_s)
    optimizer = work.Optimizer(model)
    witness = work.Witness(options.witness)
    guard = swansong.attach(TrainingState(model, optimizer))
    start = guard.restore()
    witness.restored(start, work.step_of(model, optimizer))
    for step in itertools.count(start + 1):
        model()["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        witness.step(step)
        guard.step()


if __name__ == "__main__":
    main()
