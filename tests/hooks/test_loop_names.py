# SPDX-License-Identifier: Apache-2.0
"""Names that only the loop over a loader assigns, and the script reads after it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import swansong
import torch
from swansong._torch.loop_names import names_of_loop
from swansong.torch import ResumableLoader, TrainingState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from testkit.training_parts import Attach


class Batches:
    """Looks at the loop over it when its batches end, as a loader does."""

    def __init__(self) -> None:
        self.found: list[str] | None = None

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        self.found = names_of_loop(sys._getframe(1))


LOOPS = {
    "loss": ("for x in batches: loss = x\nprint(loss)", ["loss"]),
    "loop variable": ("for n, x in enumerate(batches): pass\nprint(x / (n + 1))", ["x", "n"]),
    "tqdm": ("for x in tqdm(batches, disable=True): loss = x\nprint(loss)", ["loss"]),
    "nested": (
        "for epoch in range(2):\n  for x in batches:\n    loss = x\n  print(loss)\n  last = loss",
        ["loss"],
    ),
    "in a branch": ("for x in batches:\n  if x: loss = x\nif batches:\n  print(loss)", ["loss"]),
    "before": ("loss = 0\nfor x in batches: loss = x\nprint(loss)", []),
    "after": ("for x in batches: loss = x\nloss = 1\nprint(loss)", []),
    "argument": ("for x in batches: argument = x\nprint(argument)", []),
    "any arguments": ("for x in batches: args, kwargs = x, x\nprint(args, kwargs)", []),
    "in the loop": ("for x in batches:\n  loss = x\n  print(loss)", []),
    "another loop": ("for x in batches: y = x\nfor x in range(3): y = x\nprint(y, x)", []),
    "comprehension": ("for x in batches: pass\nprint([x for x in range(3)])", []),
    "closure": ("for x in batches: loss = x\ndef show(): return loss\nprint(loss)", ["loss"]),
    "iterator": ("it = iter(batches)\nwhile next(it, None) is not None: loss = 1\nprint(loss)", []),
    "list": ("found = list(batches)\nprint(found)", []),
}


@pytest.mark.parametrize("is_function", [True, False], ids=["function", "module"])
@pytest.mark.parametrize(("script", "names"), LOOPS.values(), ids=LOOPS)
def test_a_name_of_the_loop_alone_is_found(
    script: str, names: list[str], *, is_function: bool
) -> None:
    """In a function and in a module; what else is assigned on the way to its use is not found."""
    if is_function:
        body = textwrap.indent(script, "    ")
        script = f"def run(argument, *args, **kwargs):\n{body}\nrun(1)"
    elif "argument" in script or "args" in script:
        script = f"argument = args = kwargs = 0\n{script}"
    batches = Batches()
    exec(compile(script, "/script.py", "exec"), {"batches": batches, "tqdm": tqdm})
    assert batches.found == names


def epochs(guard: swansong.Guard, loader: Any, *, reports: bool) -> None:
    for _ in range(2):
        for (batch,) in loader:
            loss = batch.sum()
            if reports:
                guard.step()
        assert loss


@pytest.mark.parametrize("reports", [True, False])
def test_one_warning_comes_at_the_end_of_the_first_epoch(
    attach: Attach,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    reports: bool,
) -> None:
    """For the training, not for an evaluation, which a resume repeats with all of its batches."""
    monkeypatch.setattr(ResumableLoader, "_warned_of_names", False)
    loader = ResumableLoader(DataLoader(TensorDataset(torch.ones(4, 1))))
    guard = attach(TrainingState(nn.Linear(1, 1), loader=loader))
    guard.restore()
    epochs(guard, loader, reports=reports)
    found = [each for each in caplog.messages if "the script reads loss after the loop" in each]
    assert len(found) == reports
