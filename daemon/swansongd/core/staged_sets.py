# SPDX-License-Identifier: Apache-2.0
"""Sealed sets in staging: those that a scan finds, and those that wait for the store.

A set that a newer one supersedes is sent only if the newer one proves unusable.  The daemon therefore keeps
a few unsent sets and deletes the others: an outage of the store must not fill the trainer's disk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace

from swansong import bounds
from swansong_bucket.model import (
    GPU_IS_SOUND,
    CheckpointId,
    CheckpointKind,
    CommitRef,
    Staged,
    is_healthy,
)

from swansongd.core.events import Prune, Scanned, SetAside
from swansongd.core.state import StagingState, State
from swansongd.core.transition import Transition

NEWEST = 2
"""The newest unsent set, and a fallback if that one is torn or changed."""
ASIDE_MAX = 2
"""Sets of earlier starts over several VMs that are kept for the restore of the next one."""


def record_scan(
    transition: Transition, event: Scanned, new: Sequence[Staged], *, is_first: bool
) -> None:
    """A scan of staging ended.

    Args:
        event: the scan.
        new: the sets that no earlier scan has found, with their starts.
    """
    staging = transition.state.staging
    if not is_first:
        new = _signalled(transition, new)
    known = {staged.id: staged for staged in (*staging.staged, *new)}
    staged_now = tuple(_recognised(known[staged.id], staged) for staged in event.staged)
    _put(
        transition,
        replace(
            staging,
            staged=staged_now,
            pending=event.pending,
            growing=event.growing,
            unusable=staging.unusable & {staged.id for staged in event.staged},
            first_scan_mono_s=event.started_mono_s if is_first else staging.first_scan_mono_s,
            scanned_mono_s=event.started_mono_s,
            saved_mono_s=transition.now if new else staging.saved_mono_s,
        ),
    )
    new_ids = {staged.id for staged in new}
    for staged in (s for s in staged_now if s.id in new_ids):
        transition.log(
            "info",
            "sealed_set_found",
            step=staged.id.step,
            directory=staged.directory,
            size_bytes=staged.size_bytes,
            kind=staged.kind.value,
        )
    if is_first:
        _doubt_undurable(transition)


def _recognised(known: Staged, staged: Staged) -> Staged:
    """The set as this scan shows it, with what the daemon has added to it: start, kind and mark."""
    return replace(staged, id=known.id, kind=known.kind, health=known.health)


def _signalled(transition: Transition, new: Sequence[Staged]) -> Sequence[Staged]:
    """Sets of other frameworks do not name their kind: those that answer a signal are for an emergency."""
    if not any(r.by_signal and r.is_urgent for r in transition.waiting_requests):
        return new
    kind = CheckpointKind.EMERGENCY
    return [s if s.framework == "swansong" else replace(s, kind=kind) for s in new]


def _doubt_undurable(transition: Transition) -> None:
    """The power may have been cut before these sets were flushed to the disk."""
    state = transition.state
    doubtful = [s for s in state.staging.usable if not (_is_of_boot(state, s) or _is_synced(s))]
    for staged in doubtful:
        transition.log(
            "warning",
            "sealed_set_not_durable",
            directory=staged.directory,
            step=staged.id.step,
            reason="it was not flushed to the disk before the last boot, and may be torn",
        )
    give_up(transition, {staged.id for staged in doubtful})


def _is_synced(staged: Staged) -> bool:
    """Whether the set outlasts a power cut: the hooks sync all sets except those for an emergency."""
    return staged.framework == "swansong" and staged.kind is not CheckpointKind.EMERGENCY


def _is_of_boot(state: State, staged: Staged) -> bool:
    """Whether a process of this boot has written the set.

    The claim record names the boot of a start.  Without it the time of the files has to do, although the
    clock may be wrong after a boot.
    """
    start = state.start_of(staged.id.start)
    if start is None or not start.has_hooks:
        return staged.written_ns >= state.settings.booted_wall_ns
    return start.is_of_boot


def give_up(transition: Transition, ids: Set[CheckpointId]) -> None:
    """Make no commit of these sets any more."""
    staging = transition.state.staging
    _put(transition, replace(staging, unusable=staging.unusable | ids))


def leave_behind(transition: Transition, left: Sequence[Staged]) -> None:
    """The training has gone back to a state before these sets: no later start resumes from them.

    They are deleted, because a restarted daemon would commit them.  A set is kept if its manifest may exist:
    a restarted daemon must know of it.
    """
    give_up(transition, {staged.id for staged in left})
    state, ordered = transition.state, transition.state.commits.ordered
    dispensable = tuple(
        staged.directory
        for staged in left
        if staged.framework == "swansong"
        and ((ref := state.ref_of(staged.id)) is None or ordered is None or ref > ordered)
    )
    if dispensable:
        transition.do(Prune(dispensable, keeps_aside=True))


def mark_suspect(transition: Transition, ids: Set[CheckpointId]) -> None:
    """Suspect training has sealed these sets."""
    staging = transition.state.staging
    staged = tuple(marked(each) if each.id in ids else each for each in staging.staged)
    _put(transition, replace(staging, staged=staged))


def marked(staged: Staged) -> Staged:
    """The set with the mark of suspect training, which enters its manifest in place of the last metric."""
    names = sorted(staged.health, key=lambda name: not name.startswith("loss"))
    kept = {name: staged.health[name] for name in names[: bounds.METRICS_MAX - 1]}
    return replace(staged, health={**kept, GPU_IS_SOUND: 0.0})


def record_whole(transition: Transition, ref: CommitRef) -> None:
    """A checkpoint is committed, with the parts of all VMs: older sets are dispensable."""
    state = transition.state
    if _may_be_loaded(state, ref):
        return
    # Sets of other frameworks are not ours to delete.  The newest committed set stays for a quick restore.
    dispensable = tuple(
        staged.directory
        for staged in state.staging.staged
        if staged.framework == "swansong"
        and staged != state.pinned
        and _comes_before(state, staged, ref)
    )
    transition.do(Prune(dispensable))  # with the sets that were set aside


def _may_be_loaded(state: State, ref: CommitRef) -> bool:
    """Whether a later start than that of the commit has begun: a rollback may be loading an older set.

    The first commit of that start replaces these sets.
    """
    return state.start is not None and state.start.id != state.owner_of(ref)


def _comes_before(state: State, staged: Staged, ref: CommitRef) -> bool:
    """Whether a set is older than the commit, or the end of the run replaces it."""
    owner = state.owner_of(ref)
    committed = CheckpointId(ref.step, "", ref.is_final, owner)
    if not _is_placed(state, staged):
        return any(
            (each.id.start, each.id.step) == (owner, ref.step)
            and each.written_ns > staged.written_ns
            for each in state.staging.staged
        )
    return bool(owner) and state.order(staged.id) < state.order(committed)


def _is_placed(state: State, staged: Staged) -> bool:
    start = state.start_of(staged.id.start)
    return start is None or start.is_placed


def set_aside(transition: Transition, start_id: str, newest_part: CommitRef | None) -> None:
    """A start over several VMs has begun: keep only the sets that it may restore from.

    Args:
        start_id: the start.
        newest_part: newest commit of this VM's part of a checkpoint of the starts before.
    """
    staging = transition.state.staging
    own = [s for s in staging.staged if s.framework == "swansong" and s.id.start != start_id]
    wanted = _resumable(own, transition.state.commits.last_complete, newest_part)
    dispensable = tuple(staged.directory for staged in own if staged not in wanted)
    if dispensable:
        transition.do(Prune(dispensable, keeps_aside=True))
    if wanted:
        transition.do(SetAside(tuple(staged.directory for staged in wanted)))


def _resumable(
    sets: Sequence[Staged], whole: CommitRef | None, newest_part: CommitRef | None
) -> list[Staged]:
    """The sets of which the next start may read the same bytes: those of the newest whole checkpoint.

    A newer one of which this VM's part is committed may have become whole since.  They are set aside, and
    the next commit deletes them; meanwhile a download copies them.
    """
    first = -1 if whole is None else whole.step
    last = math.inf if newest_part is None else newest_part.step
    may_count = [staged for staged in sets if first <= staged.id.step <= last]
    return sorted(may_count, key=lambda staged: staged.id)[-ASIDE_MAX:]


def forget(transition: Transition) -> None:
    """Forget the scans: the next one is like the first one of a restarted daemon."""
    _put(transition, StagingState(unusable=transition.state.staging.unusable))


def reconcile(transition: Transition) -> None:
    """Drop the sets that newer ones supersede, unless an evacuation or a restore may choose one of them."""
    wanted = wanted_of(transition.state)
    if wanted is None:
        return
    superseded = [
        staged
        for staged in transition.state.uncommitted
        if staged.framework == "swansong" and staged.id not in wanted
    ]
    if not superseded:
        return
    for staged in reversed(superseded):  # the newest one last
        transition.log(
            "warning",
            "unsent_set_dropped",
            step=staged.id.step,
            size_bytes=staged.size_bytes,
            hint="newer sets supersede it, and the store takes sets more slowly than they are sealed",
        )
    give_up(transition, {staged.id for staged in superseded})
    transition.do(Prune(tuple(staged.directory for staged in superseded)))


def _may_load(state: State) -> bool:
    """Whether a start may be loading a set: it has neither said what it has loaded nor sealed a set.

    A restarted daemon does not know which set a rollback loads.  Without training, no set is added.
    """
    start = state.start
    if start is None or not start.is_live or start.is_restoring:
        return True
    has_sealed = any(staged.id.start == start.id for staged in state.staging.staged)
    return not (start.parent.is_known or has_sealed)


def wanted_of(state: State) -> frozenset[CheckpointId] | None:
    """The sets that may still become a commit; None: an evacuation or a restore may choose any of them."""
    if state.is_deciding or _may_load(state):
        return None
    newest_first = state.uncommitted
    wanted = {staged.id for staged in newest_first[:NEWEST]}
    healthy = next((staged for staged in newest_first if is_healthy(staged.health)), None)
    synced = next(filter(_is_synced, newest_first), None)
    wanted.update(staged.id for staged in (healthy, synced, state.pinned) if staged is not None)
    if state.flush.flight is not None:
        wanted.add(state.flush.flight.staged.id)
    # The manifest of an older stored set is tried once: a store may refuse manifests, and take all chunks.
    wanted.update(item.staged.id for item in state.commits.stored if item.is_asked)
    wanted.update(sorted((i.staged.id for i in state.commits.stored), key=state.order)[-NEWEST:])
    wanted.update(state.answers)
    unplaced = (s for s in reversed(newest_first) if not _is_placed(state, s))
    wanted.update({staged.id.start: staged.id for staged in unplaced}.values())  # newest of each
    partly = [staged for staged in newest_first if state.flush.stored_bytes.get(staged.id)]
    if partly:
        wanted.add(max(partly, key=lambda staged: state.flush.stored_bytes[staged.id]).id)
    return frozenset(wanted)


def _put(transition: Transition, staging: StagingState) -> None:
    transition.state = replace(transition.state, staging=staging)
