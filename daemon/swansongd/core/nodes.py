# SPDX-License-Identifier: Apache-2.0
"""A job over several VMs: one generation for all, word from the other VMs, and their parts of a checkpoint.

The VMs know of each other only what their trainers say, who have the job's own store to agree in, and
what lies in the bucket.
"""

from __future__ import annotations

from dataclasses import replace

from swansongd.core import claims
from swansongd.core.events import (
    CancelFlush,
    CheckComplete,
    FenceFound,
    JoinGeneration,
    PartsCounted,
    Prune,
    Rescan,
    TellCommitted,
    TellFenced,
    TellFinished,
)
from swansongd.core.state import Ask, Evacuation, Finishing, Incomplete, State
from swansongd.core.turn import Turn
from swansongd.model import CommitRef, DeadlineQuality, Notice, Severity, Staged, TrainerView

PEER_SOURCE = "peer"
LOOK_FIRST_S = 0.3
LOOK_S_MAX = 30.0
PARTS_MAX = 4
"""Own parts that wait for those of the other VMs, which flush the newest set first and skip others."""
FINISH_S = 30.0
"""Another start of the job waits at most this long for what the one before has sealed ..."""
FINISH_S_MAX = 90.0
"""... and, while a VM of the job is being evacuated, until its deadline, but no longer than this."""
ASKS_MAX = 8
"""Requests of one evacuation."""
ASK_AGAIN_S = 1.0
ASK_AGAIN_S_MAX = 8.0
"""Pause after a request that failed; doubled each time."""
PEER_LONGEST_S = 3600.0
"""The longest notice that a cloud gives: host maintenance."""
PEER_REQUESTS_MAX = 3
PEER_WINDOW_S = 60.0
"""No more than PEER_REQUESTS_MAX requests of other VMs within this time become notices."""
AGAIN = ".again-"
"""Between the id of an evacuation and the number of a request that was made again."""
_ALONE = "alone:"


def joined(turn: Turn, trainer: TrainerView) -> None:
    """A rank came.  Over several VMs it will say which start of the job it is of; on one, this says it."""
    settings = turn.state.settings
    prefix = f"{_ALONE}{settings.vm}:"
    if trainer.nodes == 1 and not turn.state.incarnation.startswith(prefix):
        finish(turn, f"{prefix}{turn.state.generation or 0}")


def is_alone(name: str) -> bool:
    """Whether this incarnation is that of a job with one VM, which no rank has to name."""
    return name.startswith(_ALONE)


def finish(turn: Turn, name: str) -> None:
    """Another start of the job is about to begin: first commit what is sealed, for it is as good as saved.

    Nothing is claimed before all VMs have done so, since a claim fences the others.
    """
    state = turn.state
    if not state.settings.several_vms:
        return
    finishing = state.finishing
    is_known = finishing is not None and finishing.incarnation == name
    if name == state.incarnation or (is_known and finishing is not None and finishing.is_done):
        turn.do(TellFinished(name))  # to a rank that came later, or came back
        return
    if is_known:
        return
    is_evacuating = state.evacuation is not None and not state.evacuation.is_precaution
    limit_s = min(max(FINISH_S, turn.left_s if is_evacuating else 0.0), FINISH_S_MAX)
    turn.set(finishing=Finishing(name, asked_mono_s=turn.now, by_mono_s=turn.now + limit_s))
    turn.do(Rescan())
    if _has_more(state):
        turn.log("info", "finishing", sets=len(state.uncommitted), limit_s=round(limit_s, 1))


def _has_more(state: State) -> bool:
    """Whether something sealed may still become a checkpoint."""
    return bool(state.uncommitted) or bool(state.stored) or state.part is not None


def _steer_finishing(turn: Turn) -> None:
    """Let another start of the job begin when this VM has nothing more to commit, or it takes too long."""
    state = turn.state
    finishing = state.finishing
    if finishing is None or finishing.is_done:
        return
    if finishing.known is None and (state.scanned_mono_s or 0.0) >= finishing.asked_mono_s:
        finishing = replace(finishing, known=frozenset(staged.id for staged in state.staged))
        turn.set(finishing=finishing)
    # Ranks that do not ask where to resume may train already: what they seal must not be mixed up.
    known = finishing.known
    trains = known is not None and any(staged.id not in known for staged in state.staged)
    # Without an incarnation, nothing here is of a start that this daemon took part in.
    has_more = bool(state.incarnation) and (known is None or _has_more(state))
    if has_more and not trains and turn.now < finishing.by_mono_s:
        return
    if trains or is_alone(finishing.incarnation):
        incarnation(turn, finishing.incarnation)
    else:
        turn.set(finishing=replace(finishing, is_done=True))
    turn.do(TellFinished(finishing.incarnation))


def incarnation(turn: Turn, name: str) -> None:
    """Another start of the job begins: what was staged for an earlier one is not continued by this one."""
    state = turn.state
    if not state.settings.several_vms or name == state.incarnation:
        return
    evacuation, answer = state.evacuation, state.answer
    if (
        evacuation is not None
        and evacuation.ask is not None
        and not evacuation.ask.failure
        and not (answer is not None and state.is_whole(answer))
    ):
        turn.fail_ask("the job was started again")
    dropped = _drop_all(turn)
    turn.set(incarnation=name, finishing=None, overtaken_by=None)
    claims.order(turn, JoinGeneration(name, tuple(sorted(turn.state.abandoned))))
    dispensable = tuple(s.directory for s in dropped if s.framework == "swansong")
    if dispensable:
        turn.do(Prune(dispensable))


def fenced(turn: Turn, event: FenceFound) -> None:
    """The run continues elsewhere, or the job was started again and its ranks are on their way here."""
    state, generation = turn.state, event.generation
    if not event.is_news(max(state.generation or 0, state.overtaken_by or 0)):
        return
    turn.log("warning", "fenced", generation=state.generation, newer_generation=generation)
    turn.do(TellFenced(generation))
    _drop_all(turn)
    turn.set(overtaken_by=generation)


def first_look(turn: Turn) -> None:
    """What lies in staging at the start is of an earlier start of the job, unless we are of that one."""
    state = turn.state
    settings = state.settings
    if settings.several_vms and state.incarnation != settings.goes_on_with:
        turn.set(unusable=state.unusable | {staged.id for staged in state.staged})


def _drop_all(turn: Turn) -> tuple[Staged, ...]:
    """Commit none of the sets that are known; returns them."""
    state = turn.state
    if state.flight is not None:
        turn.do(CancelFlush(state.flight.flush_id))
    known = frozenset(staged.id for staged in state.staged)
    if state.finishing is not None and state.finishing.known is not None:
        known &= state.finishing.known  # the others are of the start that begins
    turn.set(
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


def peer_notice(turn: Turn, request_id: str, reason: str, seconds_left: float) -> Notice | None:
    """The notice that another VM's request is for this one.

    None when the request is known or our own, when no trainer of this VM belongs to a job over several VMs,
    or when there were too many requests: a trainer that forges requests costs a few checkpoints.
    """
    state = turn.state
    known = state.notices.get(PEER_SOURCE)
    # An id with a suffix is that of a request made again.
    ids = {request_id, request_id.partition(AGAIN)[0]}
    is_known = bool(ids & set(state.opened)) or (known is not None and known.identity in ids)
    evacuation = state.evacuation
    is_own = evacuation is not None and evacuation.id in ids
    if is_known or is_own or not state.spans_vms:
        return None
    recent = tuple(taken for taken in state.peers_mono_s if turn.now - taken < PEER_WINDOW_S)
    if len(recent) >= PEER_REQUESTS_MAX:
        turn.log("warning", "peer_request_ignored", reason=f"over {len(recent)} in a minute")
        return None
    turn.set(peers_mono_s=(*recent, turn.now))
    return Notice(
        source=PEER_SOURCE,
        kind="reclaim",
        identity=request_id,
        severity=Severity.IMMINENT,
        deadline_mono_s=turn.now + min(max(0.0, seconds_left), PEER_LONGEST_S),
        deadline_quality=DeadlineQuality.DERIVED,
        detail=reason,
    )


def agreed(turn: Turn, request_id: str, step: int) -> None:
    """The ranks of all VMs will save at ``step``."""
    ask = turn.ask_if_waiting(request_id)
    if ask is not None and ask.target is None and turn.state.spans_vms:
        turn.set_ask(target=step)
        turn.mark("target", step=step)


def steer_agreement(turn: Turn, ask: Ask) -> bool:
    """The ranks agree among themselves; False when they have not, in twice the time that they have."""
    limit_s = 2 * (ask.agree_by_mono_s - ask.asked_mono_s)
    if ask.target is None and turn.now >= ask.asked_mono_s + limit_s:
        turn.fail_ask("the ranks of all VMs have not agreed on a step in time")
        return False
    return True


def may_ask_again(state: State) -> bool:
    """Whether a request that failed is made again, under another id: a rank may hang for a moment.

    Only the VM whose end is near does so; the others take part.
    """
    evacuation = state.evacuation
    if evacuation is None or evacuation.ask is None or evacuation.is_precaution:
        return False
    return (
        bool(evacuation.ask.failure)
        and state.settings.several_vms
        and state.overtaken_by is None
        and evacuation.asks < ASKS_MAX
        and bool(state.connected)
        and any(
            notice.identity in evacuation.identities and notice.source != PEER_SOURCE
            for notice in state.notices.values()
        )
    )


def ask_again_mono_s(evacuation: Evacuation) -> float:
    """When the pause after the request that failed is over."""
    assert evacuation.ask is not None
    pause_s = min(ASK_AGAIN_S * 2.0 ** (evacuation.asks - 1), ASK_AGAIN_S_MAX)
    return evacuation.ask.failed_mono_s + pause_s


# ---------------------------------------------------------------- completeness


def committed(turn: Turn, ref: CommitRef, staged: Staged | None) -> None:
    """This VM's part is committed; the checkpoint exists when those of all VMs are."""
    if staged is None or staged.nodes == 1:
        completed(turn, ref)
    elif turn.state.last_complete is None or ref > turn.state.last_complete:
        before = turn.state.incomplete
        others = () if before is None else before.refs
        refs = tuple(sorted({ref, *others}, reverse=True)[:PARTS_MAX])
        is_asked = before is not None and before.is_asked
        turn.set(
            incomplete=Incomplete(refs, staged.nodes, turn.now, LOOK_FIRST_S, is_asked=is_asked)
        )


def steer(turn: Turn) -> None:
    """Look for the parts of the other VMs, and let another start of the job begin."""
    _steer_finishing(turn)
    _steer_looks(turn)


def _steer_looks(turn: Turn) -> None:
    """Look for the parts of the other VMs, less and less often; one look at a time.

    The same thread commits: a look never goes before a manifest.
    """
    state = turn.state
    incomplete = state.incomplete
    is_committing = any(item.is_asked for item in state.stored)
    if incomplete is None or incomplete.is_asked or is_committing:
        return
    is_awaited = state.finishing is not None and not state.finishing.is_done
    is_urgent = is_awaited or (state.evacuation is not None and turn.left_s > 0)
    if turn.now < incomplete.look_mono_s and not (is_urgent and incomplete.wait_s > LOOK_FIRST_S):
        return
    turn.do(CheckComplete(incomplete.refs, incomplete.nodes))
    wait_s = LOOK_FIRST_S if is_urgent else min(2 * incomplete.wait_s, LOOK_S_MAX)
    turn.set(incomplete=replace(incomplete, wait_s=wait_s, is_asked=True))


def counted(turn: Turn, event: PartsCounted) -> None:
    """A look for the parts of the other VMs was answered."""
    incomplete = turn.state.incomplete
    if incomplete is None:
        return
    is_newest = event.newest == incomplete.refs[0]
    turn.set(
        incomplete=replace(
            incomplete,
            is_asked=False,
            look_mono_s=turn.now + incomplete.wait_s,
            committed=max(incomplete.committed, event.committed if is_newest else 0),
        )
    )
    if event.whole in incomplete.refs:
        completed(turn, event.whole)


def completed(turn: Turn, ref: CommitRef) -> None:
    """All VMs have committed their parts: what is older is dispensable."""
    state = turn.state
    if state.incomplete is not None:
        turn.mark("complete", generation=ref.generation, step=ref.step)
        refs = tuple(part for part in state.incomplete.refs if part > ref)
        turn.set(incomplete=replace(state.incomplete, refs=refs) if refs else None)
    if state.last_complete is None or ref > state.last_complete:
        turn.set(last_complete=ref, last_commit_mono_s=turn.now)
    turn.do(TellCommitted(ref))
    # Only what our hooks wrote is ours to delete; the newest committed set stays for a quick restore.
    abandoned = turn.state.abandoned
    dispensable = tuple(
        staged.directory
        for staged in turn.state.staged
        if staged.framework == "swansong"
        and staged != turn.state.pinned
        and (staged.id.step < ref.step or staged.id in abandoned)
    )
    if dispensable or abandoned or turn.state.has_aside:
        staged_ids = {staged.id for staged in turn.state.staged}
        turn.set(abandoned=abandoned & staged_ids, has_aside=False)
        turn.do(Prune(dispensable))
