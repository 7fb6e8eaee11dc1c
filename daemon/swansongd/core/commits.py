# SPDX-License-Identifier: Apache-2.0
"""Commits: manifests that are due or written and, over several VMs, the parts of the other VMs."""

from __future__ import annotations

from dataclasses import replace

from swansongd.core import flight, gpus, learning, pace
from swansongd.core.events import (
    CheckComplete,
    CommitFailed,
    CommitManifest,
    PartsCounted,
    Prune,
    TellCommitted,
)
from swansongd.core.state import (
    Incomplete,
    State,
)
from swansongd.core.transition import Transition
from swansongd.model import (
    CheckpointId,
    CommitRef,
    Staged,
    is_healthy,
)

LOOK_FIRST_S = 0.3
LOOK_S_MAX = 30.0
PARTS_MAX = 4
"""This VM's parts that wait for the other VMs, which flush their newest set first and may skip others."""


def record_done(transition: Transition, flush_id: str, ref: CommitRef) -> None:
    """A manifest was written."""
    done = next((item for item in transition.state.stored if item.flush_id == flush_id), None)
    if done is not None:
        learning.record_manifest(transition, done)
    newest = transition.state.last_commit
    transition.state = replace(
        transition.state,
        stored=tuple(item for item in transition.state.stored if item.flush_id != flush_id),
        failures=0,
    )
    if done is None and transition.state.spans_vms:
        return  # of an earlier start, or of a number of VMs that is not known any more
    if newest is None or ref > newest:
        transition.state = replace(transition.state, last_commit=ref)
    if done is not None and is_healthy(done.staged.health) is not False:
        healthy = transition.state.healthy_commit
        transition.state = replace(
            transition.state, healthy_commit=ref if healthy is None else max(ref, healthy)
        )
    if done is not None:
        gpus.record_commit(transition, ref, done.staged)
    transition.mark("committed", generation=ref.generation, step=ref.step)
    transition.log(
        "info",
        "committed",
        generation=ref.generation,
        step=ref.step,
        size_bytes=done.staged.size_bytes if done else None,
    )
    _record_part(transition, ref, done.staged if done else None)


def record_failed(transition: Transition, event: CommitFailed) -> None:
    """A manifest could not be written, for now or at all."""
    failed = next(
        (item for item in transition.state.stored if item.flush_id == event.flush_id), None
    )
    if failed is None:
        return
    step = failed.staged.id.step
    if event.is_obsolete:
        transition.log("info", "commit_obsolete", step=step, reason=event.reason)
    else:
        transition.log("error", "commit_failed", step=step, reason=event.reason)
    others = tuple(item for item in transition.state.stored if item.flush_id != event.flush_id)
    if event.conflict:
        transition.state = replace(
            transition.state, stored=others, unusable=transition.state.unusable | {failed.staged.id}
        )
    elif event.is_obsolete:
        transition.state = replace(transition.state, stored=others)
    else:
        transition.state = replace(
            transition.state, stored=(*others, replace(failed, is_asked=False))
        )
        flight.back_off(transition)


def _record_part(transition: Transition, ref: CommitRef, staged: Staged | None) -> None:
    """This VM's part is committed; the checkpoint exists when the parts of all VMs are."""
    if staged is None or staged.nodes == 1:
        _record_whole(transition, ref)
    elif transition.state.last_complete is None or ref > transition.state.last_complete:
        before = transition.state.incomplete
        others = () if before is None else before.refs
        refs = tuple(sorted({ref, *others}, reverse=True)[:PARTS_MAX])
        is_asked = before is not None and before.is_asked
        transition.state = replace(
            transition.state,
            incomplete=Incomplete(
                refs, staged.nodes, transition.now, LOOK_FIRST_S, is_asked=is_asked
            ),
        )


def record_parts_counted(transition: Transition, event: PartsCounted) -> None:
    """A look for the parts of the other VMs was answered."""
    incomplete = transition.state.incomplete
    if incomplete is None:
        return
    is_newest = event.newest == incomplete.refs[0]
    transition.state = replace(
        transition.state,
        incomplete=replace(
            incomplete,
            is_asked=False,
            look_mono_s=transition.now + incomplete.wait_s,
            committed=max(incomplete.committed, event.committed if is_newest else 0),
        ),
    )
    if event.whole in incomplete.refs:
        _record_whole(transition, event.whole)


def _record_whole(transition: Transition, ref: CommitRef) -> None:
    """All VMs have committed their parts: older sets are dispensable."""
    state = transition.state
    if state.incomplete is not None:
        transition.mark("complete", generation=ref.generation, step=ref.step)
        refs = tuple(part for part in state.incomplete.refs if part > ref)
        transition.state = replace(
            transition.state, incomplete=replace(state.incomplete, refs=refs) if refs else None
        )
    if state.last_complete is None or ref > state.last_complete:
        transition.state = replace(
            transition.state, last_complete=ref, last_commit_mono_s=transition.now
        )
    learning.record_whole(transition, ref)
    transition.do(TellCommitted(ref))
    if _may_be_loaded(transition.state, ref):
        return
    # Sets of other frameworks are not ours to delete.  The newest committed set stays for a quick restore.
    dispensable = tuple(
        staged.directory
        for staged in transition.state.staged
        if staged.framework == "swansong"
        and staged != transition.state.pinned
        and _comes_before(transition.state, staged, ref)
    )
    if dispensable or transition.state.has_aside:
        transition.state = replace(transition.state, has_aside=False)
        transition.do(Prune(dispensable))


def _may_be_loaded(state: State, ref: CommitRef) -> bool:
    """Whether a later start than that of the commit runs: a rollback may be loading an older set.

    The first commit of that start replaces these sets.
    """
    start = state.start
    return start is not None and start.is_live and start.id != state.owner_of(ref)


def _comes_before(state: State, staged: Staged, ref: CommitRef) -> bool:
    """Whether a set is older than the commit, or the end of the run replaces it."""
    owner = state.owner_of(ref)
    committed = CheckpointId(ref.step, "", ref.is_final, owner)
    if staged.id.start == owner:
        return (staged.id.step, staged.id.is_final) < (ref.step, ref.is_final)
    return bool(owner) and state.order(staged.id) < state.order(committed)


def reconcile(transition: Transition) -> None:
    """Write the manifests that are due, and look for the parts of the other VMs."""
    _look_for_parts(transition)
    _order_manifests(transition)


def _order_manifests(transition: Transition) -> None:
    state = transition.state
    if transition.now < state.retry_mono_s:
        return
    for item in state.stored:
        if not item.is_asked:
            asked = replace(item, is_asked=True, asked_mono_s=transition.now)
            transition.state = replace(
                transition.state,
                stored=tuple(asked if i is item else i for i in transition.state.stored),
            )
            ref = state.ref_of(item.staged.id)
            assert ref is not None
            transition.do(
                CommitManifest(
                    item.flush_id,
                    item.staged,
                    item.shards,
                    ref.generation,
                    state.last_complete,
                    pace.published(state.pace),
                )
            )


def _look_for_parts(transition: Transition) -> None:
    """Look for the parts of the other VMs with exponential backoff, one look at a time.

    The thread that looks also commits: a manifest that is due goes first.
    """
    state = transition.state
    incomplete = state.incomplete
    is_committing = any(item.is_asked for item in state.stored)
    if incomplete is None or incomplete.is_asked or is_committing:
        return
    is_awaited = state.finishing is not None and not state.finishing.is_done
    is_urgent = is_awaited or (state.evacuation is not None and transition.left_s > 0)
    if transition.now < incomplete.look_mono_s and not (
        is_urgent and incomplete.wait_s > LOOK_FIRST_S
    ):
        return
    transition.do(CheckComplete(incomplete.refs, incomplete.nodes))
    wait_s = LOOK_FIRST_S if is_urgent else min(2 * incomplete.wait_s, LOOK_S_MAX)
    transition.state = replace(
        transition.state, incomplete=replace(incomplete, wait_s=wait_s, is_asked=True)
    )
