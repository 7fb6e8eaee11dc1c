# SPDX-License-Identifier: Apache-2.0
"""The trainer of :mod:`bench.load_early`: saves a state once, or restores it and reports time and memory."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import swansong
import torch
from swansong._torch import arena
from swansong.protocol import Restored
from swansong.torch import TrainingState
from torch import nn

FILE_TENSORS = 8
"""Weights or moments in one file."""


class LoadsAtEnd(TrainingState):
    """Loads all tensors from the finished directory."""

    def arrivals(self) -> None:  # type: ignore[override]
        return None


def memory_bytes(name: str) -> int:
    """A figure of this process, such as ``VmRSS`` or its peak ``VmHWM``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def total(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Sum of all weights and moments."""
    moments = [each for state in optimizer.state.values() for each in state.values()]
    return float(sum(each.detach().double().sum() for each in [*model.parameters(), *moments]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=["save", "early", "late"], required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight_bytes = 4 * options.width**2
    arena.FILE_BYTES = FILE_TENSORS * weight_bytes + weight_bytes // 2
    small = nn.Linear(1, 1)
    small(torch.ones(1)).backward()
    torch.optim.Adam(small.parameters(), foreach=False).step()  # imports further modules
    before_bytes = memory_bytes("VmRSS")
    layers = [nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    kind = LoadsAtEnd if options.way == "late" else TrainingState
    with swansong.attach(kind(model, optimizer), every_s=1e9) as guard:
        if options.way == "save":
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            guard.restore()
            guard.step(1)
            assert guard.save(1)
            assert guard.wait_saved(300)
            found = {"event": "saved"}
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
            begun_mono_s, begun_cpu_s = time.monotonic(), time.process_time()
            answered: list[tuple[float, float]] = []
            client = guard._session.restore  # noqa: SLF001 - it has no public name
            find = client.find_newest

            def timed(*arguments: Any) -> Restored:
                found = find(*arguments)
                answered.append((time.monotonic(), time.process_time()))
                return found

            client.find_newest = timed  # type: ignore[method-assign]
            step = guard.restore()
            ended_mono_s, ended_cpu_s = time.monotonic(), time.process_time()
            found = {
                "event": "restored",
                "step": step,
                "seconds": ended_mono_s - begun_mono_s,
                "after_s": ended_mono_s - answered[0][0],
                "cpu_s": ended_cpu_s - begun_cpu_s,
                "after_cpu_s": ended_cpu_s - answered[0][1],
                "peak_bytes": memory_bytes("VmHWM") - before_bytes,
            }
        print(json.dumps({**found, "total": total(model, optimizer)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
