# SPDX-License-Identifier: Apache-2.0
"""The limits of flush and commit that follow from the state: urgency, bandwidth, and how long to retry.

Data stops at the deadline less the reserve, so that the manifest has the link for itself.  The commit may
use the reserve.  A VM that outlives its deadline has no limit any more: whatever still arrives counts.
"""

from __future__ import annotations

from swansongd.core.state import State


def is_urgent(state: State) -> bool:
    """Whether a notice or a precaution is being answered: nothing may wait for the background."""
    return state.evacuation is not None


def is_undecided(state: State) -> bool:
    """Whether an evacuation has no verdict yet: nothing that it does not need may use the store."""
    return state.evacuation is not None and state.evacuation.verdict is None


def needs_link(state: State) -> bool:
    """Whether a verdict waits for bytes that are sent now: the other daemons of this VM yield."""
    return state.is_deciding and state.flush.flight is not None


def may_prune(state: State) -> bool:
    """Whether this VM applies the retention, if the daemon does: the first VM of a job that is not fenced."""
    is_first = all(trainer.node == 0 for trainer in state.ranks.trainers)
    return state.generation is not None and state.starts.fenced_by is None and is_first


def rate_bytes_per_s(state: State) -> float | None:
    """The bandwidth that a flush may use; None for all of it.

    The background limit protects training.  Ranks of another start of the job block until the flush is done,
    so there is no training to protect.
    """
    is_free = is_urgent(state) or state.starts.is_finishing
    return None if is_free else state.settings.background_limit_bytes_per_s


def may_mirror(state: State) -> bool:
    """Whether copies to the mirror may use the link: not while a checkpoint is sent, or a verdict is due.

    Another daemon of this VM may send that checkpoint.  After the verdict they may, as long as no follow-up
    checkpoint is sent: the VM may be the last one that reaches both stores.
    """
    is_free = not is_undecided(state) and not state.must_yield
    return is_free and state.flush.flight is None


def mirror_rate_bytes_per_s(state: State, limit_bytes_per_s: float | None) -> float | None:
    """The bandwidth that copies to the mirror may use; None for all of it, once a verdict stands."""
    return None if is_urgent(state) else limit_bytes_per_s


def data_give_up_mono_s(state: State, now_mono_s: float) -> float | None:
    """The instant after which a request that carries data is not retried; None without a deadline."""
    deadline_mono_s = commit_give_up_mono_s(state, now_mono_s)
    return None if deadline_mono_s is None else deadline_mono_s - state.settings.reserve_s


def commit_give_up_mono_s(state: State, now_mono_s: float) -> float | None:
    """The instant after which a request of the commit is not retried; None without a deadline ahead."""
    evacuation = state.evacuation
    if evacuation is None or now_mono_s >= evacuation.deadline_mono_s:
        return None
    return evacuation.deadline_mono_s
