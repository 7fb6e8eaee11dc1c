# SPDX-License-Identifier: Apache-2.0
"""The state machine: ``step(state, event, now) -> (new state, actions)``.

Every turn has two halves.  *Absorb* writes down what the event says, and nothing more.  *Advance*
looks at all the facts and orders whatever is missing between how the world is and how it should be,
so the same facts lead to the same orders in whatever sequence they came, and a daemon that was
restarted in the middle goes on where it was.

Pure: no clock, disk, socket, thread or environment.  Bad luck arrives as an event and is never raised.
"""

from __future__ import annotations

from dataclasses import replace

from swansongd.core.absorb import absorb
from swansongd.core.advance import advance
from swansongd.core.events import Action, Event
from swansongd.core.state import State
from swansongd.core.transition import Transition
from swansongd.model import TrainerView


def step(state: State, event: Event, now_mono_s: float) -> tuple[State, tuple[Action, ...]]:
    """One turn of the decision loop."""
    transition = Transition(state, now_mono_s)
    if not state.is_leaving:
        absorb(transition, event)
        advance(transition)
    return transition.state, tuple(transition.actions)


def rebuilt(state: State) -> State:
    """The state without the reports of trainers and staging, as a restart of the daemon leaves it.

    For a state that :func:`step` cannot work with: only input from outside can have spoiled it.  Notices,
    the generation and the commits stay, and the evacuation opens again.  The caller orders a scan of staging.
    """
    return replace(
        state,
        trainers=tuple(_without_reports(trainer) for trainer in state.trainers),
        staged=(),
        pending=(),
        growing=(),
        kept={},
        rejected=frozenset(),
        flight=None,
        stored=(),
        last_commit=state.last_complete,
        incomplete=None,
        retry_mono_s=0.0,
        failures=0,
        bandwidth_bytes_per_s=None,
        signal_save_s=None,
        periodic=None,
        saved_mono_s=None,
        stalled=frozenset(),
        evacuation=None,
        opened=(),
    )


def _without_reports(trainer: TrainerView) -> TrainerView:
    return TrainerView(
        connection=trainer.connection,
        pid=trainer.pid,
        rank=trainer.rank,
        world_size=trainer.world_size,
        local_world_size=trainer.local_world_size,
        nodes=trainer.nodes,
        step=trainer.step,
        takes_periodic=trainer.takes_periodic,
        is_connected=trainer.is_connected,
        greeted_mono_s=trainer.greeted_mono_s,
        start_id=trainer.start_id,
        start_step=trainer.start_step,
    )
