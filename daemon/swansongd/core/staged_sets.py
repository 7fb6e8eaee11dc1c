# SPDX-License-Identifier: Apache-2.0
"""The sealed sets that wait for the store: how many staging holds while the store is slow or unavailable.

A set that a newer one supersedes is sent only if the newer one proves unusable.  So staging keeps a few of
them and drops the others; otherwise an outage of the store would fill the disk of the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swansongd.core.events import Prune
from swansongd.core.state import DroppedSets, State
from swansongd.core.transition import Transition
from swansongd.model import CheckpointId, is_healthy

NEWEST = 2
"""The newest unsent set, and the one to fall back to if the newest is torn or changed."""
UNSENT_MAX = NEWEST + 4
"""Also the newest healthy set, the one in flight, one that is partly stored, and the answer to a request."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """The sealed sets of which no commit exists yet."""

    sets: int
    bytes_left: int
    """Bytes of them that the store does not hold."""


def unsent(state: State) -> Unsent:
    """How much waits for the store."""
    waiting = state.uncommitted
    left = sum(max(0, s.size_bytes - state.kept.get(s.id, 0)) for s in waiting)
    return Unsent(len(waiting), left)


def reconcile(transition: Transition) -> None:
    """Drop the sets that newer ones supersede, unless an evacuation may still choose one of them."""
    evacuation = transition.state.evacuation
    if evacuation is not None and not evacuation.is_precaution and evacuation.verdict is None:
        return
    if len(transition.state.staged) <= NEWEST:
        return
    wanted = _wanted(transition.state)
    superseded = [
        staged
        for staged in transition.state.uncommitted
        if staged.framework == "swansong" and staged.id not in wanted
    ]
    if not superseded:
        return
    for staged in superseded:
        transition.log(
            "warning",
            "unsent_set_dropped",
            step=staged.id.step,
            size_bytes=staged.size_bytes,
            hint="newer sets supersede it, and the store takes sets more slowly than they are sealed",
        )
    dropped = transition.state.dropped
    transition.state = replace(
        transition.state,
        unusable=transition.state.unusable | {staged.id for staged in superseded},
        dropped=DroppedSets(
            dropped.count + len(superseded), max(s.id.step for s in superseded), transition.now
        ),
    )
    transition.do(Prune(tuple(staged.directory for staged in superseded)))


def _wanted(state: State) -> frozenset[CheckpointId]:
    """The unsent sets that may still become a commit."""
    newest_first = state.uncommitted
    wanted = {staged.id for staged in newest_first[:NEWEST]}
    healthy = next((staged for staged in newest_first if is_healthy(staged.health)), None)
    if healthy is not None:
        wanted.add(healthy.id)
    if state.flight is not None:
        wanted.add(state.flight.staged.id)
    wanted.update(item.staged.id for item in state.stored)
    wanted.update(id_ for id_ in (state.answer, state.newer) if id_ is not None)
    partly = [staged for staged in newest_first if state.kept.get(staged.id)]
    if partly:
        wanted.add(max(partly, key=lambda staged: state.kept[staged.id]).id)
    return frozenset(wanted)
