# SPDX-License-Identifier: Apache-2.0
"""Measures checkpoints of a state on a GPU: ``make bench-gpu`` (7 minutes on a quiet machine with one GPU).

- The time that a save stops the training loop, for a first save and for a later one, next to ``torch.save``,
  three settings of ``torch.distributed.checkpoint.async_save``, and one bare copy of the same bytes into
  pinned memory.  All contestants run in random order within each repetition.
- The time until the files are written, and the speed of the loop meanwhile.
- A restore into the memory of the GPU.
- The cost of ``guard.step()``, and the host memory of a copy.

The model is a chain of square layers with Adam moments.  The files are on tmpfs, which needs memory for three
times the largest state.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import platform
import random
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
import timeit
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import swansong
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from swansong.torch import TrainingState
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench.torch_snapshot import Nothing, trained
from bench.transfer.results import median_and_spread, write_page
from testkit.gpu import is_pinned, prepare

NAME = "make bench-gpu"
OURS, UNPREPARED, BARE = "**swansong**", "swansong, memory not prepared", "bare copy"
SAVE, THREAD, PROCESS = "torch.save", "DCP async, thread", "DCP async, process"
PINNED = "DCP async, pinned memory"
SIZES_GB = {0.2: 7, 1.0: 5, 4.0: 3, 16.0: 1}
"""Repetitions by size of the state."""
SLOW_MAX_GB = 4.0
"""The largest state for the contestants that take minutes for more."""
BLOCK_BYTES = 2**29
LIMIT_S = 120.0

Times = dict[str, list[float]]


@dataclass
class Measured:
    """All times of one size, in seconds, by contestant."""

    size_bytes: int
    first: Times = field(default_factory=dict)
    later: Times = field(default_factory=dict)
    written: Times = field(default_factory=dict)
    restored: Times = field(default_factory=dict)
    speed: Times = field(default_factory=dict)
    """Speed of the loop, as a share of its speed alone."""
    memory_bytes: dict[str, int] = field(default_factory=dict)


class Loop:
    """Small matrix products on the GPU, with a synchronization in each step."""

    def __init__(self) -> None:
        self._matrix = torch.eye(1024, device="cuda")

    def steps_a_s(self, is_over: Callable[[], bool]) -> float:
        begun, steps = time.perf_counter(), 0
        while not is_over():
            if time.perf_counter() - begun > LIMIT_S:
                raise TimeoutError("the save has not ended")
            self._matrix = self._matrix @ self._matrix
            torch.cuda.synchronize()
            steps += 1
        return steps / (time.perf_counter() - begun)

    def alone(self) -> float:
        end = time.perf_counter() + 0.3
        return self.steps_a_s(lambda: time.perf_counter() > end)


def seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """The time of an action of which no kernel is left, and its result."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    result = action()
    torch.cuda.synchronize()
    return time.perf_counter() - begun, result


def add(times: Times, name: str, value: float) -> None:
    times.setdefault(name, []).append(value)


def empty(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


class Saves:
    """The saves of one state; each method measures one contestant once."""

    def __init__(self, size_gb: float, root: Path) -> None:
        self.model, self.optimizer = trained(int(size_gb * 1e9), "cuda")
        self.size_bytes = sum(each.nbytes for each in self.model.parameters()) * 3
        self.root = root
        self.found = Measured(self.size_bytes)
        self._loop = Loop()

    def whole(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def bare(self) -> None:
        source = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)

        def copy() -> None:
            for begin in range(0, self.size_bytes, BLOCK_BYTES):
                part = slice(0, min(BLOCK_BYTES, self.size_bytes - begin))
                target[part].copy_(source[part], non_blocking=True)

        add(self.found.first, BARE, seconds(copy)[0])
        add(self.found.later, BARE, seconds(copy)[0])

    def ours(self, *, is_prepared: bool = True) -> None:
        name = OURS if is_prepared else UNPREPARED
        state = TrainingState(self.model, self.optimizer)
        if is_prepared:
            alone = self._loop.alone()
            memory = prepare(state)
            busy = self._loop.steps_a_s(lambda: is_pinned(memory))
            add(self.found.speed, "preparation", busy / alone)
            self.found.memory_bytes[name] = sum(each.nbytes for each in memory)
        blocked_s, write = seconds(state.snapshot)
        add(self.found.first, name, blocked_s)
        if not is_prepared:
            return
        own = empty(self.root / "ours" / "rank-00000")
        write(own)
        del write
        shutil.rmtree(own)
        alone = self._loop.alone()
        blocked_s, write = seconds(state.snapshot)
        add(self.found.later, name, blocked_s)
        ends: list[float] = []

        def writes() -> None:
            write(empty(own))
            ends.append(time.perf_counter())

        thread, begun = threading.Thread(target=writes, daemon=True), time.perf_counter()
        thread.start()
        speed = self._loop.steps_a_s(lambda: bool(ends) or not thread.is_alive())
        add(self.found.written, name, blocked_s + ends[0] - begun)
        add(self.found.speed, "write", speed / alone)

    def torch_save(self) -> None:
        blocked_s, _ = seconds(lambda: torch.save(self.whole(), self.root / "state.pt"))
        add(self.found.first, SAVE, blocked_s)
        add(self.found.later, SAVE, blocked_s)
        add(self.found.written, SAVE, blocked_s)

    def dcp_thread(self) -> None:
        """Each save is like the first one, because DCP keeps no memory."""
        self._dcp(THREAD, AsyncCheckpointerType.THREAD)

    def dcp_process(self) -> None:
        """The process was started by an earlier save."""
        self._dcp(PROCESS, AsyncCheckpointerType.PROCESS)

    def dcp_pinned(self) -> None:
        """A first save only: the stager of torch 2.11 fails at its second use."""
        options = StagingOptions(
            use_pinned_memory=True,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=True,
        )
        stager = DefaultStager(options)
        blocked_s, _ = seconds(lambda: stager.stage(self.whole()))
        add(self.found.first, PINNED, blocked_s)
        stager.close()

    def _dcp(self, name: str, kind: AsyncCheckpointerType) -> None:
        place = empty(self.root / "dcp")
        begun = time.perf_counter()
        blocked_s, future = seconds(
            lambda: dcp.async_save(
                self.whole(), checkpoint_id=str(place), async_checkpointer_type=kind
            )
        )
        future.result()
        add(self.found.written, name, time.perf_counter() - begun)
        add(self.found.first, name, blocked_s)
        add(self.found.later, name, blocked_s)

    def restore(self, repeats: int) -> None:
        """Restore into this model and optimizer, from the files that the saves have left."""
        state = TrainingState(self.model, self.optimizer)
        whole = self.whole()

        def load(**options: Any) -> None:
            loaded = torch.load(self.root / "state.pt", map_location="cuda", **options)
            self.model.load_state_dict(loaded["model"])
            self.optimizer.load_state_dict(loaded["optimizer"])

        def load_dcp() -> None:
            dcp.load(whole, checkpoint_id=str(self.root / "dcp"))
            self.model.load_state_dict(whole["model"])
            self.optimizer.load_state_dict(whole["optimizer"])

        actions: dict[str, Callable[[], object]] = {OURS: lambda: state.load(self.root / "ours")}
        if (self.root / "state.pt").exists():
            actions |= {"torch.load": load, "torch.load, mmap": lambda: load(mmap=True)}
        if (self.root / "dcp").exists():
            actions["dcp.load"] = load_dcp
        for _ in range(repeats):
            for name in random.sample(list(actions), len(actions)):
                add(self.found.restored, name, seconds(actions[name])[0])


def measure(size_gb: float, repeats: int, root: Path) -> Measured:
    """Measure all contestants with one size."""
    saves = Saves(size_gb, empty(root))
    actions = [saves.bare, saves.ours, lambda: saves.ours(is_prepared=False)]
    if size_gb <= SLOW_MAX_GB:
        actions += [saves.torch_save, saves.dcp_thread, saves.dcp_process, saves.dcp_pinned]
    for _ in range(repeats):
        for action in random.sample(actions, len(actions)):
            gc.collect()
            begun, problem = time.perf_counter(), ""
            try:
                action()
            except Exception:
                problem = f": {traceback.format_exc()[-1500:]}"
            what = getattr(action, "__name__", "unprepared")
            took_s = time.perf_counter() - begun
            print(f"{size_gb} GB, {what}: {took_s:.1f} s{problem}", file=sys.stderr)
    saves.restore(repeats)
    return saves.found


def step_ns() -> dict[str, float]:
    """Nanoseconds of a call of ``guard.step()`` without a checkpoint, and of an empty method."""
    model, optimizer = trained(10**6, "cuda")
    guard = swansong.attach(TrainingState(model, optimizer), socket="/nonexistent")
    guard.restore()
    loss, calls, found = torch.ones((), device="cuda"), 20_000, {}
    for name, call in {"empty": Nothing().step, "guard": guard.step}.items():

        def loop(call: Callable[..., object] = call) -> None:
            for step in range(calls):
                call(step, loss=loss)

        loop()
        found[name] = statistics.median(timeit.repeat(loop, number=1, repeat=7)) / calls * 1e9
    guard.close()
    return found


# ---------------------------------------------------------------- the page


def of(values: list[float], form: str) -> str:
    return median_and_spread(values, form) if values else "-"


def tables(results: dict[float, Measured], facts: str, step: dict[str, float]) -> str:
    """The content of the page."""
    head = " | ".join(f"{size:g} GB" for size in results)
    rule = f"|{' --- |' * (len(results) + 1)}"
    lines = [facts, "", f"| training stopped, ms | {head} |", rule]
    rows = [
        ("later save", "later", (BARE, OURS, THREAD, PROCESS, SAVE)),
        ("first save", "first", (BARE, OURS, UNPREPARED, PINNED)),
    ]
    for title, attribute, names in rows:
        for name in names:
            cells = []
            for found in results.values():
                times: Times = getattr(found, attribute)
                text = of([1000 * each for each in times.get(name, [])], ".1f")
                if name == OURS:
                    bare_s = statistics.median(times[BARE])
                    text += f"; x {statistics.median(times[name]) / bare_s:.2f}"
                cells.append(text)
            lines.append(f"| {title}: {name} | {' | '.join(cells)} |")
    lines += ["", f"| files written after, s | {head} |", rule]
    for name in (OURS, THREAD, PROCESS, SAVE):
        cells = [of(each.written.get(name, []), ".2f") for each in results.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"| restore, GB/s | {head} |", rule]
    for name in (OURS, "torch.load, mmap", "torch.load", "dcp.load"):
        cells = [
            of([each.size_bytes / 1e9 / s for s in each.restored.get(name, [])], ".1f")
            for each in results.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    repeats = ", ".join(f"{len(each.later[BARE])} of {size:g} GB" for size, each in results.items())
    found = results[max(results)]
    lines += [
        "",
        f"- **Pinned memory**: {found.memory_bytes[OURS] / found.size_bytes:.2f} of the size of the state.",
        "- **Speed of the loop** while the memory is prepared: {}; while files are written: {}.".format(
            of(found.speed["preparation"], ".0%"), of(found.speed["write"], ".0%")
        ),
        "- **`guard.step()`** without a checkpoint: {:.0f} ns; an empty method: {:.0f} ns.".format(
            step["guard"], step["empty"]
        ),
        f"- **Repetitions**: {repeats}.",
    ]
    return "\n".join(lines)


def machine() -> str:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    gpu = torch.cuda.get_device_properties(0)
    today = dt.datetime.now(tz=dt.UTC).date()
    cores = len(re.findall(r"^processor", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    return (
        f"{gpu.name}, {cores} cores of {cpu[1] if cpu else platform.machine()}, Linux {platform.release()},"
        f" Python {platform.python_version()}, torch {torch.__version__}, {today}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("--quick", action="store_true", help="200 MB and 1 GB, once")
    parser.add_argument("--sizes", type=float, nargs="+", default=list(SIZES_GB), metavar="GB")
    parser.add_argument("--json", type=Path, help="results of other sizes to add, and of this run")
    parser.add_argument("--data", type=Path, default=Path("/dev/shm"), help="directory for files")
    parser.add_argument("--write", action="store_true", help="write docs/performance/gpu.md")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"{NAME} needs an NVIDIA GPU and a torch with CUDA")
    warnings.simplefilter("ignore")
    sizes = {0.2: 1, 1.0: 1} if options.quick else {each: SIZES_GB[each] for each in options.sizes}
    step, results = step_ns(), dict[float, Measured]()
    if options.json and options.json.exists():
        for size, found in json.loads(options.json.read_text())["sizes"].items():
            results[float(size)] = Measured(**found)
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=options.data) as place:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{place}/store", rank=0, world_size=1
        )
        measure(0.02, 1, Path(place, "warm-up"))
        for size_gb, repeats in sizes.items():
            results[size_gb] = measure(size_gb, repeats, Path(place, "sets"))
            shutil.rmtree(Path(place, "sets"))
            gc.collect()
            torch.cuda.empty_cache()
            if options.json:
                kept = {str(size): asdict(found) for size, found in sorted(results.items())}
                whole = {"facts": machine(), "step": step, "sizes": kept}
                options.json.write_text(json.dumps(whole))
        dist.destroy_process_group()
    text = tables(dict(sorted(results.items())), machine(), step)
    print(text)
    if options.write:
        write_page(NAME, text)


if __name__ == "__main__":
    main()
