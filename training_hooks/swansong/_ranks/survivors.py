# SPDX-License-Identifier: Apache-2.0
"""The living ranks of a job agree on a checkpoint without the dead ones.

A rank whose training loop has lost a peer stands at its last completed step.  It writes this step into a
store that the living ranks share.  When no further rank answers, one of them decides: the ranks with the
greatest step save it together, and all other ranks take no part.  Only the first decision counts, by
compare-and-set.  A rank that answers later is left out, and writes nothing.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from swansong._ranks.agreement import Ranks
from swansong._ranks.job_store import JobStore

QUIET_S = 2.0
"""Time without a further answer, after which the ranks that have not answered count as dead."""
LIMIT_S = 10.0
"""Longest wait for a decision."""
_POLL_S = 0.02
_LOOK_S_MAX = 5 * _POLL_S
"""Longest time that counts between two looks: after a pause of the VM, the other ranks can answer first."""
_GLOO = ("/gloo/", "Application timeout caused pair closure")
"""Gloo raises RuntimeError, and only the source file in its text shows the cause."""
_BACKEND = {"DistBackendError", "DistNetworkError", "DistStoreError"}


@dataclass(frozen=True)
class Survivors:
    """The ranks that save together."""

    step: int
    nodes: dict[int, int]
    """By rank of the job, in order: the VM of the rank."""

    def without(self, world_size: int) -> list[int]:
        """Return the ranks of the job that take no part."""
        return [rank for rank in range(world_size) if rank not in self.nodes]


def agree(store: JobStore, key: str, ranks: Ranks, step: int) -> Survivors | None:
    """Take one rank's part in the agreement of the survivors.

    Args:
        store: connection of the calling thread, to a store of the living ranks.
        key: prefix of the keys of this agreement, the same for all ranks of the start.
        ranks: position of this process in the job.
        step: last completed step, whose state this rank still has.

    Returns:
        The ranks that save, perhaps without this one; None if all ranks of the job are alive.

    Raises:
        TimeoutError: no decision was made within the limit.
        Exception: the store failed.
    """
    decision = f"{key}/decision"
    store.set(f"{key}/answer/{ranks.rank}", json.dumps([step, ranks.node]))
    answers = store.add(f"{key}/answers", 1)
    quiet_s = waited_s = 0.0
    looked_mono_s = time.monotonic()
    while not store.check([decision]):
        if answers == ranks.world_size or quiet_s >= QUIET_S:
            store.compare_set(decision, "", json.dumps(_decide(store, key, ranks.world_size)))
            break
        if waited_s >= LIMIT_S:
            raise TimeoutError(f"the living ranks have not agreed within {LIMIT_S:.0f} s")
        time.sleep(_POLL_S)
        before, answers = answers, store.add(f"{key}/answers", 0)
        now_mono_s = time.monotonic()
        took_s = min(now_mono_s - looked_mono_s, _LOOK_S_MAX)
        looked_mono_s = now_mono_s
        waited_s += took_s
        quiet_s = quiet_s + took_s if answers == before else 0.0
    decided = json.loads(store.get(decision))
    if decided is None:
        return None
    return Survivors(decided["step"], {int(rank): vm for rank, vm in decided["nodes"].items()})


def _decide(store: JobStore, key: str, world_size: int) -> dict[str, object] | None:
    answers = {
        rank: json.loads(store.get(f"{key}/answer/{rank}"))
        for rank in range(world_size)
        if store.check([f"{key}/answer/{rank}"])
    }
    if len(answers) == world_size:
        return None
    step = max(step for step, _ in answers.values())
    return {"step": step, "nodes": {r: node for r, (at, node) in answers.items() if at == step}}


def is_loss_of_a_peer(error: BaseException | None) -> bool:
    """Whether an error shows that a collective has failed, and not the script of this rank."""
    if error is None:
        return False
    names = {each.__qualname__ for each in type(error).__mro__}
    is_of_backend = not names.isdisjoint(_BACKEND) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _GLOO)
    )
    return is_of_backend or is_loss_of_a_peer(error.__cause__ or error.__context__)


def named(ranks: list[int]) -> str:
    """Return the numbers in their order, with ranges, such as ``2, 8-15``."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)
