# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a trainer resumes from: one rule, for the hooks and for the restore unit.

Sealed sets in staging and commits are ordered alike, by generation and step.  A set in staging has the
generation of its start.  Over several VMs staging has only this VM's share, so only commits count.

Each start has one answer, which all its ranks on this VM get.  It is chosen under the generation of the
start, so what earlier starts have committed by then is seen.
"""

from __future__ import annotations

from swansong.protocol import RestoreQuery
from swansong_bucket.model import CommitRef, Staged, is_healthy

from swansongd.core.state import State


def may_answer(state: State, query: RestoreQuery) -> bool:
    """Whether the start of this rank has begun, and has its generation where it is about to choose."""
    if not query.start_id:  # of an operator
        return True
    start = state.start_of(query.start_id)
    if start is None or not start.is_live:
        return False
    is_named = query.generation >= 0 and not query.refused
    return is_named or start.generation is not None


def why_no_prefetch(state: State, newest: CommitRef | None) -> str:
    """The reason why no trainer will need this commit from the store; empty: it is fetched.

    Args:
        newest: the newest whole commit of the run.
    """
    if state.starts.fenced_by is not None:
        return f"generation {state.starts.fenced_by} has taken the run over"
    if any(trainer.start_step >= 0 for trainer in state.ranks.trainers):
        return "training has begun"
    known = state.commits.last_complete
    if known is not None and known.generation == state.generation and known != newest:
        return "this VM has committed a newer checkpoint"
    if newest is None:
        return "" if state.generation is None else "the run has no commit"
    local = newest_local(state, newest)
    return "" if local is None else f"step {local.id.step} is in staging"


def may_follow(state: State) -> bool:
    """Whether another VM trains perhaps, and commits what a start on this VM will resume from.

    A start that waits in the rendezvous of its launcher has not begun.  In a handover the looks at the other
    VM find its commits.
    """
    is_alone = state.start is None or not state.start.is_live
    return is_alone and state.starts.predecessor is None


def why_waiting(state: State, now_mono_s: float) -> str:
    """Which VM this one awaits before it takes the run over; empty if it awaits none."""
    other = state.starts.predecessor
    if other is None or not other.generation:
        return ""
    if not other.is_leaving:
        return f"generation {other.generation} trains on: its notice was withdrawn"
    left_s = max(0.0, other.by_mono_s - now_mono_s)
    return f"generation {other.generation} still trains, for at most {left_s:.0f} s"


def newest_known(state: State, listed: CommitRef | None) -> CommitRef | None:
    """The newest whole commit: an earlier VM may have committed between the listing and our claim."""
    if state.starts.predecessor is not None and state.starts.predecessor.newest is not None:
        return state.starts.predecessor.newest
    known = state.commits.last_complete
    if known is None or known.generation == state.generation:
        return listed
    return known if listed is None else max(listed, known)


def may_download(state: State, *, is_asked: bool) -> bool:
    """Whether a download may use the link now.

    The link belongs to an evacuation.  A download that no trainer has asked for stops while one is open, here
    or in another daemon of this VM.
    One that a trainer waits for runs, unless the evacuation sends bytes.  It runs while a request waits: a
    rank that still restores answers the request only after that.
    """
    if state.evacuation is None:
        return is_asked or not state.must_yield
    is_sending = (
        state.flush.flight is not None or bool(state.commits.stored) or bool(state.uncommitted)
    )
    return is_asked and not is_sending


def newest_local(
    state: State, newest: CommitRef | None, *, before_step: int | None = None
) -> Staged | None:
    """The newest usable set in staging; None without one, and if this commit is newer.

    Args:
        before_step: only healthy sets of earlier steps, for a rollback.
    """
    usable = [s for s in state.staging.usable if s.nodes == 1]
    if before_step is not None:
        usable = [s for s in usable if s.id.step < before_step and is_healthy(s.health)]
    unclaimed = [s for s in usable if _will_be_newest(state, s)]
    if unclaimed:
        return max(unclaimed, key=lambda staged: state.order(staged.id))
    placed = [(ref, s) for s in usable if (ref := state.ref_of(s.id)) is not None]
    best = max(placed, key=lambda each: (each[0], each[1].id), default=None)
    if best is None or (newest is not None and best[0] < newest):
        return None
    return best[1]


def _will_be_newest(state: State, staged: Staged) -> bool:
    """Whether the start of this set has yet to claim its generation, which is then the newest one."""
    start = state.start_of(staged.id.start)
    is_unclaimed = start is not None and start.is_open and start.generation is None
    return is_unclaimed and state.commits.is_run_read
