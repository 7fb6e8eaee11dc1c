# SPDX-License-Identifier: Apache-2.0
"""A job over several VMs: one generation for all, the notices of other VMs, and their parts of a checkpoint.

Daemons do not connect to each other.  They learn about other VMs from their trainers, which agree in the
job's own store, and from the bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from swansongd.core import claims, lineage, request
from swansongd.core.events import (
    CancelFlush,
    FenceFound,
    JoinGeneration,
    Prune,
    Rescan,
    SetAside,
    TellFenced,
    TellFinished,
)
from swansongd.core.request_ids import are_of_one
from swansongd.core.state import Evacuation, Finishing, State
from swansongd.core.transition import Transition
from swansongd.model import DeadlineQuality, Notice, Severity, Staged, TrainerView

PEER_SOURCE = "peer"
FINISH_S = 30.0
"""Another start of the job waits at most this long for the commits of the one before ..."""
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
ASIDE_MAX = 2
"""Sets of earlier starts that are kept for the restore of the next one."""
_ALONE = "alone:"


def record_joined(transition: Transition, trainer: TrainerView) -> None:
    """A rank connected.  A job on one VM has one start for each generation; else the ranks report theirs."""
    settings = transition.state.settings
    prefix = f"{_ALONE}{settings.vm}:"
    if trainer.nodes == 1 and not transition.state.job_start_id.startswith(prefix):
        record_finish_asked(transition, f"{prefix}{transition.state.generation or 0}")


def record_started_behind(transition: Transition) -> None:
    """A rank of a job on one VM started behind a state of its generation: it is another start of the job."""
    settings, name = transition.state.settings, transition.state.job_start_id
    if settings.several_vms and is_alone(name):
        generation = transition.state.generation or 0
        record_finish_asked(transition, f"{_ALONE}{settings.vm}:{generation}")


def is_alone(name: str) -> bool:
    """Whether this is the job start of a job on one VM, which no rank reports."""
    return name.startswith(_ALONE)


def record_finish_asked(transition: Transition, name: str) -> None:
    """Another start of the job is about to begin: commit the sealed sets first.

    No VM claims a generation before all VMs have done so, since a claim fences the others.
    """
    state = transition.state
    if not state.settings.several_vms:
        return
    finishing = state.finishing
    is_known = finishing is not None and finishing.job_start_id == name
    if name == state.job_start_id or (is_known and finishing is not None and finishing.is_done):
        transition.do(TellFinished(name))  # to a rank that connected late or again
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
    """Whether a sealed set may still become a checkpoint."""
    return bool(state.uncommitted) or bool(state.stored) or state.part is not None


def reconcile(transition: Transition) -> None:
    """Let another start of the job begin when this VM has nothing left to commit, or when time is up."""
    state = transition.state
    finishing = state.finishing
    if finishing is None or finishing.is_done:
        return
    if finishing.known is None and (state.scanned_mono_s or 0.0) >= finishing.asked_mono_s:
        finishing = replace(finishing, known=frozenset(staged.id for staged in state.staged))
        transition.state = replace(transition.state, finishing=finishing)
    # Ranks that do not query a checkpoint may train already.  Their sets belong to the next start.
    known = finishing.known
    trains = known is not None and any(staged.id not in known for staged in state.staged)
    # Without a job start, no set here is of a start in which this daemon took part.
    has_more = bool(state.job_start_id) and (known is None or _has_more(state))
    if has_more and not trains and transition.now < finishing.by_mono_s:
        return
    if trains or is_alone(finishing.job_start_id):
        record_job_start(transition, finishing.job_start_id)
    else:
        transition.state = replace(transition.state, finishing=replace(finishing, is_done=True))
    transition.do(TellFinished(finishing.job_start_id))


def record_job_start(transition: Transition, name: str) -> None:
    """Another start of the job begins: the sets of earlier starts are abandoned."""
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
    follow_up = transition.state.follow_up
    if follow_up is not None and follow_up.is_waiting:
        request.fail(transition, follow_up, "the job was started again")
    dropped = _drop_all(transition)
    present = {trainer.start_id for trainer in state.trainers}
    lineage.close(transition, [start for start in state.starts if start not in present])
    transition.state = replace(
        transition.state,
        job_start_id=name,
        finishing=None,
        overtaken_by=None,
        peer_end_mono_s=None,
    )
    claims.set_due(transition, JoinGeneration(name, tuple(sorted(transition.state.abandoned))))
    own = [staged for staged in dropped if staged.framework == "swansong"]
    wanted = _resumable(state, own)
    dispensable = tuple(staged.directory for staged in own if staged not in wanted)
    if dispensable:
        transition.do(Prune(dispensable, keeps_aside=True))
    if wanted:
        transition.state = replace(transition.state, has_aside=True)
        transition.do(SetAside(tuple(staged.directory for staged in wanted)))


def _resumable(state: State, sets: Sequence[Staged]) -> list[Staged]:
    """The sets of which the next start may read the same bytes: those of the newest whole checkpoint.

    A newer one of which this VM's part is committed may have become whole since.  They are set aside, and
    the next commit deletes them; meanwhile a download copies them.
    """
    if state.last_commit is None and state.generation is not None:
        return []  # the run has no commit
    first = -1 if state.last_complete is None else state.last_complete.step
    last = math.inf if state.last_commit is None else state.last_commit.step
    may_count = [staged for staged in sets if first <= staged.id.step <= last]
    return sorted(may_count, key=lambda staged: staged.id)[-ASIDE_MAX:]


def record_fence(transition: Transition, event: FenceFound) -> None:
    """The run continues elsewhere, or the job was started again and its ranks will connect here."""
    state, generation = transition.state, event.generation
    if not event.is_news(max(state.generation or 0, state.overtaken_by or 0)):
        return
    transition.log("warning", "fenced", generation=state.generation, newer_generation=generation)
    transition.do(TellFenced(generation))
    _drop_all(transition)
    transition.state = replace(transition.state, overtaken_by=generation)


def record_first_scan(transition: Transition) -> None:
    """Sets of the first scan are of an earlier start of the job, unless this daemon resumed that start."""
    state = transition.state
    settings = state.settings
    if settings.several_vms and state.job_start_id != settings.resumed_job_start_id:
        transition.state = replace(
            transition.state, unusable=state.unusable | {staged.id for staged in state.staged}
        )


def _drop_all(transition: Transition) -> tuple[Staged, ...]:
    """Abandon all known sets; returns them."""
    state = transition.state
    if state.flight is not None:
        transition.do(CancelFlush(state.flight.flush_id))
    known = frozenset(staged.id for staged in state.staged)
    if state.finishing is not None and state.finishing.known is not None:
        known &= state.finishing.known  # the others belong to the start that begins
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
    """The notice that follows from another VM's request.

    None when the request is known or our own, when no trainer of this VM belongs to a job over several VMs,
    or when there were too many requests.  A trainer that forges requests therefore costs a few checkpoints.
    """
    state = transition.state
    known = state.notices.get(PEER_SOURCE)
    # Repeated and follow-up requests have the id of the first one and a suffix.
    names = (
        *state.opened,
        known.identity if known is not None else "",
        state.evacuation.id if state.evacuation is not None else "",
    )
    is_known = any(name and are_of_one(request_id, name) for name in names)
    if is_known or not state.spans_vms:
        return None
    recent = tuple(taken for taken in state.peers_mono_s if transition.now - taken < PEER_WINDOW_S)
    if len(recent) >= PEER_REQUESTS_MAX:
        transition.log("warning", "peer_request_ignored", reason=f"over {len(recent)} in a minute")
        return None
    deadline_mono_s = transition.now + min(max(0.0, seconds_left), PEER_LONGEST_S)
    ends = (state.peer_end_mono_s, deadline_mono_s)
    transition.state = replace(
        transition.state,
        peers_mono_s=(*recent, transition.now),
        peer_end_mono_s=min(end for end in ends if end is not None),
    )
    return Notice(
        source=PEER_SOURCE,
        kind="reclaim",
        identity=request_id,
        severity=Severity.IMMINENT,
        deadline_mono_s=deadline_mono_s,
        deadline_quality=DeadlineQuality.DERIVED,
        detail=reason,
    )


def may_repeat_request(state: State) -> bool:
    """Whether a failed request is repeated under another id: a rank may hang for a moment only.

    Only the VM that has the notice does so; the others take part.
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
    """End of the pause after a failed request."""
    assert evacuation.request is not None
    pause_s = min(REPEAT_S * 2.0 ** (evacuation.requests - 1), REPEAT_S_MAX)
    return evacuation.request.failed_mono_s + pause_s
