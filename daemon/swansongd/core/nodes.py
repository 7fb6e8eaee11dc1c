# SPDX-License-Identifier: Apache-2.0
"""A job over several VMs: one generation for all, word from the other VMs, and their parts of a checkpoint.

The VMs know of each other only what their trainers say, who have the job's own store to agree in, and
what lies in the bucket.
"""

from __future__ import annotations

from dataclasses import replace

from swansongd.core import claims, request
from swansongd.core.events import (
    CancelFlush,
    FenceFound,
    JoinGeneration,
    Prune,
    Rescan,
    TellFenced,
    TellFinished,
)
from swansongd.core.state import Evacuation, Finishing, State
from swansongd.core.transition import Transition
from swansongd.model import DeadlineQuality, Notice, Severity, Staged, TrainerView

PEER_SOURCE = "peer"
FINISH_S = 30.0
"""Another start of the job waits at most this long for what the one before has sealed ..."""
FINISH_S_MAX = 90.0
"""... and, while a VM of the job is being evacuated, until its deadline, but no longer than this."""
REQUESTS_MAX = 8
"""Requests of one evacuation."""
REPEAT_S = 1.0
REPEAT_S_MAX = 8.0
"""Pause after a request that failed; doubled each time."""
PEER_LONGEST_S = 3600.0
"""The longest notice that a cloud gives: host maintenance."""
PEER_REQUESTS_MAX = 3
PEER_WINDOW_S = 60.0
"""No more than PEER_REQUESTS_MAX requests of other VMs within this time become notices."""
AGAIN = ".again-"
"""Between the id of an evacuation and the number of a request that was made again."""
_ALONE = "alone:"


def joined(transition: Transition, trainer: TrainerView) -> None:
    """A rank came.  Over several VMs it will say which start of the job it is of; on one, this says it."""
    settings = transition.state.settings
    prefix = f"{_ALONE}{settings.vm}:"
    if trainer.nodes == 1 and not transition.state.job_start_id.startswith(prefix):
        finish(transition, f"{prefix}{transition.state.generation or 0}")


def is_alone(name: str) -> bool:
    """Whether this job start is that of a job with one VM, which no rank has to name."""
    return name.startswith(_ALONE)


def finish(transition: Transition, name: str) -> None:
    """Another start of the job is about to begin: first commit what is sealed, for it is as good as saved.

    Nothing is claimed before all VMs have done so, since a claim fences the others.
    """
    state = transition.state
    if not state.settings.several_vms:
        return
    finishing = state.finishing
    is_known = finishing is not None and finishing.job_start_id == name
    if name == state.job_start_id or (is_known and finishing is not None and finishing.is_done):
        transition.do(TellFinished(name))  # to a rank that came later, or came back
        return
    if is_known:
        return
    is_evacuating = state.evacuation is not None and not state.evacuation.is_precaution
    limit_s = min(max(FINISH_S, transition.left_s if is_evacuating else 0.0), FINISH_S_MAX)
    transition.state = replace(
        transition.state,
        finishing=Finishing(name, asked_mono_s=transition.now, by_mono_s=transition.now + limit_s),
    )
    transition.do(Rescan())
    if _has_more(state):
        transition.log("info", "finishing", sets=len(state.uncommitted), limit_s=round(limit_s, 1))


def _has_more(state: State) -> bool:
    """Whether something sealed may still become a checkpoint."""
    return bool(state.uncommitted) or bool(state.stored) or state.part is not None


def reconcile(transition: Transition) -> None:
    """Let another start of the job begin when this VM has nothing more to commit, or it takes too long."""
    state = transition.state
    finishing = state.finishing
    if finishing is None or finishing.is_done:
        return
    if finishing.known is None and (state.scanned_mono_s or 0.0) >= finishing.asked_mono_s:
        finishing = replace(finishing, known=frozenset(staged.id for staged in state.staged))
        transition.state = replace(transition.state, finishing=finishing)
    # Ranks that do not ask where to resume may train already: what they seal must not be mixed up.
    known = finishing.known
    trains = known is not None and any(staged.id not in known for staged in state.staged)
    # Without a job start, nothing here is of a start that this daemon took part in.
    has_more = bool(state.job_start_id) and (known is None or _has_more(state))
    if has_more and not trains and transition.now < finishing.by_mono_s:
        return
    if trains or is_alone(finishing.job_start_id):
        record_job_start(transition, finishing.job_start_id)
    else:
        transition.state = replace(transition.state, finishing=replace(finishing, is_done=True))
    transition.do(TellFinished(finishing.job_start_id))


def record_job_start(transition: Transition, name: str) -> None:
    """Another start of the job begins: what was staged for an earlier one is not continued by this one."""
    state = transition.state
    if not state.settings.several_vms or name == state.job_start_id:
        return
    evacuation, answer = state.evacuation, state.answer
    pending = evacuation.request if evacuation is not None else None
    if (
        pending is not None
        and not pending.failure
        and not (answer is not None and state.is_whole(answer))
    ):
        request.fail(transition, pending, "the job was started again")
    dropped = _drop_all(transition)
    transition.state = replace(
        transition.state, job_start_id=name, finishing=None, overtaken_by=None
    )
    claims.order(transition, JoinGeneration(name, tuple(sorted(transition.state.abandoned))))
    dispensable = tuple(s.directory for s in dropped if s.framework == "swansong")
    if dispensable:
        transition.do(Prune(dispensable))


def fenced(transition: Transition, event: FenceFound) -> None:
    """The run continues elsewhere, or the job was started again and its ranks are on their way here."""
    state, generation = transition.state, event.generation
    if not event.is_news(max(state.generation or 0, state.overtaken_by or 0)):
        return
    transition.log("warning", "fenced", generation=state.generation, newer_generation=generation)
    transition.do(TellFenced(generation))
    _drop_all(transition)
    transition.state = replace(transition.state, overtaken_by=generation)


def first_look(transition: Transition) -> None:
    """What lies in staging at the start is of an earlier start of the job, unless we are of that one."""
    state = transition.state
    settings = state.settings
    if settings.several_vms and state.job_start_id != settings.resumed_job_start_id:
        transition.state = replace(
            transition.state, unusable=state.unusable | {staged.id for staged in state.staged}
        )


def _drop_all(transition: Transition) -> tuple[Staged, ...]:
    """Commit none of the sets that are known; returns them."""
    state = transition.state
    if state.flight is not None:
        transition.do(CancelFlush(state.flight.flush_id))
    known = frozenset(staged.id for staged in state.staged)
    if state.finishing is not None and state.finishing.known is not None:
        known &= state.finishing.known  # the others are of the start that begins
    transition.state = replace(
        transition.state,
        flight=None,
        stored=(),
        generation=None,
        last_commit=state.last_complete,
        incomplete=None,
        periodic=None,
        inherited=frozenset(),
        unusable=state.unusable | known,
        abandoned=state.abandoned | known,
    )
    return tuple(staged for staged in state.staged if staged.id in known)


def peer_notice(
    transition: Transition, request_id: str, reason: str, seconds_left: float
) -> Notice | None:
    """The notice that another VM's request is for this one.

    None when the request is known or our own, when no trainer of this VM belongs to a job over several VMs,
    or when there were too many requests: a trainer that forges requests costs a few checkpoints.
    """
    state = transition.state
    known = state.notices.get(PEER_SOURCE)
    # An id with a suffix is that of a request made again.
    ids = {request_id, request_id.partition(AGAIN)[0]}
    is_known = bool(ids & set(state.opened)) or (known is not None and known.identity in ids)
    evacuation = state.evacuation
    is_own = evacuation is not None and evacuation.id in ids
    if is_known or is_own or not state.spans_vms:
        return None
    recent = tuple(taken for taken in state.peers_mono_s if transition.now - taken < PEER_WINDOW_S)
    if len(recent) >= PEER_REQUESTS_MAX:
        transition.log("warning", "peer_request_ignored", reason=f"over {len(recent)} in a minute")
        return None
    transition.state = replace(transition.state, peers_mono_s=(*recent, transition.now))
    return Notice(
        source=PEER_SOURCE,
        kind="reclaim",
        identity=request_id,
        severity=Severity.IMMINENT,
        deadline_mono_s=transition.now + min(max(0.0, seconds_left), PEER_LONGEST_S),
        deadline_quality=DeadlineQuality.DERIVED,
        detail=reason,
    )


def may_repeat_request(state: State) -> bool:
    """Whether a request that failed is made again, under another id: a rank may hang for a moment.

    Only the VM whose end is near does so; the others take part.
    """
    evacuation = state.evacuation
    if evacuation is None or evacuation.request is None or evacuation.is_precaution:
        return False
    return (
        bool(evacuation.request.failure)
        and state.settings.several_vms
        and state.overtaken_by is None
        and evacuation.requests < REQUESTS_MAX
        and bool(state.connected)
        and any(
            notice.identity in evacuation.identities and notice.source != PEER_SOURCE
            for notice in state.notices.values()
        )
    )


def repeat_mono_s(evacuation: Evacuation) -> float:
    """When the pause after the request that failed is over."""
    assert evacuation.request is not None
    pause_s = min(REPEAT_S * 2.0 ** (evacuation.requests - 1), REPEAT_S_MAX)
    return evacuation.request.failed_mono_s + pause_s
