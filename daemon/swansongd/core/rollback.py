# SPDX-License-Identifier: Apache-2.0
"""A trainer goes back to a healthy checkpoint without ending: what was saved after it counts no more.

The run goes on as a new generation, so that its commits come after those that it has taken back,
whatever their steps.
"""

from __future__ import annotations

from swansongd.core import claims
from swansongd.core.events import CancelFlush, ClaimGeneration, Prune
from swansongd.core.turn import Turn
from swansongd.model import is_healthy


def rolled_back(turn: Turn, step: int) -> None:
    """Forget the sets after ``step``, and have a new generation claimed."""
    state = turn.state
    if state.flight is not None:
        turn.do(CancelFlush(state.flight.flush_id))
    # Where the run goes on from is committed again: nothing newer stands then under the new generation.
    again = [s for s in state.staged if s.id.step == step and is_healthy(s.health)]
    later = [staged for staged in state.staged if staged.id.step > step]
    turn.log("warning", "rolled_back", to_step=step, sets_dropped=len(later))
    turn.set(
        flight=None,
        stored=(),
        generation=None,
        healthy_commit=None,
        periodic=None,
        inherited=state.inherited | {staged.id for staged in state.staged if staged not in again},
        unusable=state.unusable | {staged.id for staged in later},
    )
    directories = tuple(s.directory for s in later if s.framework == "swansong")
    if directories:
        turn.do(Prune(directories))
    if state.generation is not None:  # else a claim is under way already
        claims.order(turn, ClaimGeneration(state.generation))
