# SPDX-License-Identifier: Apache-2.0
"""Stable-Baselines3: PPO on CartPole, in a run that survives the loss of its VM.

    python with_stable_baselines3.py

The same command line starts and resumes the run.  A step of the run is one rollout with its update.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import gymnasium
import numpy as np
import swansong  # Swansong
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from swansong.torch import TrainingState  # Swansong

COUNTERS = ("num_timesteps", "_n_updates", "_episode_num", "_last_obs", "_last_episode_starts")
CLOCKS = ("t_start", "episode_times", "episode_start_time")


class Agent:
    """Counters of the algorithm, and the state of environments that consists of plain attributes."""

    def __init__(self, model: PPO) -> None:
        self.model = model
        self.layers: list[Any] = []
        for env in model.env.envs:
            layer = env
            while isinstance(layer, gymnasium.Wrapper):
                self.layers.append(layer)
                layer = layer.env
            self.layers.append(layer)

    def state_dict(self) -> dict[str, Any]:
        counters = {name: getattr(self.model, name) for name in COUNTERS}
        return {"counters": counters, "layers": [_plain(vars(layer)) for layer in self.layers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["counters"].items():
            setattr(self.model, name, value)
        for layer, values in zip(self.layers, state["layers"], strict=True):
            for name, value in values.items():
                if isinstance(value, dict):
                    getattr(layer, name).bit_generator.state = value
                else:
                    setattr(layer, name, value)


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in attributes.items():
        numbers = value if isinstance(value, list) else [value]
        if isinstance(value, np.random.Generator):
            found[name] = value.bit_generator.state
        elif name in CLOCKS:
            continue
        elif all(isinstance(each, int | float | np.ndarray | None) for each in numbers):
            found[name] = list(value) if isinstance(value, list) else value
    return found


class Swansong(BaseCallback):
    """Restores at the start of ``learn()``, and reports each rollout with its update."""

    def _on_training_start(self) -> None:
        policy = self.model.policy
        state = TrainingState(policy, policy.optimizer, agent=Agent(self.model))
        self.guard = swansong.attach(state)
        self.rollouts = self.guard.restore()

    def _on_rollout_start(self) -> None:
        rollouts = self.model.num_timesteps // (self.model.n_steps * self.model.n_envs)
        if rollouts > self.rollouts:
            self._report(rollouts)

    def _report(self, rollouts: int) -> None:
        self.rollouts = rollouts
        loss = float(self.logger.name_to_value["train/loss"])
        print(json.dumps({"step": rollouts, "loss": loss}), flush=True)
        self.guard.step(rollouts, loss=loss)

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self._on_rollout_start()
        self.guard.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole with PPO.")
    parser.add_argument("--rollouts", type=int, default=40)
    options = parser.parse_args()
    env = make_vec_env("CartPole-v1", n_envs=2, seed=1609)
    model = PPO("MlpPolicy", env, n_steps=128, batch_size=64, n_epochs=4, seed=1609, device="cpu")
    model.learn(options.rollouts * 2 * 128, callback=Swansong())


if __name__ == "__main__":
    main()
