# SPDX-License-Identifier: Apache-2.0
"""Random histories of retention, in several processes: ``python -m bench.retention --histories 100000``.

``--mutants`` breaks prune in each known way, and counts the histories until one of them fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time

from testkit.simulation.retention import code, run_history
from testkit.simulation.retention_mutants import MUTANTS, seeds_to_kill

_CHUNK = 500


def _play(seeds: range) -> tuple[int, int]:
    prune = code()
    prunes = crashes = 0
    for seed in seeds:
        world = run_history(seed, prune)
        prunes += world.prunes
        crashes += world.crashes
    return prunes, crashes


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
    done = prunes = crashes = 0
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for chunk, (made, crashed) in zip(chunks, pool.imap(_play, chunks), strict=True):
            done += len(chunk)
            prunes += made
            crashes += crashed
            if done % (20 * _CHUNK) == 0 or done == args.histories:
                took_s = time.monotonic() - began_s
                print(
                    f"{done} histories, {prunes} prunes, {crashes} crashes: {took_s:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
