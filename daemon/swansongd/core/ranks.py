# SPDX-License-Identifier: Apache-2.0
"""The trainer's ranks on this VM: their connections, their steps and their measurements."""

from __future__ import annotations

from dataclasses import replace

from swansongd.core import emergency, request, stall, starts
from swansongd.core.events import (
    TellCommitted,
    TrainerFailed,
    TrainerLeft,
    TrainerProgress,
)
from swansongd.core.state import (
    FailedSaves,
)
from swansongd.core.transition import Transition
from swansongd.model import (
    TrainerView,
)


def record_joined(transition: Transition, trainer: TrainerView) -> None:
    """A rank connected, for the first time or again."""
    state = transition.state
    others = tuple(
        t for t in state.trainers if t.pid != trainer.pid and not _is_of_other_job(t, trainer)
    )
    process = (trainer.pid, trainer.process_start)
    known = next((t for t in state.trainers if (t.pid, t.process_start) == process), None)
    if known is not None:
        trainer = replace(
            trainer,
            start_step=known.start_step,
            start_id=trainer.start_id or known.start_id,
        )
    if not state.connected:
        transition.state = replace(transition.state, joined_mono_s=transition.now)
    transition.state = replace(transition.state, trainers=(*others, trainer))
    if state.last_complete is not None:  # perhaps committed while the rank was not connected
        transition.do(TellCommitted(state.last_complete, (trainer.connection,)))
    starts.record_joined(transition, trainer)
    request.record_joined(transition, trainer.connection, trainer.rank)


def _is_of_other_job(other: TrainerView, trainer: TrainerView) -> bool:
    """Whether the other process belongs to an earlier job with another number of ranks.

    One without a connection may hang in the kernel and never end: it must not count as a rank of this job.
    """
    is_other = (other.world_size, other.nodes) != (trainer.world_size, trainer.nodes)
    return is_other and not other.is_connected


def record_refused(transition: Transition, reason: str) -> None:
    """A process was refused because another one has its rank."""
    transition.state = replace(
        transition.state,
        ranks_refused=transition.state.ranks_refused + 1,
        refused_why=reason,
        refused_mono_s=transition.now,
    )


def record_left(transition: Transition, event: TrainerLeft) -> None:
    """The connection of a rank ended, perhaps with its process."""
    state = transition.state
    gone = next((t for t in state.trainers if t.connection == event.connection), None)
    if gone is None:
        return
    others = tuple(t for t in state.trainers if t.connection != event.connection)
    if not event.exited:
        away = replace(gone, is_connected=False, left_mono_s=transition.now)
        transition.state = replace(state, trainers=(*others, away))
        return
    transition.state = replace(transition.state, trainers=others)
    if event.is_goodbye:
        starts.record_ended(transition, gone)
    emergency.record_rank_ended(transition, gone.rank)


def record_progress(transition: Transition, event: TrainerProgress) -> None:
    """A rank reported its step and its measurements."""
    _record_start(transition, event)
    record_measures(transition, event)


def _record_start(transition: Transition, event: TrainerProgress) -> None:
    """The first report of a connection, and each report of another start, has the first step of training."""
    trainer = next((t for t in transition.state.trainers if t.connection == event.connection), None)
    is_placed = trainer is not None and trainer.start_step >= 0
    if trainer is None or event.step < 0 or (is_placed and not event.start_id):
        return
    placed = replace(trainer, start_step=event.step, step=max(trainer.step, event.step))
    if event.start_id:
        placed = replace(placed, start_id=event.start_id, parent=event.parent, step=event.step)
    others = (t for t in transition.state.trainers if t is not trainer)
    transition.state = replace(transition.state, trainers=(*others, placed))
    if event.start_id:
        starts.record_member(transition, placed)
        starts.record_started(transition, event.start_id)


def record_measures(transition: Transition, event: TrainerProgress) -> None:
    """Update the measurements of a rank; a value that the event lacks stays as it was."""
    trainers = transition.state.trainers
    trainer = next((t for t in trainers if t.connection == event.connection), None)
    if trainer is None:
        return
    newest = trainer if event.loss_is_finite is None else event
    updated = replace(
        trainer,
        step=max(trainer.step, event.step),
        save_s=trainer.save_s if event.save_s is None else event.save_s,
        save_bytes=trainer.save_bytes if event.save_bytes is None else event.save_bytes,
        snapshot_s=trainer.snapshot_s if event.snapshot_s is None else event.snapshot_s,
        step_s=stall.usual_step_s(trainer.step_s, event.step_s),
        loss=newest.loss,
        loss_is_finite=newest.loss_is_finite,
        reported_mono_s=transition.now,
    )
    if event.loss_is_finite is False and trainer.loss_is_finite is not False:
        transition.log("warning", "loss_not_finite", rank=trainer.rank, step=event.step)
    everyone = tuple(updated if t is trainer else t for t in trainers)
    transition.state = replace(transition.state, trainers=everyone)


def record_save_failed(transition: Transition, event: TrainerFailed) -> None:
    """Count and log a checkpoint that failed, once although each of its ranks reports it."""
    if event.failed_step is None:
        return
    before = transition.state.failed_saves
    rank = next(
        (t.rank for t in transition.state.trainers if t.connection == event.connection), None
    )
    failed = FailedSaves(
        before.count + 1, event.request_id, event.failed_step, rank, event.reason, transition.now
    )
    if (failed.request_id, failed.step) == (before.request_id, before.step):
        return
    transition.state = replace(transition.state, failed_saves=failed)
    transition.log(
        "warning",
        "save_failed",
        rank=rank,
        step=failed.step,
        reason=failed.reason,
        failed_saves=failed.count,
    )
