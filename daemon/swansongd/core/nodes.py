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
    JoinGeneration,
    PartsCounted,
    Prune,
    TellCommitted,
    TellFenced,
)
from swansongd.core.state import Ask, Incomplete
from swansongd.core.turn import Turn
from swansongd.model import CommitRef, DeadlineQuality, Notice, Severity, Staged, TrainerView

PEER_SOURCE = "peer"
LOOK_FIRST_S = 0.3
LOOK_S_MAX = 30.0
PARTS_MAX = 4
"""Own parts that wait for those of the other VMs, which flush the newest set first and skip others."""
PEER_LONGEST_S = 3600.0
"""The longest notice that a cloud gives: host maintenance."""
PEER_REQUESTS_MAX = 3
PEER_WINDOW_S = 60.0
"""No more than PEER_REQUESTS_MAX requests of other VMs within this time become notices."""
_ALONE = "alone"


def joined(turn: Turn, trainer: TrainerView) -> None:
    """A rank came.  Over several VMs it will say which start of the job it is of; on one, this says it."""
    settings = turn.state.settings
    prefix = f"{_ALONE}:{settings.vm}:"
    if trainer.nodes == 1 and not turn.state.incarnation.startswith(prefix):
        incarnation(turn, f"{prefix}{turn.state.generation or 0}")


def incarnation(turn: Turn, name: str) -> None:
    """Another start of the job: what was staged for an earlier one is not continued by this one."""
    state = turn.state
    if not state.settings.several_vms or name == state.incarnation:
        return
    _drop_all(turn)
    turn.set(incarnation=name)
    claims.order(turn, JoinGeneration(name))


def fenced(turn: Turn, generation: int) -> None:
    """The run goes on elsewhere, or the job has been started anew and its ranks are on their way here."""
    if turn.state.generation is not None and generation > turn.state.generation:
        turn.log("warning", "fenced", generation=turn.state.generation, newer_generation=generation)
        turn.do(TellFenced(generation))
        _drop_all(turn)


def first_look(turn: Turn) -> None:
    """What lies in staging at the start is of an earlier start of the job, unless we are of that one."""
    state = turn.state
    settings = state.settings
    if settings.several_vms and state.incarnation != settings.goes_on_with:
        turn.set(unusable=state.unusable | {staged.id for staged in state.staged})


def _drop_all(turn: Turn) -> None:
    state = turn.state
    if state.flight is not None:
        turn.do(CancelFlush(state.flight.flush_id))
    known = frozenset(staged.id for staged in state.staged)
    turn.set(
        flight=None,
        stored=(),
        generation=None,
        last_commit=state.last_complete,
        incomplete=None,
        periodic=None,
        inherited=state.inherited | known,
        unusable=state.unusable | known,
    )


def peer_notice(turn: Turn, request_id: str, reason: str, seconds_left: float) -> Notice | None:
    """The notice that another VM's request is for this one.

    None when the request is known or our own, when no trainer of this VM belongs to a job over several VMs,
    or when there were too many requests: a trainer that forges requests costs a few checkpoints.
    """
    state = turn.state
    known = state.notices.get(PEER_SOURCE)
    is_known = request_id in state.opened or (known is not None and known.identity == request_id)
    if is_known or not state.spans_vms:
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
    """Look for the parts of the other VMs, less and less often; one look at a time.

    The same thread commits: a look never goes before a manifest.
    """
    state = turn.state
    incomplete = state.incomplete
    is_committing = any(item.is_asked for item in state.stored)
    if incomplete is None or incomplete.is_asked or is_committing:
        return
    is_urgent = state.evacuation is not None and turn.left_s > 0
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
    dispensable = tuple(
        staged.directory
        for staged in turn.state.staged
        if staged.framework == "swansong"
        and staged != turn.state.pinned
        and staged.id.step < ref.step
    )
    if dispensable:
        turn.do(Prune(dispensable))
