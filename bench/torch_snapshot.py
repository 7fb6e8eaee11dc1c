# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of a checkpoint for the training loop, and the time to staging: ``make bench-torch``.

- The time of ``guard.step()`` without a request, and of an empty call with the same arguments.
- The time that training stops for a copy of the state, and the time until all files are written: Swansong,
  ``torch.save`` and ``torch.distributed.checkpoint.async_save`` in a thread and in a process, in random order
  within each repetition; and a copy of the tensors into memory that is in use already, the least that a
  consistent save can take.
  The first round is reported separately, because its memory is new.  The loop continues during the write;
  its speed is a share of the speed just before the save.
- The time from the daemon's request to ``Sealed``, with the same state on 1, 2 and 4 ranks.  The ranks meet
  in an all-reduce of gloo at every step.  A fake daemon has the other end of the socket.

The loop is one thread of small matrix products.  The benchmark needs memory for five times the state.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import swansong
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from swansong.protocol import Failed, Hello, Message, Progress, Sealed
from swansong.torch import TrainingState
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench.transfer import measure
from bench.transfer.results import median_and_spread, write_page
from testkit.fake_daemon import FakeDaemon
from testkit.waiting import until

NAME = "make bench-torch"
OURS, SAVE, COPY = "swansong", "torch.save", "a copy of the tensors"
ASYNC = {
    "dcp.async_save": AsyncCheckpointerType.THREAD,
    "dcp.async_save, process": AsyncCheckpointerType.PROCESS,
}
BEFORE_S = 0.5
"""Time that the loop runs before a save, to measure its undisturbed speed."""
LIMIT_S = 120.0
CALLS, REPEATS = 200_000, 15

Save = Callable[[Path], Callable[[], object]]
"""Starts a save into a directory and returns a function that blocks until the files are written."""


@dataclass
class Cost:
    """Measurements of the saves of one contestant."""

    blocked_s: list[float] = field(default_factory=list)
    written_s: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    """Speed of the loop during the write, as a share of its speed before the save."""
    first_blocked_s: float = 0.0


def trained(size_bytes: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer; weights and Adam moments together have about this size."""
    layers = 16
    width = max(1, round((size_bytes / (layers * 4 * 3)) ** 0.5))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, width, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Loop:
    """Small matrix products; a step takes about a millisecond."""

    def __init__(self) -> None:
        self._matrix = torch.eye(256)

    def step(self) -> None:
        for _ in range(4):
            self._matrix = self._matrix @ self._matrix

    def steps_a_s(self, is_over: Callable[[], bool]) -> float:
        begun, steps = time.perf_counter(), 0
        while not is_over():
            self.step()
            steps += 1
        return steps / (time.perf_counter() - begun)

    def alone(self) -> float:
        end = time.perf_counter() + BEFORE_S
        return self.steps_a_s(lambda: time.perf_counter() > end)


def saved(save: Save, directory: Path, device: str, loop: Loop) -> tuple[float, float, float]:
    """Seconds blocked, seconds until written, and the loop's speed during the write."""
    directory.mkdir()
    gc.collect()
    alone = loop.alone()
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    wait = save(directory)
    blocked_s = time.perf_counter() - begun
    ends: list[float] = []

    def waits() -> None:
        wait()
        ends.append(time.perf_counter())

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    beside = loop.steps_a_s(lambda: bool(ends))
    thread.join()
    shutil.rmtree(directory)
    return blocked_s, ends[0] - begun, beside / alone


def contestants(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Save]:
    state = TrainingState(model, optimizer)
    state.prepare_copy()  # in the background, as after the first step of a run

    def ours(directory: Path) -> Callable[[], object]:
        write = state.snapshot()
        return lambda: write(directory)

    def whole() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def torch_save(directory: Path) -> Callable[[], object]:
        torch.save(whole(), directory / "state.pt")
        return lambda: None

    def async_save(kind: AsyncCheckpointerType, directory: Path) -> Callable[[], object]:
        future = dcp.async_save(
            whole(),
            checkpoint_id=str(directory),
            no_dist=kind is AsyncCheckpointerType.THREAD,
            async_checkpointer_type=kind,
        )
        return future.result  # type: ignore[union-attr]

    moments = (each for state in optimizer.state.values() for each in state.values())
    tensors = [each.detach() for each in (*model.parameters(), *moments)]
    copies = [torch.ones_like(each, device="cpu") for each in tensors]

    def copy(_directory: Path) -> Callable[[], object]:
        for target, tensor in zip(copies, tensors, strict=True):
            target.copy_(tensor)
        return lambda: None

    saves = {name: functools.partial(async_save, kind) for name, kind in ASYNC.items()}
    return {OURS: ours, SAVE: torch_save, COPY: copy, **saves}


def one_process(root: Path, size_bytes: int, repeats: int, is_quick: bool) -> dict[str, Cost]:
    """Measure the saves of all contestants."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    saves = contestants(*trained(size_bytes, device))
    loop = Loop()
    costs = {name: Cost() for name in saves}
    # async_save needs a process group even for one process.
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/store-{size_bytes}", rank=0, world_size=1
    )
    for repetition in range(repeats + 2):
        for name in random.sample(list(saves), len(saves)):
            if not is_quick:
                measure.wait_for_quiet(limit_s=10)
            blocked_s, written_s, speed = saved(saves[name], root / "set", device, loop)
            cost = costs[name]
            if repetition == 0:
                cost.first_blocked_s = blocked_s
            if repetition > 1:  # both copies of TrainingState have their memory by then
                cost.blocked_s.append(blocked_s)
                cost.written_s.append(written_s)
                cost.speed.append(speed)
            print(f"{name}: {blocked_s:.3f} s, {written_s:.3f} s, {speed:.0%}", file=sys.stderr)
    dist.destroy_process_group()
    return costs


# ---------------------------------------------------------------- ranks


class Clock(FakeDaemon):
    """Records when each request was done."""

    def __init__(self, directory: Path) -> None:
        self.done_mono_s: dict[str, float] = {}
        super().__init__(directory)

    def _answers(self, connection: object, message: Message) -> list[Message]:
        if isinstance(message, Sealed | Failed):
            self.done_mono_s[message.request_id] = time.monotonic()
        return super()._answers(connection, message)  # type: ignore[arg-type]


def as_rank(size_bytes: int, store: str) -> None:
    """Train as one rank until the process is killed."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    state = TrainingState(*trained(size_bytes // ranks, "cpu"))
    guard = swansong.attach(state)
    state.snapshot()
    state.snapshot()  # allocates the second copy, as the second checkpoint of a run does
    loop, together = Loop(), torch.ones(1)
    dist.barrier()
    step = guard.restore()
    while True:
        for _ in range(10):
            loop.step()
        dist.all_reduce(together)
        step += 1
        guard.step(step)


@contextmanager
def training(daemon: FakeDaemon, root: Path, ranks: int, size_bytes: int) -> Iterator[None]:
    command = [sys.executable, "-m", "bench.torch_snapshot", "--as-rank", str(size_bytes)]
    processes = []
    with open(root / f"stderr-{ranks}", "w+") as stderr:
        try:
            for rank in range(ranks):
                environment = {
                    **os.environ,
                    "SWANSONG_SOCKET": daemon.path,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                }
                processes.append(
                    subprocess.Popen(
                        [*command, "--store", f"{root}/store-{ranks}"],
                        env=environment,
                        stderr=stderr,
                    )
                )
            until(
                lambda: len(daemon.all_of(Hello)) >= ranks, timeout_s=LIMIT_S, what=f"{ranks} ranks"
            )
            until(lambda: daemon.all_of(Progress), timeout_s=LIMIT_S, what="training")
            yield
        except BaseException:
            stderr.seek(0)
            print(stderr.read()[-2000:], file=sys.stderr)
            raise
        finally:
            for process in processes:
                process.kill()
                process.wait()


def request_to_sealed(root: Path, ranks: int, size_bytes: int, repeats: int) -> list[float]:
    """Seconds from each request until the set is sealed."""
    directory = root / f"ranks-{ranks}"
    directory.mkdir()
    seconds = []
    with Clock(directory) as daemon, training(daemon, root, ranks, size_bytes):
        for number in range(repeats + 1):
            name = f"request-{number}"
            begun = time.monotonic()
            daemon.request(name)
            until(lambda: name in daemon.done_mono_s, timeout_s=LIMIT_S, what=name)  # noqa: B023
            failed = daemon.all_of(Failed)
            if failed:
                raise SystemExit(f"{ranks} ranks: {failed[0].reason}")
            if number:  # the first one is a warm-up
                seconds.append(daemon.done_mono_s[name] - begun)
            print(f"{ranks} ranks: {daemon.done_mono_s[name] - begun:.3f} s", file=sys.stderr)
            for sealed in daemon.sealed():
                shutil.rmtree(sealed)
    shutil.rmtree(directory)
    return seconds


# ---------------------------------------------------------------- the table


def table(
    costs: dict[int, dict[str, Cost]], ranks: dict[int, list[float]], step: dict[str, float]
) -> str:
    lines: list[str] = []
    for size_bytes, each in costs.items():
        lines += [*of_size(size_bytes, each), ""]
    on_ranks = ", ".join(
        f"{median_and_spread(seconds, '.2f').replace(' ', ' s ')} on {count} rank{'s' * (count > 1)}"
        for count, seconds in ranks.items()
    )
    device = "GPU" if torch.cuda.is_available() else "CPU"
    facts = (
        f"`guard.step()` without a request: {step['guard_ns']:.0f} ns per call, without a daemon"
        f" {step['alone_ns']:.0f} ns; an empty method call: {step['empty_ns']:.0f} ns."
        f" torch {torch.__version__}, {device}, {os.cpu_count()} cores, files on tmpfs."
    )
    return "\n".join([*lines, f"From the request to a sealed set of 1 GB: {on_ranks}.", facts])


def of_size(size_bytes: int, costs: dict[str, Cost]) -> list[str]:
    head = (
        f"{size_bytes / 1e9:g} GB of state, one process",
        "training stopped, s",
        "first save, s",
        "written after, s",
        "loop during the write",
    )
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name, cost in sorted(costs.items(), key=lambda each: statistics.median(each[1].blocked_s)):
        lines.append(
            f"| {'**swansong**' if name == OURS else name} | {median_and_spread(cost.blocked_s, '.3f')}"
            f" | {cost.first_blocked_s:.3f} | {median_and_spread(cost.written_s, '.2f')}"
            f" | {'-' if name in (SAVE, COPY) else median_and_spread(cost.speed, '.0%')} |"
        )
    return lines


class Nothing:
    def step(self, step: int, loss: object = None, **metrics: object) -> None:
        """The cheapest possible call with these arguments."""


def median_ns(call: Callable[[int], None]) -> float:
    def loop() -> None:
        for step in range(CALLS):
            call(step)

    return round(statistics.median(timeit.repeat(loop, number=1, repeat=REPEATS)) / CALLS * 1e9, 1)


def step_cost(root: Path) -> dict[str, float]:
    nothing = Nothing()
    costs = {"empty_ns": median_ns(lambda step: nothing.step(step, loss=1.0))}

    with FakeDaemon(root) as daemon:
        for name, socket in (("alone_ns", "/nonexistent"), ("guard_ns", daemon.path)):
            with swansong.attach(TrainingState(*trained(10**6, "cpu")), socket=socket) as guard:
                guard.restore()
                costs[name] = median_ns(lambda step: guard.step(step, loss=1.0))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0], help="sizes")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--quick", action="store_true", help="20 MB, once: a test of the benchmark itself"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("/dev/shm"), help="directory for the files"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the tables into docs/performance.md"
    )
    parser.add_argument("--as-rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.as_rank:
        as_rank(options.as_rank, options.store)
    sizes = [20_000_000] if options.quick else [int(gb * 1e9) for gb in options.gb]
    repeats = 1 if options.quick else options.repeats
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=options.data) as place:
        root = Path(place)
        step = step_cost(root)
        of_ranks = sizes[0] if options.quick else 10**9
        ranks = {n: request_to_sealed(root, n, of_ranks, repeats) for n in (1, 2, 4)}
        costs = {size: one_process(root, size, repeats, options.quick) for size in sizes}
    text = table(costs, ranks, step)
    print(json.dumps(step), file=sys.stderr)
    print(text)
    if options.write:
        write_page(NAME, text)


if __name__ == "__main__":
    main()
