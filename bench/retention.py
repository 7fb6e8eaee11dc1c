# SPDX-License-Identifier: Apache-2.0
"""Random histories of retention, in several processes: ``python -m bench.retention --histories 100000``.

``--mutants`` breaks prune in each known way, and counts the histories until one of them fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter

from testkit.simulation.retention import Violation, code, run_history
from testkit.simulation.retention_mutants import MUTANTS, seeds_to_kill

_CHUNK = 500


def _play(seeds: range) -> Counter[str]:
    prune = code()
    counts: Counter[str] = Counter()
    began_s = time.process_time()
    for seed in seeds:
        try:
            world = run_history(seed, prune)
        except Violation as error:  # the next seeds may find other ones
            print(error, flush=True)
            counts["violations"] += 1
            continue
        counts["prunes"] += world.prunes
        counts["prunes within another"] += world.inner_prunes
        counts["crashes"] += world.crashes
        counts["manifests deleted"] += len(world.store.deleted_commits)
        counts["objects deleted"] += len(world.store.deleted_data)
    counts["CPU ms"] = round(1000 * (time.process_time() - began_s))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first history")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mutants", action="store_true")
    args = parser.parse_args()
    if args.mutants:
        for name, mutation in MUTANTS.items():
            print(f"{name}: {seeds_to_kill(mutation, args.histories)}", flush=True)
        return
    began_s = time.monotonic()
    last = args.first + args.histories
    chunks = [range(at, min(at + _CHUNK, last)) for at in range(args.first, last, _CHUNK)]
    done = 0
    counts: Counter[str] = Counter()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for chunk, counted in zip(chunks, pool.imap(_play, chunks), strict=True):
            done += len(chunk)
            counts += counted
            if done % (20 * _CHUNK) == 0 or done == args.histories:
                figures = ", ".join(f"{count} {name}" for name, count in counts.items())
                took_s = time.monotonic() - began_s
                print(f"{done} histories: {figures}; {took_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
