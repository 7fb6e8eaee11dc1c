# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: an environment with a numpy generator of its own, and a running mean of rewards."""

import json

import numpy as np
import swansong
import torch
from swansong.torch import TrainingState, seed_all
from torch import nn


class Corridor:
    """A walk to the right end; the wind pushes back at random."""

    def __init__(self):
        self.wind = np.random.default_rng(13)
        self.place = 0

    def reset(self):
        self.place = int(self.wind.integers(3))
        return self.place

    def step(self, action):
        self.place += 1 if action and self.wind.random() < 0.8 else -1
        self.place = max(self.place, 0)
        return self.place, float(self.place >= 5)


torch.set_num_threads(1)
seed_all(13)
corridor = Corridor()
policy = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
state = TrainingState(policy, optimizer, wind=corridor.wind)
state.values["running"] = 0.0
guard = swansong.attach(state)
for step in range(guard.restore() + 1, 10):
    place, log_probabilities, places, rewards = corridor.reset(), [], [], 0.0
    for _ in range(12):
        choice = torch.distributions.Categorical(logits=policy(torch.tensor([place / 5])))
        action = choice.sample()
        log_probabilities.append(choice.log_prob(action))
        place, reward = corridor.step(action.item())
        places.append(place)
        rewards += reward
    state.values["running"] = 0.9 * state.values["running"] + 0.1 * rewards
    loss = -(rewards - state.values["running"]) * torch.stack(log_probabilities).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    facts = {"step": step, "loss": loss.item(), "batch": places, **state.values}
    print(json.dumps(facts), flush=True)
    guard.step(step, loss=loss.item())
guard.close()
