# SPDX-License-Identifier: Apache-2.0
"""Claims of generations, at a limited rate.

Trainers cause claims: by another start of a job over several VMs, and by a rollback.  Each claim is an
object in the bucket that is never removed, so a trainer that does either in a loop must not fill the bucket.
"""

from __future__ import annotations

from dataclasses import replace

from swansongd.core.events import ClaimGeneration, JoinGeneration
from swansongd.core.transition import Transition

CLAIMS_MAX = 4
WINDOW_S = 60.0
"""No more than CLAIMS_MAX claims within this time."""


def order(transition: Transition, claim: ClaimGeneration | JoinGeneration) -> None:
    """Have this claim made, in place of one that is still due: now, or when the rate allows."""
    transition.state = replace(transition.state, claim_due=claim)
    if len(_recent(transition)) >= CLAIMS_MAX:
        transition.log("warning", "claim_delayed", reason="the job starts or goes back too often")


def steer(transition: Transition) -> None:
    """Make the claim that is due, when the rate allows."""
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
