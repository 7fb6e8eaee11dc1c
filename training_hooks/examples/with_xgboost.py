# SPDX-License-Identifier: Apache-2.0
"""XGBoost: boosting rounds that survive the loss of their VM.

    python with_xgboost.py

The same command line starts and resumes the run.  A step of the run is one boosting round.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import swansong  # Swansong
import xgboost


def renewed(
    old: xgboost.Booster | None, params: dict[str, Any], data: xgboost.DMatrix, step: int
) -> xgboost.Booster:
    """Return a booster with the trees of ``old``, whose generators depend on the step alone.

    Only subsample and colsample need it: a booster does not save its generators.
    """
    booster = xgboost.Booster({**params, "seed": 1609 + step}, [data])
    if old is not None and old.num_boosted_rounds():
        booster.load_model(old.save_raw("ubj"))
        booster.set_param("seed", 1609 + step)
    return booster


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a made-up function with boosted trees.")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    generator = np.random.default_rng(1609)
    inputs = generator.normal(size=(4000, 12))
    wanted = (
        np.sin(inputs[:, 0] * 3) + inputs[:, 1] * inputs[:, 2] + generator.normal(size=4000) / 9
    )
    data = xgboost.DMatrix(inputs, wanted)
    params = {
        "max_depth": 4,
        "eta": 0.2,
        "subsample": 0.7,
        "colsample_bytree": 0.8,
        "nthread": 1,
    }
    booster = renewed(None, params, data, 0)

    def save(directory: Path) -> None:
        booster.save_model(directory / "model.ubj")

    def load(directory: Path) -> None:
        booster.load_model(directory / "model.ubj")

    guard = swansong.attach(save=save, load=load)  # Swansong
    for step in range(guard.restore(), options.rounds):  # Swansong
        booster = renewed(booster, params, data, step)
        booster.update(data, step)
        loss = float(booster.eval(data).split(":")[-1])
        print(json.dumps({"step": step + 1, "loss": loss}), flush=True)
        guard.step(step + 1, loss=loss)  # Swansong
    guard.finish()  # Swansong


if __name__ == "__main__":
    main()
