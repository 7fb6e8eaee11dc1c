# SPDX-License-Identifier: Apache-2.0
"""Measures what one preemption costs, with Swansong and with other means: ``make bench-preemption``.

docs/performance/preemption.md describes the method.  In each repetition the contestants run in random order.
Each run has its own store and its own two emulated VMs.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from bench.preemption import agent, results, store
from bench.preemption.contestants import BUILD, CONTESTANTS, Contestant, mount_refusal
from bench.preemption.life import STEP_S, Failed, Plan, end_all, live
from bench.preemption.results import Result
from bench.transfer.__main__ import add_options, machine, parse
from bench.transfer.contestants import BENCH, interpreter
from bench.transfer.results import PAGES, ResultsFile, write_page

NOTICE_S = 120.0
PAUSE_S = 10.0
SAVE_EVERY_S = 300.0
PHASES = (1 / 2, 1 / 6, 5 / 6)
"""Age of the newest periodic save at the power cut, as a share of the interval, by repetition."""
SIZES = {"32MB": 32_000_000, "1GB": 1_000_000_000, "4GB": 4_000_000_000}
QUICK = {"size_bytes": 1_000_000, "notice_s": 15.0, "pause_s": 0.5, "warm_up_s": 1.0}


def plan_of(size: str, repeat: int, *, is_quick: bool) -> Plan:
    age_s = PHASES[repeat % len(PHASES)] * SAVE_EVERY_S
    if is_quick:
        return Plan(save_every_s=SAVE_EVERY_S, saved_before_cut_s=1.0, **QUICK)
    return Plan(
        size_bytes=SIZES[size],
        notice_s=NOTICE_S,
        pause_s=PAUSE_S,
        save_every_s=SAVE_EVERY_S,
        saved_before_cut_s=age_s,
    )


def run(contestant: Contestant, size: str, repeat: int, options: argparse.Namespace) -> Result:
    """One preemption, as a line of the results file."""
    plan = plan_of(size, repeat, is_quick=options.quick)
    head = {
        "contestant": contestant.name,
        "size": size,
        "repeat": repeat,
        "notice_s": plan.notice_s,
        "pause_s": plan.pause_s,
        "load": round(os.getloadavg()[0], 1),
    }
    place = Path(tempfile.mkdtemp(dir=options.data))
    objects = Path(tempfile.mkdtemp(dir=options.objects))
    try:
        with ExitStack() as stack:
            outcome = live(contestant, plan, place, objects, stack)
    except (Failed, RuntimeError, AssertionError, OSError) as error:
        return Result(**head, problem=str(error)[:500])
    finally:
        for directory in (place, objects):
            shutil.rmtree(directory, ignore_errors=True)
    loss, measured = outcome.loss, outcome.measured
    if not outcome.is_intact:
        return Result(**head, problem=f"the state of step {loss.restored_step} is not whole")
    return Result(
        **head,
        stall_s=loss.stall_s,
        redone_s=loss.redone_s,
        down_s=loss.down_s,
        step_s=loss.step_s,
        last_step=loss.last_step,
        restored_step=loss.restored_step,
        imported_s=outcome.imported_s,
        restored_s=outcome.restored_s,
        bound_s=measured and sum(measured.bound_parts(loss.step_s).values()),
        bound_parts=measured and measured.bound_parts(loss.step_s),
    )


def work(
    due: queue.SimpleQueue[tuple[int, str, str]],
    file: ResultsFile[Result],
    options: argparse.Namespace,
) -> None:
    """One lane: runs that are due, until none is left."""
    while not due.empty():
        repeat, size, name = due.get()
        result = run(CONTESTANTS[name], size, repeat, options)
        file.add(result)
        parts = ", ".join(f"{part[:-2]} {getattr(result, part):.1f}" for part in results.PARTS)
        shown = result.problem or f"{result.total_s:.1f} s: {parts}"
        if result.bound_s:
            shown += f"; bound {result.bound_s:.1f} s"
        print(f"{size} {repeat + 1}/{options.repeats} {name}: {shown}", file=sys.stderr)


def conditions(file: ResultsFile[Result]) -> str:
    """The machine and the named settings, for the page."""
    loads = [result.load for result in file.results] or [0.0]
    present = {result.contestant for result in file.results}
    environments = {e for name in present for e in CONTESTANTS[name].environments}
    packages = [f"{name}=={version(name)}" for name in ("torch", "transformers", "lightning")]
    for environment in sorted(environments):
        packages += (BENCH / f"requirements-{environment}.txt").read_text().split()
    return (
        f"{machine()}. {', '.join(packages)}.\n\n"
        f"Store: {store.TOTAL_BYTES_S / 1e6:g} MB/s in all and"
        f" {store.CONNECTION_BYTES_S / 1e6:g} MB/s per connection in each direction,"
        f" {store.LATENCY_S * 1e3:g} ms before each answer.\n"
        f"Notice {NOTICE_S:g} s before the power cut; {PAUSE_S:g} s of pause, which no figure contains;"
        f" steps of {STEP_S * 1e3:g} ms.\n"
        f"Scripts save every {SAVE_EVERY_S:g} s, and upload every {agent.SYNC_EVERY_S:g} s.\n"
        f"Load average of the machine at the start of the runs: {min(loads):g} to {max(loads):g}.\n"
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-preemption", description=__doc__)
    add_options(parser, quick="a tiny state and a short notice, once")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["32MB", "1GB"])
    parser.add_argument("--large", action="store_true", help="also 4 GB of state (20 GB of memory)")
    parser.add_argument(
        "--lanes", type=int, default=4, help="runs at the same time, each with its own store"
    )
    parser.add_argument("--objects", type=Path, help="directory for the objects of the store")
    options = parse(parser, CONTESTANTS)
    if options.large and "4GB" not in options.sizes:
        options.sizes.append("4GB")
    if options.quick:
        options.sizes = ["1MB"]
    return options


def chosen(options: argparse.Namespace) -> list[str]:
    """Names of the contestants that can run here."""
    names = [name for name in CONTESTANTS if not options.only or name in options.only]
    refusal = mount_refusal()
    if refusal and any(CONTESTANTS[name].is_mount for name in names):
        print(f"no mounted bucket: {refusal}", file=sys.stderr)
        names = [name for name in names if not CONTESTANTS[name].is_mount]
    for environment in {e for name in names for e in CONTESTANTS[name].environments}:
        interpreter(environment, BUILD)
    return names


def main() -> None:
    options = parsed()
    if options.list:
        print("\n".join(CONTESTANTS))
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    names = chosen(options)
    path = options.json or BUILD / (
        "preemption-quick.jsonl" if options.quick else "preemption.jsonl"
    )
    if options.fresh or options.quick:
        path.unlink(missing_ok=True)
    file = ResultsFile(path, Result)
    due: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
    for repeat in range(options.repeats):
        lane = [(repeat, size, name) for size in options.sizes for name in names]
        for item in random.sample(lane, len(lane)):
            if not file.has(contestant=item[2], size=item[1], repeat=repeat, problem=""):
                due.put(item)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as directories:
        for name in ("data", "objects"):
            place = tempfile.TemporaryDirectory(prefix="bench-", dir=getattr(options, name))
            setattr(options, name, Path(directories.enter_context(place)))
        lanes = [
            threading.Thread(target=work, args=(due, file, options), daemon=True)
            for _ in range(options.lanes)
        ]
        for lane in lanes:
            lane.start()
        try:
            for lane in lanes:
                lane.join()
        except KeyboardInterrupt:
            end_all()
            sys.exit("interrupted")
    tables = "\n".join(
        (
            conditions(file),
            results.markdown(file.results),
        )
    )
    print(tables)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.write:
        script = Path(__file__).resolve().parent / "plot.py"
        picture = PAGES / "preemption.svg"
        subprocess.run(
            [str(interpreter("plot", BUILD)), str(script), str(path), str(picture)], check=True
        )
        shown = "![Seconds lost to one preemption, by contestant](preemption.svg)"
        write_page("make bench-preemption", f"{tables}\n\n{shown}")
    if options.quick and any(result.problem for result in file.results):
        sys.exit(1)


if __name__ == "__main__":
    main()
