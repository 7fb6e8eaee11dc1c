# SPDX-License-Identifier: Apache-2.0
"""Claims of generations, at a limited rate.

Trainers cause claims: by another start of a job over several VMs, and by a rollback.  Each claim is an
object in the bucket that is never removed, so a trainer that does either in a loop must not fill the bucket.
"""

from __future__ import annotations

from swansongd.core.events import ClaimGeneration, JoinGeneration
from swansongd.core.turn import Turn

CLAIMS_MAX = 4
WINDOW_S = 60.0
"""No more than CLAIMS_MAX claims within this time."""


def order(turn: Turn, claim: ClaimGeneration | JoinGeneration) -> None:
    """Have this claim made, in place of one that is still due: now, or when the rate allows."""
    turn.set(claim_due=claim)
    if len(_recent(turn)) >= CLAIMS_MAX:
        turn.log("warning", "claim_delayed", reason="the job starts or goes back too often")


def steer(turn: Turn) -> None:
    """Make the claim that is due, when the rate allows."""
    due, recent = turn.state.claim_due, _recent(turn)
    if due is not None and len(recent) < CLAIMS_MAX:
        turn.set(claim_due=None, claims_mono_s=(*recent, turn.now))
        turn.do(due)


def _recent(turn: Turn) -> tuple[float, ...]:
    return tuple(made for made in turn.state.claims_mono_s if turn.now - made < WINDOW_S)
