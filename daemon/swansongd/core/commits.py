# SPDX-License-Identifier: Apache-2.0
"""Commits: manifests that are due or written and, over several VMs, the parts of the other VMs."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from swansong_bucket.model import CheckpointId, CommitRef, Staged, VmPart, is_healthy, is_sound

from swansongd.core import events, flight, learning, pace, ranks, request, staged_sets
from swansongd.core.state import CommitState, Incomplete, StoredSet
from swansongd.core.transition import Transition

LOOK_FIRST_S = 0.3
LOOK_S_MAX = 30.0


def record_flushed(transition: Transition, event: events.Flushed) -> None:
    """All shards of a set are stored: its manifest is due."""
    staged = flight.record_flushed(transition, event)
    if staged is not None:
        due = StoredSet(flush_id=event.flush_id, staged=staged, shards=event.shards)
        commits = transition.state.commits
        _put(transition, replace(commits, stored=(*commits.stored, due)))


def record_done(transition: Transition, flush_id: str, ref: CommitRef) -> None:
    """A manifest was written."""
    done = _take(transition, flush_id)
    commits = transition.state.commits
    if commits.ordered is not None and commits.ordered <= ref:
        _put(transition, replace(commits, ordered=None))
    flight.record_committed(transition)
    owner = transition.state.start_of(transition.state.owner_of(ref))
    if done is None and (owner is None or owner.nodes > 1):
        return  # this VM's part of a checkpoint, of a start that is over
    staged = None if done is None else done.staged
    if done is not None:
        learning.record_manifest(transition, done)
        if is_healthy(done.staged.health) is not False:
            commits = transition.state.commits
            _put(transition, replace(commits, healthy=max(ref, commits.healthy or ref)))
    transition.mark("committed", generation=ref.generation, step=ref.step)
    transition.log(
        "info",
        "committed",
        generation=ref.generation,
        step=ref.step,
        size_bytes=None if staged is None else staged.size_bytes,
        **({} if staged is None else staged.lost_ranks),
    )
    _record_part(transition, ref, staged)


def _take(transition: Transition, flush_id: str) -> StoredSet | None:
    """The set of this flush, whose manifest is not due any more."""
    commits = transition.state.commits
    taken = next((item for item in commits.stored if item.flush_id == flush_id), None)
    left = tuple(item for item in commits.stored if item is not taken)
    _put(transition, replace(commits, stored=left))
    return taken


def record_failed(transition: Transition, event: events.CommitFailed) -> None:
    """A manifest could not be written, for now or at all."""
    failed = _take(transition, event.flush_id)
    if failed is None:
        return
    step = failed.staged.id.step
    if event.is_obsolete:
        transition.log("info", "commit_obsolete", step=step, reason=event.reason)
    else:
        transition.log("error", "commit_failed", step=step, kind=event.kind, reason=event.reason)
    if event.conflict:
        staged_sets.give_up(transition, {failed.staged.id})
    elif not event.is_obsolete:
        commits = transition.state.commits
        due = replace(failed, asked_mono_s=None)
        _put(transition, replace(commits, stored=(*commits.stored, due)))
        flight.back_off(transition)


def _record_part(transition: Transition, ref: CommitRef, staged: Staged | None) -> None:
    """This VM's part is committed; the checkpoint exists when the parts of all VMs are."""
    commits = transition.state.commits
    if staged is None or staged.nodes == 1:
        _record_whole(transition, ref, is_sound=staged is None or is_sound(staged.health))
    elif commits.last_complete is None or ref > commits.last_complete:
        before = commits.incomplete
        newest = ref if before is None else max(ref, before.part.ref)
        is_asked = before is not None and before.is_asked
        part = VmPart(newest, staged.nodes)
        incomplete = Incomplete(part, transition.now, LOOK_FIRST_S, is_asked=is_asked)
        _put(transition, replace(commits, incomplete=incomplete))


def record_parts_counted(transition: Transition, event: events.PartsCounted) -> None:
    """A look for the parts of the other VMs was answered."""
    commits = transition.state.commits
    incomplete = commits.incomplete
    if incomplete is None:
        return
    part = incomplete.part
    committed = max(part.committed, event.committed if event.newest == part.ref else 0)
    counted = replace(
        incomplete,
        is_asked=False,
        look_mono_s=transition.now + incomplete.wait_s,
        part=replace(part, committed=committed),
    )
    _put(transition, replace(commits, incomplete=counted))
    last = commits.last_complete
    if event.whole is not None and (last is None or event.whole > last):
        _record_whole(transition, event.whole, is_sound=event.is_sound)


def _record_whole(transition: Transition, ref: CommitRef, *, is_sound: bool) -> None:
    """All VMs have committed their parts: older sets are dispensable."""
    commits = transition.state.commits
    incomplete = commits.incomplete
    if incomplete is not None:
        transition.mark("complete", generation=ref.generation, step=ref.step)
        is_newest = incomplete.part.ref <= ref
        commits = replace(commits, incomplete=None if is_newest else incomplete)
    if commits.last_complete is None or ref > commits.last_complete:
        commits = replace(commits, last_complete=ref, is_sound=is_sound)
    _put(transition, commits)
    request.record_whole(transition, ref)
    ranks.tell_committed(transition, ref)
    staged_sets.record_whole(transition, ref)


def record_newest(transition: Transition, event: events.RunRead | events.GenerationClaimed) -> None:
    """The newest whole commit in the store is known, and the start that wrote it.

    No commit of the newest generation exists yet.
    """
    read = replace(
        transition.state.commits,
        last_complete=event.newest,
        is_sound=event.is_sound,
        newest_start=event.newest_start,
        is_run_read=True,
        healthy=None,
    )
    _put(transition, read)
    if event.newest is not None:
        ranks.tell_committed(transition, event.newest)


def record_skipped(transition: Transition, ref: CommitRef) -> None:
    """A restore could not use this commit.

    Only the newest whole one counts.  The restore may skip older ones, and later ones that no daemon wrote.
    """
    commits = transition.state.commits
    if ref == commits.last_complete:
        _put(transition, replace(commits, skipped=ref))


def close_starts(transition: Transition, start_ids: Set[str]) -> None:
    """Write no manifest for sets of these starts, and wait for no parts of their checkpoints.

    A part that another VM has ordered before may still arrive: the checkpoint may exist.
    """
    state, commits = transition.state, transition.state.commits
    generations = {start.generation for start in state.starts.known if start.id in start_ids}
    if state.part is not None and state.part.ref.generation in generations:
        ordered = max(state.part.ref, commits.ordered or state.part.ref)
        _put(transition, replace(commits, incomplete=None, ordered=ordered))
    drop(transition, {i.staged.id for i in commits.stored if i.staged.id.start in start_ids})


def drop(transition: Transition, ids: Set[CheckpointId]) -> None:
    """Write no manifest for these sets."""
    commits = transition.state.commits
    left = tuple(item for item in commits.stored if item.staged.id not in ids)
    _put(transition, replace(commits, stored=left))


def mark_suspect(transition: Transition, ids: Set[CheckpointId]) -> None:
    """Suspect training has sealed these sets."""
    commits = transition.state.commits
    marked = (
        replace(item, staged=staged_sets.marked(item.staged)) if item.staged.id in ids else item
        for item in commits.stored
    )
    _put(transition, replace(commits, stored=tuple(marked)))


def forget(transition: Transition) -> None:
    """Forget the manifests that are due, and this VM's parts: the commits of the run stay."""
    _put(transition, replace(transition.state.commits, stored=(), incomplete=None))


def reconcile(transition: Transition) -> None:
    """Write the manifests that are due, and look for the parts of the other VMs."""
    wanted = staged_sets.wanted_of(transition.state)
    if wanted is not None:
        drop(transition, {item.staged.id for item in transition.state.commits.stored} - wanted)
    _look_for_parts(transition)
    _order_manifests(transition)


def _order_manifests(transition: Transition) -> None:
    state = transition.state
    if transition.now < state.flush.retry_mono_s:
        return
    for item in state.commits.stored:
        if not item.is_asked:
            asked = replace(item, asked_mono_s=transition.now)
            ref = state.ref_of(item.staged.id)
            assert ref is not None
            commits = transition.state.commits
            stored = tuple(asked if i is item else i for i in commits.stored)
            ordered = max(ref, commits.ordered or ref)
            _put(transition, replace(commits, stored=stored, ordered=ordered))
            transition.do(
                events.CommitManifest(
                    item.flush_id,
                    item.staged,
                    item.shards,
                    ref.generation,
                    state.commits.last_complete,
                    pace.published(state.learned.pace),
                )
            )


def _look_for_parts(transition: Transition) -> None:
    """Look for the parts of the other VMs with exponential backoff, one look at a time.

    The thread that looks also commits: a manifest that is due goes first.
    """
    state = transition.state
    incomplete = state.commits.incomplete
    is_committing = any(item.is_asked for item in state.commits.stored)
    if incomplete is None or incomplete.is_asked or is_committing:
        return
    is_open = state.evacuation is not None and transition.left_s > 0
    is_urgent = state.starts.is_finishing or is_open
    is_forced = is_urgent and incomplete.wait_s > LOOK_FIRST_S
    if transition.now < incomplete.look_mono_s and not is_forced:
        return
    part, last = incomplete.part, state.commits.last_complete
    transition.do(events.CheckComplete(part.ref, part.nodes, last))
    wait_s = LOOK_FIRST_S if is_urgent else min(2 * incomplete.wait_s, LOOK_S_MAX)
    asked = replace(incomplete, wait_s=wait_s, is_asked=True)
    _put(transition, replace(state.commits, incomplete=asked))


def _put(transition: Transition, commits: CommitState) -> None:
    transition.state = replace(transition.state, commits=commits)
