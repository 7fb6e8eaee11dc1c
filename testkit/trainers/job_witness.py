# SPDX-License-Identifier: Apache-2.0
"""One rank of a job over several VMs, started by torchrun, whose state is its position.

It prints each step that it has completed, with its rank and the *line* of this start of the job, which rank 0
draws.  The state is the same three facts, so a restored set shows whether it was trained, and by which start.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from pathlib import Path

import swansong
import torch
import torch.distributed as dist

POSITION = "position.json"


def emit(**facts: object) -> None:
    # In one write: the ranks of a VM share a pipe.
    print(json.dumps({"rank": dist.get_rank(), **facts}) + "\n", end="", flush=True)


class Training:
    def __init__(self, line: str, padding_bytes: int) -> None:
        self.line = line
        self.step = 0
        self.padding_bytes = padding_bytes

    def save(self, directory: Path) -> None:
        position = {"line": self.line, "rank": dist.get_rank(), "step": self.step}
        (directory / POSITION).write_text(json.dumps(position))
        (directory / "padding.bin").write_bytes(os.urandom(self.padding_bytes))

    def load(self, directory: Path) -> None:
        found = [json.loads(path.read_text()) for path in directory.rglob(POSITION)]
        (self.step,) = {position["step"] for position in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every-steps", type=int, default=None)
    parser.add_argument("--padding-bytes", type=int, default=0, help="size of the state of ...")
    parser.add_argument("--padding-rank", type=int, default=-1, help="... this rank")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    line = [secrets.token_hex(4)]
    dist.broadcast_object_list(line, src=0)
    training = Training(line[0], options.padding_bytes if rank == options.padding_rank else 0)
    guard = swansong.attach(save=training.save, load=training.load, every_steps=options.every_steps)
    first = guard.restore()
    emit(event="resumed", from_step=first, line=training.line)
    gradient = torch.ones(1)
    while True:
        time.sleep(0.03)
        dist.all_reduce(gradient)
        training.step += 1
        guard.step(training.step)
        emit(step=training.step, line=training.line)


if __name__ == "__main__":
    main()
