# SPDX-License-Identifier: Apache-2.0
"""The knowledge about the training that outlasts a restart of the daemon within one boot.

A restarted daemon finds its sets in staging and its commits in the store.  It finds nothing there about
training that has left the line of the newest commit, and nothing about trainers that still run.  Without
both, it could conclude SAFE while a trainer that reconnects later is ahead of every commit.
:func:`record_of` is stored after each decision, and :func:`resumed` continues from it.

The record has no steps: a trainer that has not reconnected may be at any step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swansongd.core.state import State
from swansongd.model import Ahead, TrainerView, TrainingRecord

KNOWN_MAX = 256
"""Bound of each list in a record."""


def record_of(state: State) -> TrainingRecord:
    """The record for the next life of the daemon."""
    return TrainingRecord(
        trainers=tuple(
            identity(trainer) for trainer in state.trainers if trainer.process_start > 0
        )[-KNOWN_MAX:],
        starts=state.starts,
        closed_starts=state.closed_starts,
        retained=tuple(sorted(state.retained)[-KNOWN_MAX:]),
        must_claim=state.must_claim,
        owes_checkpoint=state.owes_checkpoint,
        owed_above=state.owed_above,
        ahead=ahead_of(state),
    )


def ahead_of(state: State) -> Ahead | None:
    """The training that the open evacuation has seen; None without one."""
    evacuation = state.evacuation
    if evacuation is None or evacuation.is_precaution:
        return state.ahead_before
    return Ahead(evacuation.id, evacuation.ahead, evacuation.has_unknown)


def resumed(state: State, record: TrainingRecord, running: Sequence[TrainerView]) -> State:
    """The first state of a daemon whose previous life, in this boot, left this record.

    Args:
        state: without it.
        record: of the previous life.
        running: its trainers whose processes still run.
    """
    ahead = record.ahead
    if ahead is not None and len(running) < len(record.trainers):
        ahead = replace(ahead, is_unknown=True)
    return replace(
        state,
        trainers=tuple(running),
        starts=record.starts,
        closed_starts=record.closed_starts,
        retained=frozenset(record.retained),
        must_claim=record.must_claim,
        owes_checkpoint=record.owes_checkpoint,
        owed_above=record.owed_above,
        ahead_before=ahead,
    )


def identity(trainer: TrainerView) -> TrainerView:
    """The trainer without its connection, steps and measurements, in a form that compares equal."""
    return TrainerView(
        connection=0,
        pid=trainer.pid,
        process_start=trainer.process_start,
        rank=trainer.rank,
        world_size=trainer.world_size,
        local_world_size=trainer.local_world_size,
        node=trainer.node,
        nodes=trainer.nodes,
        start_id=trainer.start_id,
        is_connected=False,
    )
