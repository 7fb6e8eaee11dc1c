# SPDX-License-Identifier: Apache-2.0
"""Claims of generations at a limited rate, and the newer claims of other VMs.

Trainers cause claims: by another start of a job over several VMs, and by a rollback.  Each claim is an
object that is never deleted, so the rate limit keeps a trainer in a crash loop from filling the bucket.
"""

from __future__ import annotations

from dataclasses import replace

from swansongd.core.events import (
    CancelFlush,
    CheckFence,
    ClaimGeneration,
    Exit,
    FenceFound,
    JoinGeneration,
    TellFenced,
)
from swansongd.core.transition import EXIT_FENCED, Transition

CLAIMS_MAX = 4
WINDOW_S = 60.0
"""No more than CLAIMS_MAX claims within this time."""


def set_due(transition: Transition, claim: ClaimGeneration | JoinGeneration) -> None:
    """Note the claim to make, in place of one that is still due: now, or when the rate allows it."""
    transition.state = replace(transition.state, claim_due=claim)
    if len(_recent(transition)) >= CLAIMS_MAX:
        transition.log("warning", "claim_delayed", reason="too many job starts or rollbacks")


def reconcile(transition: Transition) -> None:
    """Make the claim that is due, when the rate allows it."""
    due, recent = transition.state.claim_due, _recent(transition)
    if due is not None and len(recent) < CLAIMS_MAX:
        transition.state = replace(
            transition.state, claim_due=None, claims_mono_s=(*recent, transition.now)
        )
        transition.do(due)


def _recent(transition: Transition) -> tuple[float, ...]:
    return tuple(
        made for made in transition.state.claims_mono_s if transition.now - made < WINDOW_S
    )


def record_fence(transition: Transition, event: FenceFound) -> None:
    """Another VM has taken the run over."""
    state = transition.state
    if state.fenced_by is None and event.is_news(state.generation or 0):
        transition.state = replace(state, fenced_by=event.generation)


def record_woke_up(transition: Transition, slept_s: float) -> None:
    """The VM was suspended: another VM may have taken the run over meanwhile."""
    transition.log("warning", "woke_up", slept_s=round(slept_s, 1))
    transition.do(CheckFence())


def leave_fenced(transition: Transition, generation: int) -> None:
    """End the daemon: the run belongs to another VM."""
    if transition.state.flight is not None:
        transition.do(CancelFlush(transition.state.flight.flush_id))
    transition.log(
        "error", "fenced", generation=transition.state.generation, newer_generation=generation
    )
    transition.do(TellFenced(generation))
    transition.do(Exit(EXIT_FENCED, f"generation {generation} has taken the run over"))
    transition.state = replace(transition.state, is_leaving=True, flight=None)
