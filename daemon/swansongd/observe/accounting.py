# SPDX-License-Identifier: Apache-2.0
"""An observer that collects the facts of the preemption loss, see :mod:`swansong_tools.economics.loss`.

The milestones of a resume are recorded in the store once, with the first new step.  The end of the training,
and the time for which checkpoints held it up, go into each farewell.  An evacuation that has a verdict gets
one more farewell just before the VM ends, because training continues after the verdict.  If the VM outlives
the deadline, which may be assumed, further ones follow.

No decision depends on these facts.  Instants called ``*_mono_s`` are of this VM's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swansong_bucket.loss_records import LastReport
from swansong_bucket.model import CommitRef

from swansongd.core.events import (
    Action,
    Conclude,
    RestoreAsked,
    StopRequested,
    TrainerAccepted,
    TrainerLeft,
    TrainerProgress,
    TrainerSealed,
)
from swansongd.core.state import CheckpointRequest, State
from swansongd.core.transition import HOST_SOURCE
from swansongd.observe.facts import DownloadEnded, DownloadStarted, Observed, RestoreAnswered
from swansongd.observe.observer import Observation
from swansongd.observe.timeline import is_settled

LAST_FAREWELL_LEAD_S = 2.0
"""The last farewell is written this long before the deadline.  It is one small request."""

LAST_FAREWELL_REPEAT_S = 1.0
"""After the deadline it is written again at this interval.  Ranks report once a second."""

_ONE_START_S = 60.0
"""A question within this time of an answer is from a rank of the same start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestones:
    """How far this VM has come from its start to the first new step; None: not reached, or not seen."""

    download_began_mono_s: float | None = None
    download_ended_mono_s: float | None = None
    bytes_fetched: int = 0
    bytes_linked: int = 0
    """Bytes of the checkpoint that this machine already had."""
    asked_mono_s: float | None = None
    answered_mono_s: float | None = None
    restored: CommitRef | None = None
    """The answer's checkpoint; None for a fresh run, and for a set in staging without a generation."""
    started_mono_s: float | None = None
    """When the training reported its start; the checkpoint is loaded by then."""
    start_step: int = -1
    first_step: int = -1
    """The first step that was reported after the start."""
    first_step_mono_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The progress of the training on this VM; it outlasts the trainers' processes."""

    step: int = -1
    """Newest completed step that a rank reported; -1 before the first."""
    mono_s: float = 0.0
    """When that was."""
    step_s: float | None = None
    """Usual duration of a step."""
    ranks: int = 1
    """World size of the job, which counts as its number of GPUs."""
    node: int = 0
    nodes: int = 1
    saves_s: float = 0.0
    """Time for which training stood still for checkpoints, without those of the newest evacuation."""
    stall_s: float = 0.0
    """Time for which training stood still for the checkpoints of the newest evacuation."""
    evacuation_id: str = ""
    """That evacuation."""
    waiting: tuple[str, float] | None = None
    """Request whose target the ranks wait for, and since when."""
    is_saving: bool = False
    """A rank has sealed, and its next report has the time for which it stood still."""
    is_over: bool = False
    """All ranks have ended."""


@dataclass(frozen=True, slots=True)
class MeasuredResume:
    """A resume up to its first new step, as this VM measured it."""

    generation: int
    milestones: Milestones
    training: Training


@dataclass(frozen=True, slots=True, kw_only=True)
class _LastFarewell:
    """The newest last farewell."""

    evacuation_id: str = ""
    step: int = -1
    mono_s: float = 0.0
    """When it was written."""


class Accounting:
    """Collects the milestones of each resume and the progress of the training.  For one thread.

    Args:
        record_resume: called with each resume, once, as soon as its first new step is known.
        write_farewell: called for each last farewell, with the conclusion to repeat and the instant.  The
            evacuation has announced its verdict already.
    """

    def __init__(
        self,
        record_resume: Callable[[MeasuredResume], None],
        write_farewell: Callable[[Conclude, float], None],
    ) -> None:
        self._record_resume = record_resume
        self._write_farewell = write_farewell
        self._milestones = Milestones()
        self._recorded_generation: int | None = None
        self._start_id = ""
        """The newest start of the training."""
        self._last_farewell = _LastFarewell()
        self.training = Training()
        """The training so far.  Replaced with each report, so any thread may read it."""

    def record(self, before: State, after: State, event: Observed, now_mono_s: float) -> None:
        """Take the facts of one event.

        Call it before the actions of the event are carried out: a farewell among them reports the training.

        Raises:
            Exception: a fault of ours.  The facts so far are dropped, since they may have caused it.
        """
        if before.course.is_leaving:
            return
        try:
            self._record_start(after)
            self._record(after, event, now_mono_s)
            self._begin_evacuation(after)
            self._measure_agreement(after, now_mono_s)
        except Exception:
            self._milestones, self.training = Milestones(), Training()
            raise

    def observe(self, observation: Observation) -> None:
        """Record a resume once, and write the last farewell of an evacuation when it is due."""
        before, after, event, actions, now_mono_s = observation
        is_ending = isinstance(event, StopRequested) or after.starts.fenced_by is not None
        if before.course.is_leaving or is_ending:
            return
        self._report_resume(after)
        self._report_end(after, actions, now_mono_s)

    # ------------------------------------------------------------------ facts

    def _record(self, state: State, event: Observed, now_mono_s: float) -> None:
        match event:
            case DownloadStarted():
                # The first one since the last resume counts; the others are retries or for other ranks.
                if self._milestones.download_began_mono_s is None:
                    self._reached(download_began_mono_s=now_mono_s)
            case DownloadEnded():
                self._record_download(event, now_mono_s)
            case RestoreAsked():
                self._record_asked(now_mono_s)
            case RestoreAnswered():
                self._record_answered(event, now_mono_s)
            case TrainerProgress():
                self._record_progress(state, event, now_mono_s)
            case TrainerAccepted(step=step):
                self._record_step(step, now_mono_s)
            case TrainerSealed(connection=connection, step=step):
                self._record_step(step, now_mono_s)
                if connection == _first_connection(state):
                    self._trains(is_saving=True)
            case TrainerLeft():
                self._trains(is_over=self.training.step >= 0 and not state.ranks.trainers)
            case _:
                pass

    def _record_start(self, state: State) -> None:
        """Training starts again: reports of the start before, also late ones, do not count for this one."""
        start_id = "" if state.start is None else state.start.id
        if start_id != self._start_id:
            self._start_id = start_id
            self._reached(started_mono_s=None, start_step=-1, first_step=-1, first_step_mono_s=None)

    def _record_download(self, event: DownloadEnded, now_mono_s: float) -> None:
        """The download ended; a failed one is retried."""
        if event.error:
            return
        milestones = self._milestones
        self._reached(
            download_ended_mono_s=now_mono_s,
            bytes_fetched=milestones.bytes_fetched + event.bytes_fetched,
            bytes_linked=milestones.bytes_linked + event.bytes_linked,
        )

    def _record_asked(self, now_mono_s: float) -> None:
        """The first question of a start counts; a trainer may start again before its first step."""
        answered_mono_s = self._milestones.answered_mono_s
        if answered_mono_s is not None and now_mono_s - answered_mono_s >= _ONE_START_S:
            self._reached(asked_mono_s=None, answered_mono_s=None, restored=None)
        if self._milestones.asked_mono_s is None:
            self._reached(asked_mono_s=now_mono_s)

    def _record_answered(self, event: RestoreAnswered, now_mono_s: float) -> None:
        """The last answer of a start counts."""
        if event.error:
            return
        is_commit = event.step >= 0 and event.generation >= 0
        restored = CommitRef(event.generation, event.step) if is_commit else None
        self._reached(answered_mono_s=now_mono_s, restored=restored)

    def _record_progress(self, state: State, event: TrainerProgress, now_mono_s: float) -> None:
        """A rank reported the start of its training, or its step."""
        if event.start_id:
            self._reached(
                started_mono_s=now_mono_s,
                start_step=max(0, event.step),
                first_step=-1,
                first_step_mono_s=None,
            )
            self._trains(step=event.step, mono_s=now_mono_s)
        else:
            self._record_step(event.step, now_mono_s)
        self._record_ranks(state)
        is_first = event.connection == _first_connection(state)
        if self.training.is_saving and is_first and event.snapshot_s is not None:
            self._trains(is_saving=False)
            self._stood_still(state, event.snapshot_s)

    def _record_step(self, step: int, now_mono_s: float) -> None:
        """A rank has completed this step, whichever message reports it."""
        if step > self.training.step:
            self._trains(step=step, mono_s=now_mono_s)
        milestones = self._milestones
        has_started = milestones.started_mono_s is not None
        if has_started and milestones.first_step < 0 and step > milestones.start_step:
            self._reached(first_step=step, first_step_mono_s=now_mono_s)

    def _record_ranks(self, state: State) -> None:
        trainers = state.ranks.trainers
        if not trainers:
            return
        known_s = [t.step_s for t in trainers if t.step_s is not None]
        self._trains(
            is_over=False,
            step_s=max(known_s, default=self.training.step_s),
            ranks=trainers[0].world_size,
            node=trainers[0].node,
            nodes=trainers[0].nodes,
        )

    def _begin_evacuation(self, state: State) -> None:
        """The time of earlier evacuations, which the VM has outlived, counts as that of other checkpoints."""
        evacuation, training = state.evacuation, self.training
        if evacuation is None or evacuation.is_precaution:
            return
        if evacuation.id != training.evacuation_id:
            saves_s = training.saves_s + training.stall_s
            self._trains(evacuation_id=evacuation.id, saves_s=saves_s, stall_s=0.0)

    def _measure_agreement(self, state: State, now_mono_s: float) -> None:
        """Ranks stand still from their acceptance of a request until they get its target."""
        waiting, request = self.training.waiting, _holding_ranks(state)
        if waiting is not None and (request is None or request.request_id != waiting[0]):
            self._trains(waiting=None)
            self._stood_still(state, max(0.0, now_mono_s - waiting[1]))
        if request is not None and self.training.waiting is None:
            self._trains(waiting=(request.request_id, now_mono_s))

    def _stood_still(self, state: State, for_s: float) -> None:
        training, evacuation = self.training, state.evacuation
        if evacuation is None or evacuation.is_precaution:
            self._trains(saves_s=training.saves_s + for_s)
        else:
            self._trains(stall_s=training.stall_s + for_s)

    def _reached(self, **facts: object) -> None:
        self._milestones = replace(self._milestones, **facts)  # type: ignore[arg-type]

    def _trains(self, **facts: object) -> None:
        self.training = replace(self.training, **facts)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ reports

    def _report_resume(self, state: State) -> None:
        """Record a resume once, with the report of its first new step: the power may be cut soon after."""
        generation, milestones = state.generation, self._milestones
        if generation is None or generation == self._recorded_generation:
            return
        if milestones.first_step < 0:
            return
        self._recorded_generation, self._milestones = generation, Milestones()
        made = _backdated(milestones, self.training.step_s)
        self._record_resume(MeasuredResume(generation, made, self.training))

    def _report_end(self, state: State, actions: Sequence[Action], now_mono_s: float) -> None:
        """Training continues after the verdict: report its last step as late as is safe.

        A VM that outlives its deadline reports each later step too, because its end is unknown.
        """
        conclusion = self._last_conclusion(state, now_mono_s)
        if conclusion is None:
            return
        self._last_farewell = _LastFarewell(
            evacuation_id=conclusion.evacuation_id, step=self.training.step, mono_s=now_mono_s
        )
        # A conclusion among the actions has written a farewell with the same step.
        if not any(isinstance(action, Conclude) for action in actions):
            self._write_farewell(conclusion, now_mono_s)

    def _last_conclusion(self, state: State, now_mono_s: float) -> Conclude | None:
        """The conclusion of a last farewell that is due now; None if none is due."""
        evacuation, last = state.evacuation, state.course.last_verdict
        if evacuation is None or evacuation.verdict is None or last is None:
            return None
        is_repeated = evacuation.id == self._last_farewell.evacuation_id
        if is_repeated and not self._is_due_again(evacuation.deadline_mono_s, now_mono_s):
            return None
        left_s = evacuation.deadline_mono_s - now_mono_s
        # The next VM of a handover awaits the end of the training.
        is_awaited = state.settings.handover and self.training.is_over and is_settled(state)
        # In the reserve no further checkpoint begins, so no manifest can wait behind this farewell.
        is_near = left_s <= min(LAST_FAREWELL_LEAD_S, state.settings.reserve_s)
        is_waiting = any(request.is_waiting for request in state.requests_made)
        is_busy = state.flush.flight is not None or bool(state.commits.stored) or is_waiting
        if is_busy or not (is_near or is_awaited or HOST_SOURCE in state.notices.live):
            return None
        return replace(
            last,
            evacuation_id=evacuation.id,
            verdict=evacuation.verdict,
            commit=state.commits.last_complete,
            slack_s=round(left_s, 2),
            part=state.part,
            is_final=False,
        )

    def _is_due_again(self, deadline_mono_s: float, now_mono_s: float) -> bool:
        written = self._last_farewell
        is_late = now_mono_s >= max(deadline_mono_s, written.mono_s + LAST_FAREWELL_REPEAT_S)
        return is_late and self.training.step > written.step


def last_report(
    training: Training, state: State, *, now_mono_s: float, now_wall_s: float
) -> LastReport | None:
    """The training for a farewell that is written now; None before the first step."""
    if training.step < 0:
        return None
    offset_s, evacuation = now_wall_s - now_mono_s, state.evacuation
    return LastReport(
        step=training.step,
        wall_s=training.mono_s + offset_s,
        step_s=training.step_s,
        ranks=training.ranks,
        saves_s=training.saves_s,
        stall_s=training.stall_s,
        is_over=training.is_over or HOST_SOURCE in state.notices.live,
        deadline_wall_s=None if evacuation is None else evacuation.deadline_mono_s + offset_s,
    )


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


def _first_connection(state: State) -> int:
    """The connection of the first rank of this VM, which stands for all: they train in lockstep."""
    first = min(state.ranks.trainers, key=lambda trainer: trainer.rank, default=None)
    return -1 if first is None else first.connection


def _holding_ranks(state: State) -> CheckpointRequest | None:
    """The request whose target the ranks wait for."""
    made = (*state.requests_made, state.requests.periodic)
    holding = (r for r in made if r and r.is_waiting and r.accepted and r.target is None)
    return next(holding, None)
