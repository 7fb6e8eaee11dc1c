# SPDX-License-Identifier: Apache-2.0
"""The training that all contestants do: a state of a given size, steps of a fixed time, and a witness.

No two chunks of a state have the same bytes, and each step changes at least one element in every 4 MB of the
weights and of both moments, so no client can skip bytes.  These elements hold the number of the step, so a
restored state proves itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

_TENSOR_FLOATS = 2 * 2**20
_STRIDE = 2**20
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _tensor(number: int, size: int) -> torch.Tensor:
    """A tensor that shares no bytes with the tensor of another number, for the price of its memory."""
    first = number * _TENSOR_FLOATS
    made = torch.arange(first, first + size, dtype=torch.int32).view(torch.float32)
    made[::_STRIDE] = 0.0
    return made


class Model(torch.nn.Module):
    """Weights of a third of the state; the optimizer has the rest."""

    def __init__(self, size_bytes: int, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s
        floats = size_bytes // 4 // 3
        sizes = [min(_TENSOR_FLOATS, floats - at) for at in range(0, floats, _TENSOR_FLOATS)]
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(_tensor(number, size)) for number, size in enumerate(sizes)
        )
        self.pulse = torch.nn.Parameter(torch.ones(1))

    def forward(self, labels: Any = None) -> dict[str, torch.Tensor]:
        """The work of a step is a pause: no contestant competes with it for the processor."""
        del labels
        time.sleep(self._step_s)
        return {"loss": (self.pulse**2).sum()}


class Optimizer(torch.optim.Optimizer):
    """Adds 1 to the marked elements of the weights and of two moments."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.parameters(), {"lr": 1e-3})
        numbers = itertools.count(len(model.layers))
        for tensor in model.layers:
            self.state[tensor].update(
                {name: _tensor(next(numbers), tensor.numel()) for name in _MOMENTS}
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for tensor in self.param_groups[0]["params"]:
            if tensor in self.state:
                tensor[::_STRIDE] += 1
                for name in _MOMENTS:
                    self.state[tensor][name][::_STRIDE] += 1
        return loss


def step_of(model: Model, optimizer: Any) -> int:
    """The number of steps that this state has seen; -1 if its tensors do not agree."""
    seen: set[float] = set()
    for tensor in model.layers:
        for part in (tensor, *(optimizer.state[tensor][name] for name in _MOMENTS)):
            seen.update(part.detach()[::_STRIDE].tolist())
    return int(seen.pop()) if len(seen) == 1 else -1


class Witness:
    """Writes each step with its instant to a file outside of the VM.

    Its creation marks the end of the imports.  Create the optimizer before: torch imports hundreds of modules
    with the first one.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._write(imported=True)

    def step(self, step: int) -> None:
        self._write(step=step)

    def restored(self, step: int, found: int) -> None:
        """Note the step that the contestant says it resumes, and the one that the tensors hold."""
        self._write(restored=step, is_intact=step == found)

    def _write(self, **facts: Any) -> None:
        line = json.dumps({**facts, "mono_s": time.monotonic()}) + "\n"
        os.write(self._file, line.encode())


class Timer:
    """When the periodic saves of a script are due."""

    def __init__(self, first_s: float, every_s: float) -> None:
        self._due_mono_s = time.monotonic() + first_s
        self._every_s = every_s

    def is_due(self) -> bool:
        if time.monotonic() < self._due_mono_s:
            return False
        self._due_mono_s += self._every_s
        return True


def options() -> argparse.Namespace:
    """The command line of all trainers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True, help="pause that stands for a step")
    parser.add_argument("--witness", required=True, help="file for the steps")
    parser.add_argument("--out", help="directory for checkpoints")
    parser.add_argument("--first-save-s", type=float, default=60.0)
    parser.add_argument("--save-every-s", type=float, default=300.0)
    return parser.parse_args()


def checkpoints(directory: str, prefix: str) -> Iterator[tuple[int, str]]:
    """Checkpoints named ``<prefix><step>...`` in this directory, the newest first."""
    found = []
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        digits = name.removeprefix(prefix).partition(".")[0]
        if name.startswith(prefix) and digits.isdecimal():
            found.append((int(digits), os.path.join(directory, name)))
    yield from sorted(found, reverse=True)
