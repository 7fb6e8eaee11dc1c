# SPDX-License-Identifier: Apache-2.0
"""Errors put into the production code on purpose, each of which the simulation must find.

``python -m testkit.simulation.production_mutants SEEDS [NUMBER ...]`` runs up to ``SEEDS`` seeds against each
mutant, and exits with 1 if one is not found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from testkit.simulation.core_mutants import Mutant

MUTANTS = (
    Mutant("swansong_bucket.runs.commit",
           "        if not _is_of(newer, own):\n            raise FencedError(claim.generation, newest)",
           "        pass"),
    Mutant("swansong_bucket.runs.catalog", "in sorted(by_commit, reverse=True)", "in sorted(by_commit)"),
    Mutant("swansongd.flush.claimant",
           "        self._note(replace(start, generation=claim.generation))\n", ""),
    Mutant("swansongd.flush.claimant", "self._ensure_not_overtaken(start_id) if nodes == 1 else 0",
           "0"),
    Mutant("swansongd.flush.queue", "        self._left = len(missing)",
           "        self._left = len(missing) - 1"),
    Mutant("swansongd.flush.sender", "        offset += piece.size_bytes\n", ""),
    Mutant("swansongd.core.proof", "return newest.step >= position.step", "return True"),
)  # fmt: skip
"""Numbered from 0."""
NOT_FOUND = (
    # A frozen VM must continue just before this check of a set that its next VM has not resumed from.
    Mutant("swansong_bucket.runs.commit",
           "    ensure_not_fenced(store, keys, claim, own=heirs)\n    mark", "    mark"),
    # Another event wakes the thread soon after.
    Mutant("swansongd.flush.engine",
           "                self._is_beginning = False\n                self._has_work.notify()",
           "                self._is_beginning = False"),
    # Two VMs must claim at the same instant, but here a VM boots after the one before it has claimed.
    Mutant("swansong_bucket.runs.commit",
           "if winner is None or winner.start != start_id:", "if False:"),
    # Two VMs must be in the same few requests, one of them frozen.
    Mutant("swansong_bucket.runs.commit", "    if held and newest > held", "    if False"),
    Mutant("swansong_bucket.runs.commit",
           "above=claim.generation) > claim.generation:", "above=claim.generation) < 0:"),
    # The check before the next claim, and the check before each commit, refuse the same VM.
    Mutant("swansongd.flush.claimant", "            if is_of_boot:\n                raise\n", ""),
    # A trainer must ask in the instant before the restarted daemon has scanned staging.
    Mutant("swansongd.restore.resume",
           "        state = self._scanned()\n        store = self._store()\n        refusal",
           "        state = self._state()\n        store = self._store()\n        refusal"),
    # A restarted trainer on an overtaken VM must still have a sealed set in staging.
    Mutant("swansongd.core.resume",
           "    if best is None or (newest is not None and best[0] < newest):", "    if best is None:"),
)  # fmt: skip
"""Numbered after the others.  They survive 15 seeds."""


def finds(number: int, seeds: int) -> str:
    """The first seed that finds this mutant, and the problem; empty if no seed finds it."""
    done = subprocess.run(
        [sys.executable, "-m", "testkit.simulation.production", "0", str(seeds), "--stop"],
        env={**os.environ, "SWANSONG_MUTANT": str(number)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for result in results:
        if result["problems"]:
            return f"seed {result['seed']}: {result['problems'][0].strip().splitlines()[-1][:150]}"
    if len(results) < seeds:
        raise SystemExit(f"mutant {number} cannot run")
    return ""


def main() -> int:
    seeds = int(sys.argv[1])
    numbers = [int(each) for each in sys.argv[2:]] or range(len(MUTANTS))
    mutants = MUTANTS + NOT_FOUND
    survivors = 0
    for number in numbers:
        found = finds(number, seeds)
        survivors += not found
        mutant = mutants[number]
        name = f"{number} {mutant.module}: {mutant.before.strip()[:50]!r}"
        print(f"{name}: {found or 'survives'}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
