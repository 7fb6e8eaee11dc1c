# SPDX-License-Identifier: Apache-2.0
"""The state machine: ``step(state, event, now) -> (new state, actions)``.

Every turn has two halves.  *Absorb* writes down what the event says, and nothing more.  *Advance*
looks at all the facts and orders whatever is missing between how the world is and how it should be,
so the same facts lead to the same orders in whatever sequence they came, and a daemon that was
restarted in the middle goes on where it was.

Pure: no clock, disk, socket, thread or environment.  Bad luck arrives as an event and is never raised.
"""

from __future__ import annotations

from swansongd.core.absorb import absorb
from swansongd.core.advance import advance
from swansongd.core.events import Action, Event
from swansongd.core.state import State
from swansongd.core.turn import Turn


def step(state: State, event: Event, now_mono_s: float) -> tuple[State, tuple[Action, ...]]:
    """One turn of the decision loop."""
    turn = Turn(state, now_mono_s)
    if not state.is_leaving:
        absorb(turn, event)
        advance(turn)
    return turn.state, tuple(turn.actions)
