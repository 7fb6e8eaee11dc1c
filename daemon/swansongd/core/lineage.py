# SPDX-License-Identifier: Apache-2.0
"""The line of states of a run.  A trainer that starts from an older state begins a new generation.

Readers take the newest commit by generation and step.  Suppose that a trainer starts at step 60 while step
220 is committed.  Under the same generation, its checkpoints would count only after step 220, and until then
the next VM would resume from a discarded state.  Under a new generation its first commit is the newest one.
Sets in staging that training did not continue from are *abandoned*: never committed, never resumed from.

The daemon judges a start by the first progress report on a connection, against the states that existed
before the connection.  The hello does not count: it may have been queued in the socket while training
continued.  A trainer without hooks is judged by the steps of its sets and the times of their files.  A job
over several VMs has a generation for each start anyway, see :mod:`swansongd.core.nodes`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from swansong import bounds

from swansongd.core import claims
from swansongd.core.events import (
    CancelFlush,
    ClaimGeneration,
    GenerationClaimed,
    SetAside,
    TellCommitted,
)
from swansongd.core.resume import ONE_START_S
from swansongd.core.state import State
from swansongd.core.transition import Transition
from swansongd.model import CheckpointKind, CommitRef, Staged, TrainerView, is_healthy


def record_found(transition: Transition, new: Sequence[Staged], *, is_first: bool) -> None:
    """A scan found these sets for the first time.

    Sets of the first scan are from earlier lives of this daemon, perhaps from an earlier boot.  An adopted
    set counts from the scan that first found its files, since it must settle after that.
    """
    first_mono_s = transition.state.first_scan_mono_s
    assert first_mono_s is not None
    old = [
        staged
        for staged in new
        if is_first or (staged.seen_mono_s is not None and staged.seen_mono_s <= first_mono_s)
    ]
    _inherit(transition, old)
    _sealed(transition, [staged for staged in new if staged not in old])


def _inherit(transition: Transition, present: Sequence[Staged]) -> None:
    state = transition.state
    transition.state = replace(
        transition.state, inherited=state.inherited | {staged.id for staged in present}
    )
    closed = frozenset(state.closed_starts)
    left = [s for s in present if s.id not in state.retained and not s.starts.isdisjoint(closed)]
    if left:
        _abandon(transition, left)
    doubtful = [
        s
        for s in present
        if not _is_durable(s)
        and s.id not in state.unusable
        and max((f.mtime_ns for f in s.files), default=0) < state.settings.booted_wall_ns
    ]
    for staged in doubtful:
        transition.log(
            "warning",
            "sealed_set_not_durable",
            directory=staged.directory,
            step=staged.id.step,
            reason="it was not flushed to the disk before the last boot, and may be torn",
        )
    unusable = transition.state.unusable | {staged.id for staged in doubtful}
    transition.state = replace(transition.state, unusable=unusable)


def _is_durable(staged: Staged) -> bool:
    """Whether the hooks flushed it to the disk before they sealed it."""
    return staged.framework == "swansong" and staged.kind is not CheckpointKind.EMERGENCY


# ---------------------------------------------------------------- starts

STARTS_MAX = 256
"""Number of starts that are remembered, however often a trainer starts."""


def record_start_id(transition: Transition, start_id: str) -> None:
    """Remember the id of a trainer's start."""
    if start_id and start_id not in transition.state.starts:
        transition.state = replace(
            transition.state, starts=(*transition.state.starts, start_id)[-STARTS_MAX:]
        )


def record_started(transition: Transition, trainer: TrainerView, *, before_mono_s: float) -> bool:
    """A trainer started at its ``start_step``; its own sets were found after ``before_mono_s``.

    Returns whether it started behind a state of this generation.
    """
    state, step = transition.state, trainer.start_step
    newest_step = _newest_step(state, before_mono_s)
    is_behind = newest_step is not None and step < newest_step
    if is_behind and state.settings.several_vms:
        # A job over several VMs has a generation for each start, unless it starts again under the same id.
        assert newest_step is not None
        _owe(transition, above=CommitRef(state.generation or 0, newest_step, is_final=True))
    elif is_behind:
        transition.log(
            "warning",
            "lineage_left",
            rank=trainer.rank,
            from_step=step,
            newest_step=newest_step,
            hint="training started before the newest state: a new generation begins",
        )
        # The trainer may have sealed sets since then: the newest commit was unknown during an outage.
        old = [staged for staged in state.staged if trainer.start_id not in staged.starts]
        # Its predecessor may still count as connected.  Each set carries the id of the start that sealed it.
        # After a restart of the daemon, the other ranks of the same start may connect later; and a rank that
        # connected at about the same time may have lost its connection for a moment.
        recent_mono_s = trainer.greeted_mono_s - ONE_START_S
        others = {
            t.start_id
            for t in state.trainers
            if t.rank != trainer.rank
            and (t.is_connected or t.is_of_earlier_life or t.greeted_mono_s >= recent_mono_s)
        }
        closed = [s for s in state.starts if s != trainer.start_id and s not in others]
        leave(transition, old, closed=closed)
    _note_older_commit(transition, step)
    return is_behind


def _judge_earlier_starts(transition: Transition) -> None:
    """The newest commit is known now: judge the trainers that started before."""
    for trainer in transition.state.trainers:
        if trainer.start_step >= 0:
            record_started(transition, trainer, before_mono_s=trainer.greeted_mono_s)


def _sealed(transition: Transition, new: Sequence[Staged]) -> None:
    """Sets that appeared after the first scan.

    Sets of a start whose line was left are abandoned: they can be sealed, or found, after that.  Sets of a
    trainer without hooks show the step at which it trains.
    """
    state = transition.state
    late = [staged for staged in new if not staged.starts.isdisjoint(state.closed_starts)]
    if late:
        _abandon(transition, late)
        state = transition.state
    if state.connected or state.settings.several_vms:
        return
    old = [s for s in state.staged if s.id not in state.unusable and s not in new]
    written_ns = max((file.mtime_ns for staged in old for file in staged.files), default=0)
    # A set can be recognised late.  A set of a new line was written after all known sets.
    fresh = [
        s
        for s in new
        if s.framework != "swansong" and s.files and min(f.mtime_ns for f in s.files) > written_ns
    ]
    if not fresh:
        return
    step = min(staged.id.step for staged in fresh)
    before_mono_s = min(state.seen[staged.id] for staged in fresh)
    known = [s for s in state.staged if s not in fresh]
    newest_step = _newest_step(state, math.nextafter(before_mono_s, -math.inf))
    if newest_step is not None and step < newest_step:
        transition.log(
            "warning",
            "lineage_left",
            from_step=step,
            newest_step=newest_step,
            hint="the trainer writes steps before the newest state: a new generation begins",
        )
        leave(transition, known, closed=state.starts)


def _newest_step(state: State, before_mono_s: float) -> int | None:
    """Step of the newest state of this generation, as of that instant; None without one."""
    steps = [
        staged.id.step
        for staged in state.staged
        if staged.id not in state.unusable
        and not state.is_covered(staged.id)
        and state.seen.get(staged.id, -math.inf) <= before_mono_s
    ]
    last, seen_mono_s = state.last_commit, state.last_commit_seen_mono_s
    if (
        last is not None
        and last.generation == state.generation
        and (seen_mono_s is None or seen_mono_s <= before_mono_s)
    ):
        steps.append(last.step)
    return max(steps, default=None)


def _note_older_commit(transition: Transition, step: int) -> None:
    """A commit of an earlier generation is ahead of the trainer: the trainer needs a commit soon."""
    state = transition.state
    last = state.last_commit
    if (
        last is not None
        and state.generation is not None
        and last.generation != state.generation
        and step < last.step
        and not state.owes_checkpoint
    ):
        _owe(transition, above=_end_of(last.generation))
        transition.log("warning", "started_behind_commit", from_step=step, newest_commit=str(last))


def _end_of(generation: int) -> CommitRef:
    """The last place in a generation."""
    return CommitRef(generation, bounds.STEP_MAX, is_final=True)


def _owe(transition: Transition, *, above: CommitRef) -> None:
    """Only a commit after this place is of the line on which training continues."""
    transition.state = replace(transition.state, owes_checkpoint=True, owed_above=above)


def is_payable(state: State) -> bool:
    """Whether the next checkpoint of the connected trainers would be a commit after the place of the debt."""
    step = max((trainer.step for trainer in state.connected), default=-1)
    return CommitRef(state.generation or 0, max(step, 0) + 1) > state.owed_above


def record_paid(transition: Transition, ref: CommitRef) -> None:
    """This commit is whole, and perhaps of the line on which training continues."""
    state = transition.state
    if not state.must_claim and ref > state.owed_above:
        transition.state = replace(state, owes_checkpoint=False)


def record_generation(transition: Transition, event: GenerationClaimed) -> None:
    """The committer claimed a generation and found the newest commit of the run."""
    state, newest = transition.state, event.newest
    is_known = newest == state.last_commit
    transition.state = replace(
        state,
        generation=event.generation,
        last_commit=newest,
        last_commit_mono_s=state.last_commit_mono_s if is_known else None,
        last_complete=newest,
        last_commit_seen_mono_s=None,
        overtaken_by=None,
    )
    if newest is not None:
        record_paid(transition, newest)  # by a daemon that was killed before it knew
        transition.do(TellCommitted(newest))
    # The daemon was restarted before it could claim a generation for the line on which training continues.
    above = state.owed_above
    has_not_claimed = (
        state.owes_checkpoint
        and above == _end_of(above.generation)
        and event.generation <= above.generation
    )
    if state.must_claim or has_not_claimed:
        _claim_again(transition, event.generation)
    elif not event.is_rollback:
        _judge_earlier_starts(transition)
    else:
        for trainer in transition.state.trainers:
            if trainer.start_step >= 0:
                _note_older_commit(transition, trainer.start_step)


# ---------------------------------------------------------------- the end of a line


def leave(
    transition: Transition, abandoned: Collection[Staged], *, closed: Collection[str]
) -> None:
    """End the line of states: abandon these sets and claim a new generation.

    Args:
        abandoned: sets that do not belong to the next line.
        closed: starts of trainers whose further sets do not belong to it either.
    """
    state = transition.state
    if state.flight is not None:
        transition.do(CancelFlush(state.flight.flush_id))
    transition.state = replace(
        transition.state,
        flight=None,
        stored=(),
        generation=None,
        healthy_commit=None,
        periodic=None,
        inherited=frozenset(),
        retained=frozenset(),
    )
    close(transition, closed)
    last = state.last_commit
    generation = max(state.generation or 0, 0 if last is None else last.generation)
    _owe(transition, above=_end_of(generation))
    _abandon(transition, abandoned)
    _claim(transition, state.generation)


def close(transition: Transition, starts: Collection[str]) -> None:
    """Abandon all sets of these starts that are found from here on."""
    known = dict.fromkeys((*transition.state.closed_starts, *starts))
    transition.state = replace(transition.state, closed_starts=tuple(known)[-STARTS_MAX:])


def _abandon(transition: Transition, sets: Collection[Staged]) -> None:
    ids = frozenset(staged.id for staged in sets)
    transition.state = replace(
        transition.state,
        unusable=transition.state.unusable | ids,
        abandoned=transition.state.abandoned | ids,
    )
    own = tuple(staged.directory for staged in sets if staged.framework == "swansong")
    if own:
        transition.state = replace(transition.state, has_aside=True)
        transition.do(SetAside(own))


def _claim(transition: Transition, generation: int | None) -> None:
    due = transition.state.claim_due
    if generation is None and isinstance(due, ClaimGeneration):
        generation = due.after
    if generation is None:
        transition.state = replace(
            transition.state, must_claim=True
        )  # the claim in flight may be of the line that was left
    else:
        claims.set_due(
            transition, ClaimGeneration(generation, tuple(sorted(transition.state.abandoned)))
        )


def _claim_again(transition: Transition, generation: int) -> None:
    """Training left the line before its generation was claimed: claim the next one."""
    transition.state = replace(transition.state, must_claim=False, generation=None)
    _owe(transition, above=max(_end_of(generation), transition.state.owed_above))
    _claim(transition, generation)


def record_rolled_back(transition: Transition, step: int) -> None:
    """A trainer rolled back to the healthy checkpoint of ``step`` without ending."""
    state = transition.state
    # The state from which training continues is committed again, as the first one of the new generation.
    retained = [s for s in state.staged if s.id.step == step and is_healthy(s.health)]
    later = [staged for staged in state.staged if staged.id.step > step]
    transition.log("warning", "rolled_back", to_step=step, sets_dropped=len(later))
    # The ranks that rolled back have other start ids from here on.
    leave(
        transition,
        [staged for staged in state.staged if staged not in retained],
        closed=state.starts,
    )
    trainers = tuple(replace(t, step=min(t.step, step)) for t in state.trainers)
    transition.state = replace(
        transition.state,
        trainers=trainers,
        retained=frozenset(staged.id for staged in retained),
        periodic_mono_s=transition.now,  # the hooks save at the next step without a request
    )
