# SPDX-License-Identifier: Apache-2.0
"""Faults of prune that the random histories of :mod:`testkit.simulation.retention` must find."""

from __future__ import annotations

from testkit.simulation.retention import Mutation, Violation, code, run_history

MUTANTS: dict[str, Mutation] = {
    "the commits are not listed again": (
        "prune",
        "named = _marked(found, remaining)",
        "named = _marked(found, [read for read in found.commits if read not in self._doomed])",
    ),
    "young objects are orphans": (
        "survey",
        "info.age_s is None or info.age_s < orphans_after_s",
        "info.age_s is None",
    ),
    "objects go before manifests": (
        "prune",
        "        for _, info in sorted(read.commit.manifests.items()):",
        (
            "        own = _marked(self.found, [one for one in self.found.commits if one is not read])\n"
            "        self.store.delete_many(list(self.found.chunks.stored_except(own)))\n"
            "        for _, info in sorted(read.commit.manifests.items()):"
        ),
    ),
    "foreign objects are orphans": ("survey", "if generation is None:", "if False:"),
    "only the newest whole commit stays": (
        "rules",
        "base = next((commit for commit in whole if not commit.is_younger(since_s)), None)",
        "base = next(iter(whole), None)",
    ),
    "claims do not count": (
        "rules",
        "if generation > settled.ref.generation and generation not in committed",
        "if False",
    ),
    "the newest healthy commit is forgotten": ("rules", "if commit in healthy:", "if False:"),
    "a commit without its chunks is whole": (
        "survey",
        "is_whole=read.commit.is_complete and self.chunks.are_stored(read.chunks)",
        "is_whole=read.commit.is_complete",
    ),
    "a commit of one of two nodes is whole": (
        "survey",
        "is_whole=read.commit.is_complete and self",
        "is_whole=self",
    ),
    "the manifest of one node is deleted": (
        "prune",
        "in sorted(read.commit.manifests.items()):",
        "in sorted(read.commit.manifests.items())[:1]:",
    ),
    "the age of the oldest manifest counts": (
        "survey",
        "age_s=read.commit.age_s,",
        "age_s=max(info.age_s for info in read.commit.manifests.values()),",
    ),
    "settled commits do not choose": (
        "rules",
        "    for counted in (whole, settled):",
        "    for counted in (whole,):",
    ),
    "the newest settled commit is forgotten": (
        "rules",
        "if settled and settled[0] is not whole[0]:",
        "if False:",
    ),
    "the days of a start do not count": (
        "rules",
        "if commit.is_younger(rules.keep_starts_s):",
        "if False:",
    ),
    "the newest span is left out": (
        "rules",
        "        if len(seen) >= count:",
        "        if len(seen) >= count - 1:",
    ),
    "every line of states counts for the steps": (
        "rules",
        "if turn is None or ref.step < turn.ref.step:",
        "if True:",
    ),
    "the place where the training was repeated is forgotten": (
        "rules",
        "for commit in turns:",
        "for commit in ():",
    ),
    "an unhealthy commit can be the best": (
        "rules",
        "if metric in commit.health and is_healthy(commit.health) is not False",
        "if metric in commit.health",
    ),
    "parts go although they may become whole": (
        "rules",
        "if not commit.is_whole and commit.is_younger(rules.orphans_after_s):",
        "if False:",
    ),
    "the first manifest decides the size of a chunk": (
        "survey",
        "number < len(self) and self._sizes_bytes[number] != size_bytes",
        "False",
    ),
    "a manifest of a wrong size voids the chunk": (
        "survey",
        "        elif (info.key, info.size_bytes) in self._other_sizes:",
        "        elif False:",
    ),
    "chunks of deleted commits stay": (
        "prune",
        "_batches(chain(found.chunks.stored_except(named), orphans))",
        "_batches(iter(orphans))",
    ),
}
"""By what is broken."""


def seeds_to_kill(mutation: Mutation, limit: int) -> int | None:
    """The number of histories until one breaks; None if none of ``limit`` does."""
    prune = code(mutation)
    for seed in range(limit):
        try:
            run_history(seed, prune)
        except Violation:
            return seed + 1
    return None
