# SPDX-License-Identifier: Apache-2.0
"""One rank of a job over several VMs, started by torchrun; prints JSON lines.

Every optimizer step adds one to each weight, so the step determines the restored weights.  With
``--die-in-save N --die-node K`` the ranks of that VM are killed half-way through their save at step N of a
fresh run; its restart does not die again.
With ``--bad-from N --bad-rank K`` the loss of that rank, and with it the mean loss, is NaN from step N on;
after the second such step all ranks roll back together.
With ``--stop-after-save`` the ranks end with code 75 after the checkpoint of a notice.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import swansong
import torch
import torch.distributed as dist
from swansong.torch import TrainingState
from torch.nn.parallel import DistributedDataParallel


def emit(**facts: object) -> None:
    # In one write: the ranks share a pipe.
    print(json.dumps({"rank": dist.get_rank(), **facts}) + "\n", end="", flush=True)


class DyingState(TrainingState):
    """Kills the process in the middle of a write."""

    step_to_die_in = -1

    def snapshot(self) -> Callable[[Path], None]:
        write = super().snapshot()

        def write_and_die(directory: Path) -> None:
            if 0 <= self.step_to_die_in <= self.values["step"]:
                (directory / "half").write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            write(directory)

        return write_and_die


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every-steps", type=int, default=None)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--die-in-save", type=int, default=-1)
    parser.add_argument("--die-node", type=int, default=-1)
    parser.add_argument("--bad-from", type=int, default=sys.maxsize)
    parser.add_argument("--bad-rank", type=int, default=-1)
    parser.add_argument("--stop-after-save", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = torch.nn.Linear(100, 10, bias=False)
    torch.nn.init.zeros_(model.weight)
    pause = threading.Event()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    state = DyingState(ddp, optimizer)
    guard = swansong.attach(
        state, every_steps=options.every_steps, stop_after_save=options.stop_after_save
    )
    first = guard.restore()
    if first == 0 and os.environ["GROUP_RANK"] == str(options.die_node):
        state.step_to_die_in = options.die_in_save
    weights = model.weight.detach().unique().tolist()
    emit(event="resumed", from_step=first, weights=weights, world=dist.get_world_size())
    assert weights == [float(first)], weights
    inputs = torch.ones(1, 100)
    is_bad_here = dist.get_rank() == options.bad_rank
    bad_from, step = options.bad_from, first
    while step < options.steps and not guard.should_stop:
        pause.wait(0.02)
        step += 1
        factor = math.nan if is_bad_here and step >= bad_from else 1.0
        optimizer.zero_grad()
        (-factor * ddp(inputs)).sum().backward()
        loss = torch.tensor([factor])
        dist.all_reduce(loss)
        optimizer.step()  # after all collectives: a rank that loses its peer there has not started this step
        state.values["step"] = step
        guard.step(step, loss=float(loss))
        emit(step=step)
        if not guard.healthy and step > bad_from:
            came_from, step, bad_from = step, guard.rollback(), sys.maxsize
            weights = model.weight.detach().unique().tolist()
            emit(event="rolled_back", from_step=came_from, to_step=step, weights=weights)
            assert weights == [float(step)], weights
    guard.close()
    dist.destroy_process_group()
    if guard.should_stop:
        sys.exit(swansong.EXIT_SAVED)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.exit(1)  # so that a rank that has lost a peer ends its save, and makes no last one
