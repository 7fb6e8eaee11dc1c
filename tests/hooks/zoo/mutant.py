# SPDX-License-Identifier: Apache-2.0
"""Runs a trainer whose resume lacks something: ``python mutant.py NAME SCRIPT``."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch
from swansong.torch import ResumableLoader
from torch.optim.lr_scheduler import LRScheduler


def nothing(*_: object) -> None:
    pass


def load_too_far(loader: ResumableLoader, state: dict[str, Any]) -> None:
    load(loader, {**state, "batches": state["batches"] + 1})


load = ResumableLoader.load_state_dict
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "generator": (torch, "set_rng_state", nothing),
    "loader": (ResumableLoader, "load_state_dict", load_too_far),
    "scheduler": (LRScheduler, "load_state_dict", nothing),
    "optimizer": (torch.optim.Optimizer, "load_state_dict", nothing),
}

if __name__ == "__main__":
    setattr(*MUTANTS[sys.argv[1]])
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
