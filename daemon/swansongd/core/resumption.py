# SPDX-License-Identifier: Apache-2.0
"""The facts from which the preemption loss is computed, see :mod:`swansongd.observe.loss`.

The milestones of a resume are recorded in the store once, with the first new step.  The end of the training,
and the time for which checkpoints held it up, go into each farewell.  An evacuation that has a verdict gets
one more farewell just before the VM ends, because training continues after the verdict.  If the VM outlives
the deadline, which may be assumed, further ones follow.

No decision depends on these facts.
"""

from __future__ import annotations

from dataclasses import replace

from swansongd.core import resume
from swansongd.core.events import (
    Conclude,
    DownloadEnded,
    LastFarewell,
    RecordResumption,
    RestoreAnswered,
    TrainerProgress,
    TrainerSealed,
)
from swansongd.core.ledger import Milestones
from swansongd.core.state import CheckpointRequest, Evacuation
from swansongd.core.transition import HOST_SOURCE, Transition
from swansongd.model import CommitRef

PART_S = 2.0
"""The last farewell is written this long before the deadline.  It is one small request."""

AGAIN_S = 1.0
"""After the deadline it is written again at this interval.  Ranks report once a second."""

# ---------------------------------------------------------------- milestones


def record_download_started(transition: Transition) -> None:
    """The first download since the last resume counts; the others are retries or for other ranks."""
    milestones = transition.state.milestones
    if milestones.download_began_mono_s is None:
        _reached(transition, download_began_mono_s=transition.now)


def record_download_ended(transition: Transition, event: DownloadEnded) -> None:
    """The download ended; a failed one is retried."""
    milestones = transition.state.milestones
    if event.error:
        return
    _reached(
        transition,
        download_ended_mono_s=transition.now,
        bytes_fetched=milestones.bytes_fetched + event.bytes_fetched,
        bytes_linked=milestones.bytes_linked + event.bytes_linked,
    )


def record_asked(transition: Transition) -> None:
    """The first question of a start counts; a trainer may start again before its first step."""
    answered = transition.state.milestones.answered_mono_s
    if answered is not None and not resume.is_one_start(answered, transition.now):
        _reached(transition, asked_mono_s=None, answered_mono_s=None, restored=None)
    if transition.state.milestones.asked_mono_s is None:
        _reached(transition, asked_mono_s=transition.now)


def record_answered(transition: Transition, event: RestoreAnswered) -> None:
    """The last answer of a start counts."""
    if event.error:
        return
    is_commit = event.step >= 0 and event.generation >= 0
    restored = CommitRef(event.generation, event.step) if is_commit else None
    _reached(transition, answered_mono_s=transition.now, restored=restored)


def record_line_left(transition: Transition) -> None:
    """Training will start again under another generation: the start so far does not count for it."""
    _reached(transition, started_mono_s=None, start_step=-1, first_step=-1, first_step_mono_s=None)


def record_started(transition: Transition, event: TrainerProgress) -> None:
    """A rank reported the start of its training."""
    if not event.start_id:
        return
    _reached(
        transition,
        started_mono_s=transition.now,
        start_step=max(0, event.step),
        first_step=-1,
        first_step_mono_s=None,
    )
    _trains(transition, step=event.step, mono_s=transition.now)


def record_progress(transition: Transition, event: TrainerProgress) -> None:
    """A rank reported its step."""
    if not event.start_id:
        record_step(transition, event.step)
    _record_ranks(transition)
    _record_standstill(transition, event)


def _reached(transition: Transition, **facts: object) -> None:
    milestones = replace(transition.state.milestones, **facts)  # type: ignore[arg-type]
    transition.state = replace(transition.state, milestones=milestones)


# ---------------------------------------------------------------- the training so far


def record_step(transition: Transition, step: int) -> None:
    """A rank has completed this step, whichever message reports it."""
    if step > transition.state.training.step:
        _trains(transition, step=step, mono_s=transition.now)
    milestones = transition.state.milestones
    has_started = milestones.started_mono_s is not None
    if has_started and milestones.first_step < 0 and step > milestones.start_step:
        _reached(transition, first_step=step, first_step_mono_s=transition.now)


def record_sealed(transition: Transition, event: TrainerSealed) -> None:
    """A rank has saved: its next report has the time for which training stood still."""
    record_step(transition, event.step)
    if event.connection == _first_connection(transition):
        _trains(transition, is_saving=True)


def record_left(transition: Transition) -> None:
    """A rank's connection ended; training is over once no rank is left."""
    training = transition.state.training
    _trains(transition, is_over=training.step >= 0 and not transition.state.trainers)


def _record_ranks(transition: Transition) -> None:
    trainers = transition.state.trainers
    if not trainers:
        return
    known_s = [t.step_s for t in trainers if t.step_s is not None]
    _trains(
        transition,
        is_over=False,
        step_s=max(known_s, default=transition.state.training.step_s),
        ranks=trainers[0].world_size,
        node=trainers[0].node,
        nodes=trainers[0].nodes,
    )


def _record_standstill(transition: Transition, event: TrainerProgress) -> None:
    is_first = event.connection == _first_connection(transition)
    if transition.state.training.is_saving and is_first and event.snapshot_s is not None:
        _trains(transition, is_saving=False)
        _stood_still(transition, event.snapshot_s)


def _stood_still(transition: Transition, for_s: float) -> None:
    training, evacuation = transition.state.training, transition.state.evacuation
    if evacuation is None or evacuation.is_precaution:
        _trains(transition, saves_s=training.saves_s + for_s)
    else:
        _trains(transition, stall_s=training.stall_s + for_s)


def _first_connection(transition: Transition) -> int:
    """The connection of the first rank of this VM, which stands for all: they train in lockstep."""
    first = min(transition.state.trainers, key=lambda trainer: trainer.rank, default=None)
    return -1 if first is None else first.connection


def _trains(transition: Transition, **facts: object) -> None:
    training = replace(transition.state.training, **facts)  # type: ignore[arg-type]
    transition.state = replace(transition.state, training=training)


# ---------------------------------------------------------------- what is missing


def reconcile(transition: Transition) -> None:
    """Measure agreements, record a resume once, and write the last farewell of an evacuation."""
    _begin_evacuation(transition)
    _measure_agreement(transition)
    _record_resumption(transition)
    _part(transition)


def _begin_evacuation(transition: Transition) -> None:
    """The time of earlier evacuations, which the VM has outlived, counts as that of other checkpoints."""
    evacuation, training = transition.state.evacuation, transition.state.training
    if evacuation is None or evacuation.is_precaution or evacuation.id == training.evacuation_id:
        return
    _trains(
        transition,
        evacuation_id=evacuation.id,
        saves_s=training.saves_s + training.stall_s,
        stall_s=0.0,
    )


def _measure_agreement(transition: Transition) -> None:
    """Ranks stand still from their acceptance of a request until they get its target."""
    waiting = transition.state.training.waiting
    request = next((r for r in transition.waiting_requests if _holds_ranks(r)), None)
    if waiting is not None and (request is None or request.request_id != waiting[0]):
        _trains(transition, waiting=None)
        _stood_still(transition, max(0.0, transition.now - waiting[1]))
    if request is not None and transition.state.training.waiting is None:
        _trains(transition, waiting=(request.request_id, transition.now))


def _holds_ranks(request: CheckpointRequest) -> bool:
    return bool(request.accepted) and request.target is None


def _record_resumption(transition: Transition) -> None:
    """Record a resume once, with the report of its first new step: the power may be cut right after it."""
    state = transition.state
    generation, milestones = state.generation, state.milestones
    if generation is None or generation == state.recorded or milestones.first_step < 0:
        return
    made = _backdated(milestones, state.training.step_s)
    transition.do(RecordResumption(generation, made, state.training))
    transition.state = replace(state, recorded=generation, milestones=Milestones())


def _backdated(milestones: Milestones, step_s: float | None) -> Milestones:
    """The first new step: hooks report it at once, and a few steps may be over by then.

    If the duration of a step is unknown, all of them count as equally long.
    """
    started_mono_s = milestones.started_mono_s or 0.0
    reported_mono_s = milestones.first_step_mono_s
    assert reported_mono_s is not None
    steps = milestones.first_step - milestones.start_step
    pace_s = (reported_mono_s - started_mono_s) / steps if step_s is None else step_s
    first_mono_s = max(started_mono_s, reported_mono_s - (steps - 1) * pace_s)
    return replace(milestones, first_step=milestones.start_step + 1, first_step_mono_s=first_mono_s)


def _part(transition: Transition) -> None:
    """Training continues after the verdict: report its last step as late as is safe.

    A VM that outlives its deadline reports each later step too, because its end is unknown.
    """
    state, evacuation = transition.state, transition.state.evacuation
    if evacuation is None or evacuation.verdict is None:
        return
    if evacuation.id == state.parted and not _is_due_again(transition, evacuation):
        return
    # In the reserve no further checkpoint begins, so no manifest can wait behind this farewell.
    is_near = transition.left_s <= min(PART_S, state.settings.reserve_s)
    is_ending = HOST_SOURCE in state.notices or is_near
    is_waiting = any(request.is_waiting for request in evacuation.requests_made)
    is_busy = state.flight is not None or bool(state.stored) or is_waiting
    if not is_ending or is_busy or state.last_verdict is None:
        return
    transition.state = replace(
        state, parted=evacuation.id, parted_step=state.training.step, parted_mono_s=transition.now
    )
    if any(isinstance(action, Conclude) for action in transition.actions):
        return  # its farewell has the same step
    transition.do(
        LastFarewell(
            Conclude(
                evacuation.id,
                evacuation.verdict,
                state.last_verdict.reason,
                state.last_complete,
                round(transition.left_s, 2),
                state.part,
                is_final=False,
                expected_s=state.last_verdict.expected_s,
                took_s=state.last_verdict.took_s,
            )
        )
    )


def _is_due_again(transition: Transition, evacuation: Evacuation) -> bool:
    state = transition.state
    is_late = transition.now >= max(evacuation.deadline_mono_s, state.parted_mono_s + AGAIN_S)
    return is_late and state.training.step > state.parted_step
