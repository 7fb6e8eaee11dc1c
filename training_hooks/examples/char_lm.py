# SPDX-License-Identifier: Apache-2.0
"""A small character-level language model that survives the loss of its VM.

    python char_lm.py --steps 2000 --every-steps 100 --out weights.npz

The same command line starts and resumes the run, on this VM or on another one.  Without Swansong's daemon
the script only trains.  An interrupted run ends with the same weights, bit by bit, as an uninterrupted one:
``state`` contains everything that determines the next step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import swansong

CONTEXT, EMBEDDING, HIDDEN, BATCH = 16, 16, 128, 64
DROPOUT = 0.1


class Model:
    """Predicts the next character from the last 16: an embedding, and one hidden layer with dropout."""

    def __init__(self, vocabulary: int, rng: np.random.Generator) -> None:
        def layer(*shape: int) -> Any:
            return rng.normal(0.0, shape[0] ** -0.5, shape).astype(np.float32)

        self.weights = {
            "embedding": layer(vocabulary, EMBEDDING),
            "hidden": layer(CONTEXT * EMBEDDING, HIDDEN),
            "hidden_bias": np.zeros(HIDDEN, np.float32),
            "output": layer(HIDDEN, vocabulary),
            "output_bias": np.zeros(vocabulary, np.float32),
        }

    def loss_and_gradients(
        self, text: np.ndarray, target: np.ndarray, rng: np.random.Generator
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Mean cross-entropy in nats, and its derivative by each weight."""
        w = self.weights
        embedded = w["embedding"][text].reshape(len(text), -1)
        active = np.tanh(embedded @ w["hidden"] + w["hidden_bias"])
        kept = (rng.random(active.shape) >= DROPOUT).astype(np.float32) / (1 - DROPOUT)
        dropped = active * kept
        logits = dropped @ w["output"] + w["output_bias"]
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        chance = odds / odds.sum(axis=1, keepdims=True)
        rows = np.arange(len(target))
        loss = float(-np.log(chance[rows, target]).mean())

        d_logits = chance
        d_logits[rows, target] -= 1.0
        d_logits /= len(target)
        d_hidden = (d_logits @ w["output"].T) * kept * (1.0 - active**2)
        d_embedding = np.zeros_like(w["embedding"])
        np.add.at(d_embedding, text, (d_hidden @ w["hidden"].T).reshape(*text.shape, -1))
        return loss, {
            "embedding": d_embedding,
            "hidden": embedded.T @ d_hidden,
            "hidden_bias": d_hidden.sum(axis=0),
            "output": dropped.T @ d_logits,
            "output_bias": d_logits.sum(axis=0),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.weights

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state


class Adam:
    """Adam with a warm-up of 50 steps and an inverse-square-root decay of the learning rate.

    ``trace`` is a running mean of gradients; ``--pad-mb`` sets its size, and so the size of checkpoints.
    """

    def __init__(self, weights: dict[str, np.ndarray], trace_bytes: int = 0) -> None:
        self.step = 0
        self.trace: np.ndarray = np.zeros(trace_bytes // 4, np.float32)
        self.moments = {
            name: [np.zeros_like(weight), np.zeros_like(weight)] for name, weight in weights.items()
        }

    def update(self, weights: dict[str, np.ndarray], gradients: dict[str, np.ndarray]) -> None:
        self.step += 1
        rate = 4e-3 * min(self.step / 50, (50 / self.step) ** 0.5)
        for name, gradient in gradients.items():
            first, second = self.moments[name]
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient**2 - second)
            scale = rate / (1 - 0.9**self.step)
            weights[name] -= scale * first / (np.sqrt(second / (1 - 0.999**self.step)) + 1e-8)
        if self.trace.size:
            self.trace *= 0.99
            self.trace += 0.01 * np.resize(gradients["hidden"], self.trace.shape)

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Loader:
    """Shuffled batches of windows of the text, with a new permutation for each epoch."""

    def __init__(self, text: np.ndarray, rng: np.random.Generator) -> None:
        self.text, self.rng = text, rng
        self.order = rng.permutation(len(text) - CONTEXT)
        self.position = 0

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        if self.position + BATCH > len(self.order):
            self.order, self.position = self.rng.permutation(len(self.order)), 0
        starts = self.order[self.position : self.position + BATCH]
        self.position += BATCH
        windows = self.text[starts[:, None] + np.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, -1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = state["order"], state["position"]


class Training:
    """Everything that an optimizer step reads and changes."""

    def __init__(self, seed: int, pad_mb: float = 0.0) -> None:
        text = Path(__file__).with_name("sonnets.txt").read_text(encoding="utf-8")
        characters = sorted(set(text))
        codes = np.array([characters.index(character) for character in text])
        self.rng = np.random.default_rng(seed)
        self.model = Model(len(characters), self.rng)
        self.optimizer = Adam(self.model.weights, int(pad_mb * 1e6))
        self.loader = Loader(codes, self.rng)

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint must contain so that the next step is the same."""
        return {name: vars(self)[name] for name in ("model", "optimizer", "loader", "rng")}

    def one_step(self) -> float:
        loss, gradients = self.model.loss_and_gradients(*self.loader.next_batch(), self.rng)
        self.optimizer.update(self.model.weights, gradients)
        return loss

    def finish(self, out: str) -> None:
        """Write the weights, and print their digest, which is equal for equal runs."""
        digest = hashlib.sha256()
        arrays: dict[str, Any] = {**self.model.weights, "trace": self.optimizer.trace}
        for name in sorted(arrays):
            digest.update(np.ascontiguousarray(arrays[name]).tobytes())
        if out:
            np.savez(out, **arrays)
        print(json.dumps({"weights_sha256": digest.hexdigest()}), flush=True)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1609)
    parser.add_argument("--every-steps", type=int, default=None, help="periodic checkpoints")
    parser.add_argument("--out", default="", help="file for the final weights (.npz)")
    parser.add_argument("--step-delay-s", type=float, default=0.0, help="pause after each step")
    parser.add_argument("--pad-mb", type=float, default=0.0, help="additional training state")
    parser.add_argument(
        "--log", default="", help="file to which the lines of progress are appended"
    )
    return parser


def report(log: str, step: int, loss: float) -> None:
    line = json.dumps({"step": step, "loss": loss})
    print(line, flush=True)
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def main() -> None:
    options = arguments("Learn the sonnets and survive the loss of the VM.").parse_args()
    training = Training(options.seed, options.pad_mb)
    guard = swansong.attach(state=training.state(), every_steps=options.every_steps)
    for step in range(guard.restore(), options.steps):
        loss = training.one_step()
        time.sleep(options.step_delay_s)
        report(options.log, step + 1, loss)
        guard.step(step + 1, loss=loss)
    guard.close()
    training.finish(options.out)


if __name__ == "__main__":
    main()
