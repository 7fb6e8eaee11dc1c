# SPDX-License-Identifier: Apache-2.0
"""A training loop in numpy, without torch; the state is an object of the script."""

import json
import random

import numpy as np
import swansong


class Regression:
    def __init__(self):
        self.weights = np.zeros(3)
        self.order = []

    def state_dict(self):
        return {"weights": self.weights, "order": self.order}

    def load_state_dict(self, state):
        self.weights, self.order = state["weights"], state["order"]


random.seed(17)
np.random.seed(17)
x = np.random.randn(10, 3)
noise = np.random.default_rng(17)
model = Regression()
guard = swansong.attach({"model": model, "noise": noise})
for step in range(guard.restore() + 1, 13):
    if len(model.order) < 4:
        model.order = random.sample(range(10), 10)
    ids, model.order = model.order[:4], model.order[4:]
    error = x[ids] @ model.weights - x[ids].sum(1) + 0.1 * noise.standard_normal(4)
    model.weights -= 0.1 * x[ids].T @ error
    loss = float((error**2).mean())
    print(json.dumps({"step": step, "loss": loss, "batch": ids}), flush=True)
    guard.step(step, loss=loss)
guard.close()
