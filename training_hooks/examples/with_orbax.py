# SPDX-License-Identifier: Apache-2.0
"""A loop in JAX that saves with Orbax and survives the loss of its VM.

    python with_orbax.py --directory /mnt/scratch/sonnets

The same command line starts and resumes the run.  The directory may be empty on a new VM.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from swansong.orbax import SavePolicy  # Swansong

CONTEXT, WIDTH, BATCH = 8, 32, 64

State = dict[str, Any]


def fresh(vocabulary: int) -> State:
    keys = jax.random.split(jax.random.PRNGKey(1609), 3)
    params = {
        "embedding": 0.1 * jax.random.normal(keys[0], (vocabulary, WIDTH)),
        "head": 0.1 * jax.random.normal(keys[1], (CONTEXT * WIDTH, vocabulary)),
    }
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "key": keys[2]}


def loss_of(params: State, windows: jax.Array) -> jax.Array:
    hidden = jnp.tanh(params["embedding"][windows[:, :-1]]).reshape(len(windows), -1)
    chances = jax.nn.log_softmax(hidden @ params["head"])
    return -jnp.take_along_axis(chances, windows[:, -1:], axis=1).mean()


@partial(jax.jit, donate_argnums=0)
def train(state: State, codes: jax.Array) -> tuple[State, jax.Array]:
    key, own = jax.random.split(state["key"])
    places = jax.random.randint(own, (BATCH, 1), 0, len(codes) - CONTEXT)
    windows = codes[places + jnp.arange(CONTEXT + 1)]
    loss, slope = jax.value_and_grad(loss_of)(state["params"], windows)
    momentum = jax.tree.map(lambda m, s: 0.9 * m + s, state["momentum"], slope)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "key": key}, loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the sonnets with JAX.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--directory", type=Path, default=Path("orbax"))
    options = parser.parse_args()

    text = Path(__file__).with_name("sonnets.txt").read_text(encoding="utf-8")
    characters = sorted(set(text))
    codes = jnp.array([characters.index(character) for character in text])
    state = fresh(len(characters))

    policy = SavePolicy()  # Swansong
    manager = ocp.CheckpointManager(
        options.directory.absolute(),
        options=ocp.CheckpointManagerOptions(
            save_decision_policy=policy, max_to_keep=2
        ),  # Swansong
    )
    step = policy.restore(manager)  # Swansong
    if step:
        state = manager.restore(step, args=ocp.args.StandardRestore(state))
    while step < options.steps:
        state, loss = train(state, codes)
        step += 1
        print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
        manager.save(step, args=ocp.args.StandardSave(state))
    manager.close()
    policy.close()  # Swansong


if __name__ == "__main__":
    main()
