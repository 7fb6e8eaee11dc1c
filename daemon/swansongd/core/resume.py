# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a trainer resumes from: one rule, for the hooks and for the restore unit.

Sealed sets in staging and commits are ordered alike, by generation and step.  A set in staging has the
generation under which it was, or will be, committed.  In a job over several VMs, a set in staging is only a
part of a checkpoint, so only commits are candidates.

All ranks of one start must resume from the same checkpoint.  The first answer therefore remains valid
while the facts behind it do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swansong.protocol import RestoreQuery

from swansongd.core import nodes
from swansongd.core.state import State
from swansongd.model import CheckpointId, CommitRef, Staged, is_healthy

ONE_START_S = 60.0
"""A query within this time of an answer is from a rank of the same start, unless a set was sealed since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The facts behind an answer."""

    answered_mono_s: float
    newest: CommitRef | None
    """The newest whole commit in the store, or the commit that the query named."""
    local: CheckpointId | None = None
    """The newest usable set in staging."""
    job_start_id: str = ""
    """The answer is valid for this start of the job only."""

    def is_recent(self, now_mono_s: float) -> bool:
        """Whether the answer is so new that the store need not be read again."""
        return is_one_start(self.answered_mono_s, now_mono_s)


def is_one_start(answered_mono_s: float, now_mono_s: float) -> bool:
    """Whether a query now is from a rank of the same start as the query that was answered then."""
    return now_mono_s - answered_mono_s < ONE_START_S


def basis(state: State, newest: CommitRef | None, now_mono_s: float) -> Basis:
    """The facts of this state, with the newest commit of the store."""
    return Basis(
        answered_mono_s=now_mono_s,
        newest=newest,
        local=_newest_id(state),
        job_start_id=state.job_start_id,
    )


def still_holds(given: Basis, state: State) -> bool:
    """Whether an answer with this basis is still valid, by the facts on this VM."""
    return (
        not _is_part_only(state)
        and given.local == _newest_id(state)
        and given.job_start_id == state.job_start_id
    )


def may_answer(state: State, query: RestoreQuery) -> bool:
    """Whether the decision loop has left behind the steps that no longer count.

    Over several VMs the choice is made under the generation of this start of the job: from its claim on,
    nothing of an earlier start is committed.
    """
    wanted = query.job_start_id
    if query.generation >= 0 and not query.refused:  # rank 0 has chosen this commit
        return not wanted or state.job_start_id == wanted
    if query.rollback or not state.settings.several_vms:
        return True
    is_wanted = state.job_start_id == wanted if wanted else nodes.is_alone(state.job_start_id)
    return is_wanted and state.finishing is None and state.generation is not None


def why_no_prefetch(state: State, newest: CommitRef | None) -> str:
    """The reason why no trainer will need this commit from the store; empty: it is fetched.

    Args:
        newest: the newest whole commit of the run.
    """
    if state.newer_generation is not None:
        return f"generation {state.newer_generation} has taken the run over"
    if any(trainer.start_step >= 0 for trainer in state.trainers):
        return "training has begun"
    known = state.last_complete
    if known is not None and known.generation == state.generation and known != newest:
        return "this VM has committed a newer checkpoint"
    if newest is None:
        return "" if state.generation is None else "the run has no commit"
    local = newest_local(state, newest)
    return "" if local is None else f"step {local.id.step} is in staging"


def newest_known(state: State, listed: CommitRef | None) -> CommitRef | None:
    """The newest whole commit: an earlier VM may have committed between the listing and our claim."""
    known = state.last_complete
    if known is None or known.generation == state.generation:
        return listed
    return known if listed is None else max(listed, known)


def may_download(state: State, *, is_asked: bool) -> bool:
    """Whether a download may use the link now.

    The link belongs to an evacuation.  A download that no trainer has asked for stops while one is open.
    One that a trainer waits for runs, unless the evacuation sends bytes.  It runs while a request waits: a
    rank that still restores answers the request only after that.
    """
    if state.evacuation is None:
        return True
    is_sending = state.flight is not None or bool(state.stored) or bool(state.uncommitted)
    return is_asked and not is_sending


def newest_local(state: State, newest: CommitRef | None) -> Staged | None:
    """The newest usable set in staging; None without one, and if the newest commit is newer."""
    if _is_part_only(state):
        return None
    return _newest(state, (s for s in state.staged if s.id not in state.unusable), newest)


def newest_healthy_local(state: State, before_step: int, newest: CommitRef | None) -> Staged | None:
    """The newest healthy set of an earlier step; None without one, and if that commit is newer."""
    healthy = (
        s
        for s in state.staged
        if s.id not in state.unusable and s.id.step < before_step and is_healthy(s.health)
    )
    return _newest(state, healthy, newest)


def _is_part_only(state: State) -> bool:
    """Whether a set in staging may be one VM's part of a checkpoint."""
    return state.settings.several_vms and not nodes.is_alone(state.job_start_id)


def _newest_id(state: State) -> CheckpointId | None:
    newest = newest_local(state, None)
    return None if newest is None else newest.id


def _newest(state: State, sets: Iterable[Staged], newest: CommitRef | None) -> Staged | None:
    def place(staged: Staged) -> CommitRef:
        ref = state.ref_of(staged.id)
        if ref is None:  # its generation is unknown: compare by step
            generation = newest.generation if newest is not None else 0
            return CommitRef(generation, staged.id.step, staged.id.is_final)
        return ref

    best = max(sets, key=lambda staged: (place(staged), staged.id), default=None)
    return None if best is None or (newest is not None and place(best) < newest) else best
