# SPDX-License-Identifier: Apache-2.0
"""LightGBM: boosting rounds that survive the loss of their VM.

    python with_lightgbm.py

The same command line starts and resumes the run.  A step of the run is ten boosting rounds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import lightgbm
import numpy as np
import swansong  # Swansong

ROUNDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a made-up function with boosted trees.")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    generator = np.random.default_rng(1609)
    inputs = generator.normal(size=(4000, 12))
    wanted = (
        np.sin(inputs[:, 0] * 3) + inputs[:, 1] * inputs[:, 2] + generator.normal(size=4000) / 9
    )
    data = lightgbm.Dataset(inputs, wanted, free_raw_data=False)
    params = {
        "bagging_fraction": 0.7,
        "bagging_freq": 1,
        "feature_fraction": 0.8,
        "deterministic": True,
        "force_row_wise": True,
        "verbose": -1,
    }
    booster: lightgbm.Booster | None = None

    def save(directory: Path) -> None:
        if booster is not None:
            booster.save_model(directory / "model.txt")

    def load(directory: Path) -> None:
        nonlocal booster
        booster = lightgbm.Booster(model_file=directory / "model.txt")

    guard = swansong.attach(save=save, load=load)  # Swansong
    for step in range(guard.restore() + 1, options.steps + 1):  # Swansong
        # A booster does not save its generators, so each call gets its own seed.
        booster = lightgbm.train({**params, "seed": step}, data, ROUNDS, init_model=booster)
        loss = float(np.square(booster.predict(inputs) - wanted).mean())
        print(json.dumps({"step": step, "loss": loss}), flush=True)
        guard.step(step, loss=loss)  # Swansong
    guard.finish()  # Swansong


if __name__ == "__main__":
    main()
