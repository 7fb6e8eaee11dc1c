# SPDX-License-Identifier: Apache-2.0
"""The trainer's ranks on this VM: their connections, their steps and their measurements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from swansong.protocol import Committed
from swansong_bucket.model import MEASURES, UNKNOWN_PARENT, CommitRef, TrainerView, measures_of

from swansongd.core.events import Rescan, Send, TrainerFailed, TrainerLeft, TrainerProgress
from swansongd.core.transition import Transition

SMOOTHING = 0.2
"""Weight of the newest report in the usual step time."""
LEFT_BEHIND_MAX = 64
"""Processes of earlier jobs that are remembered."""


def record_joined(transition: Transition, trainer: TrainerView) -> None:
    """A rank connected, for the first time or again."""
    state = transition.state
    others = [t for t in state.ranks.trainers if t.pid != trainer.pid]
    earlier = [t for t in others if _is_of_other_job(t, trainer)]
    left_behind = [t for t in state.ranks.left_behind if t.pid != trainer.pid]
    left_behind = [*left_behind, *earlier][-LEFT_BEHIND_MAX:]
    others = [t for t in others if t not in earlier]
    known = next((t for t in state.ranks.trainers if t.process == trainer.process), None)
    if known is not None:
        trainer = replace(trainer, start_step=known.start_step)
    _put(transition, (*others, trainer), left_behind)
    record_changed(transition)
    newest = state.commits.last_complete
    if newest is not None:  # perhaps committed while the rank was not connected
        tell_committed(transition, newest, (trainer.connection,))


def tell_committed(
    transition: Transition, newest: CommitRef, connections: tuple[int, ...] | None = None
) -> None:
    """Tell the ranks which whole commit is the newest."""
    told = Committed(newest.generation, newest.step, newest.is_final)
    transition.do(Send(told, connections))


def _is_of_other_job(other: TrainerView, trainer: TrainerView) -> bool:
    """Whether the other process belongs to an earlier job with another number of ranks.

    One without a connection may hang in the kernel and never end: it must not count as a rank of this job.
    """
    is_other = (other.world_size, other.nodes) != (trainer.world_size, trainer.nodes)
    return is_other and not other.is_connected


def record_left(transition: Transition, event: TrainerLeft) -> None:
    """The connection of a rank ended, perhaps with its process."""
    ranks = transition.state.ranks
    gone = ranks.on(event.connection)
    trainers = [t for t in ranks.trainers if t is not gone]
    if gone is not None and not event.exited:
        trainers.append(replace(gone, is_connected=False))
    left_behind = [t for t in ranks.left_behind if t.connection != event.connection]
    is_known = gone is not None or len(left_behind) < len(ranks.left_behind)
    _put(transition, trainers, left_behind)
    if event.exited and is_known:
        record_changed(transition)


def record_changed(transition: Transition) -> None:
    """The proof of an evacuation needs all sets that were sealed before this change of ranks or staging."""
    if transition.state.evacuation is not None:
        changed = replace(transition.state.ranks, changed_mono_s=transition.now)
        transition.state = replace(transition.state, ranks=changed)
        transition.do(Rescan())


def record_progress(transition: Transition, event: TrainerProgress) -> None:
    """A rank reported its step and its measurements."""
    _record_start(transition, event)
    record_measures(transition, event)


def _record_start(transition: Transition, event: TrainerProgress) -> None:
    """The first report of a connection, and each report of another start, has the first step of training."""
    trainer = transition.state.ranks.on(event.connection)
    is_placed = trainer is not None and trainer.start_step >= 0
    if trainer is None or event.step < 0 or (is_placed and not event.start_id):
        return
    placed = replace(trainer, start_step=event.step, step=max(trainer.step, event.step))
    if event.start_id:
        placed = replace(placed, start_id=event.start_id, parent=event.parent, step=event.step)
    update(transition, placed)


def record_begun(transition: Transition, connection: int, start_id: str) -> None:
    """A rank belongs to a start that begins now, and has yet to report what it loads."""
    trainer = transition.state.ranks.on(connection)
    if trainer is not None:
        update(transition, replace(trainer, start_id=start_id, parent=UNKNOWN_PARENT))


def record_asking(transition: Transition, connection: int, at_step: int) -> None:
    """A rank got SIGTERM, and asks for a last checkpoint."""
    trainer = transition.state.ranks.on(connection)
    if trainer is not None:
        step = max(trainer.step, at_step)
        update(transition, replace(trainer, asks_for_request=True, step=step))


def record_measures(transition: Transition, event: TrainerProgress) -> None:
    """Update the measurements of a rank; a value that the event lacks stays as it was."""
    trainer = transition.state.ranks.on(event.connection)
    if trainer is None:
        return
    known = {name: value for name, value in measures_of(event).items() if value is not None}
    if event.loss_is_finite is not None:
        known["loss"] = event.loss  # None if it is not finite
    known["step_s"] = usual_step_s(trainer.step_s, event.step_s)
    step = max(trainer.step, event.step)
    updated = replace(trainer, step=step, reported_mono_s=transition.now, **known)
    if event.loss_is_finite is False and trainer.loss_is_finite is not False:
        transition.log("warning", "loss_not_finite", rank=trainer.rank, step=event.step)
    elif event.loss_is_usual is False and trainer.loss_is_usual is not False:
        transition.log(
            "warning", "loss_not_usual", rank=trainer.rank, step=event.step, loss=event.loss
        )
    update(transition, updated)


def usual_step_s(known_s: float | None, reported_s: float | None) -> float | None:
    """The usual time of a step after one more report."""
    if reported_s is None or known_s is None:
        return known_s if reported_s is None else reported_s
    return known_s + SMOOTHING * (reported_s - known_s)


def record_save_failed(transition: Transition, event: TrainerFailed) -> None:
    """Log a checkpoint that failed: each of its ranks may report another reason."""
    if event.failed_step is not None:
        trainer = transition.state.ranks.on(event.connection)
        rank = None if trainer is None else trainer.rank
        transition.log(
            "warning", "save_failed", rank=rank, step=event.failed_step, reason=event.reason
        )


def forget_reports(transition: Transition) -> None:
    """Forget what the ranks have reported; their processes are known from the kernel."""
    nothing: dict[str, Any] = dict.fromkeys(MEASURES)
    left = (
        replace(trainer, reported_mono_s=None, **nothing)
        for trainer in transition.state.ranks.trainers
    )
    _put(transition, left)


def update(transition: Transition, trainer: TrainerView) -> None:
    """Replace what is known of a connected rank."""
    known = transition.state.ranks.trainers
    _put(transition, (trainer if t.connection == trainer.connection else t for t in known))


def _put(
    transition: Transition,
    trainers: Iterable[TrainerView],
    left_behind: Iterable[TrainerView] | None = None,
) -> None:
    ranks = replace(transition.state.ranks, trainers=tuple(trainers))
    if left_behind is not None:
        ranks = replace(ranks, left_behind=tuple(left_behind))
    transition.state = replace(transition.state, ranks=ranks)
