# SPDX-License-Identifier: Apache-2.0
"""What the wire is used for: which set is in flight, sealed or growing, and which manifest is due."""

from __future__ import annotations

import math
from dataclasses import replace

from swansongd.core import planner
from swansongd.core.events import CancelFlush, CommitManifest, StartFlush
from swansongd.core.planner import Candidate
from swansongd.core.state import Flight, State
from swansongd.core.transition import Transition
from swansongd.model import CheckpointId, Staged

EARLY_EVERY_S = 1.0
"""Files that have become final meanwhile join a flush so often, and whenever it has nothing to do."""
START_S = 1.0
"""That a flush has moved nothing counts against the bandwidth from so long after its start."""


def steer_flush(transition: Transition) -> None:
    """Have the right set in flight."""
    _change_flight(transition)
    flight = transition.state.flight
    if flight is not None and not flight.is_sealed and transition.state.early is None:
        transition.do(CancelFlush(flight.flush_id))  # nobody waits for it any more
        transition.state = replace(transition.state, flight=None)


def _change_flight(transition: Transition) -> None:
    state = transition.state
    flight = state.flight if state.flight is not None and state.flight.is_sealed else None
    if state.generation is None or transition.now < state.retry_mono_s:
        return
    candidates = state.candidates
    if state.evacuation is None:
        if flight is None and candidates:  # in the background what is begun is finished first
            _start_flush(transition, max(candidate.id for candidate in candidates))
        return
    data_left_s = transition.left_s - state.settings.reserve_s
    if transition.left_s > 0 >= data_left_s:
        _spare_the_reserve(transition)
        return
    if transition.left_s <= 0:  # outlived, so far: whatever still gets through is won
        data_left_s = math.inf
    answer = state.answer
    if answer is not None and state.evacuation.verdict is None and not state.is_covered(answer):
        # A trainer that trains on may seal newer ones: they wait until this one is committed.
        candidates = tuple(c for c in candidates if c.id <= answer)
    wanted = planner.choose(
        candidates,
        left_s=data_left_s,
        bandwidth_bytes_per_s=state.bandwidth_bytes_per_s,
        in_flight=flight.staged.id if flight is not None else None,
    )
    if _is_early_better(state, wanted, data_left_s):
        _start_early(transition)
    elif wanted is not None and (flight is None or flight.staged.id != wanted.id):
        _start_flush(transition, wanted.id)


def _is_early_better(state: State, wanted: Candidate | None, data_left_s: float) -> bool:
    """Whether the wire should carry shards of the set that is being written, and no sealed one."""
    if state.early is None or wanted is None:
        return state.early is not None
    bandwidth = state.bandwidth_bytes_per_s
    return (
        not planner.fits(wanted, data_left_s, bandwidth)
        and planner.seconds_to_store(state.bytes_to_come, bandwidth) <= data_left_s
    )


def _start_early(transition: Transition) -> None:
    """Send what is final of the growing set, and from time to time what has come since."""
    early, flight = transition.state.early, transition.state.flight
    assert early is not None
    if flight is not None and not flight.is_sealed and flight.staged.id == early.id:
        is_stored = transition.state.kept.get(early.id, 0) >= flight.staged.size_bytes
        is_due = is_stored or transition.now - flight.started_mono_s >= EARLY_EVERY_S
        if flight.staged.files == early.files or not is_due:
            return
    _fly(transition, early, is_sealed=False)


def _spare_the_reserve(transition: Transition) -> None:
    """From here to the deadline the wire belongs to the manifest."""
    flight = transition.state.flight
    if flight is not None:
        stored = transition.state.kept.get(flight.staged.id, 0)
        transition.mark("flush_stopped", step=flight.staged.id.step, bytes_stored=stored)
        transition.do(CancelFlush(flight.flush_id))
        transition.state = replace(transition.state, flight=None)


def _start_flush(transition: Transition, wanted: CheckpointId) -> None:
    staged = next(item for item in transition.state.staged if item.id == wanted)
    _fly(transition, staged, is_sealed=True)


def _fly(transition: Transition, staged: Staged, *, is_sealed: bool) -> None:
    state = transition.state
    assert state.generation is not None
    flush_id = f"{staged.id}.{state.flushes + 1}"
    transition.state = replace(
        transition.state,
        flushes=state.flushes + 1,
        flight=Flight(
            flush_id=flush_id,
            staged=staged,
            is_sealed=is_sealed,
            started_mono_s=transition.now,
            bytes_before=state.kept.get(staged.id, 0),
            sampled_mono_s=transition.now + START_S,
        ),
    )
    transition.mark(
        "flush" if is_sealed else "early_shards",
        step=staged.id.step,
        size_bytes=staged.size_bytes,
    )
    transition.do(StartFlush(flush_id, staged, state.generation, is_sealed=is_sealed))


def steer_commit(transition: Transition) -> None:
    state = transition.state
    if transition.now < state.retry_mono_s:
        return
    for item in state.stored:
        if not item.is_asked:
            asked = replace(item, is_asked=True)
            transition.state = replace(
                transition.state,
                stored=tuple(asked if i is item else i for i in transition.state.stored),
            )
            assert state.generation is not None
            transition.do(
                CommitManifest(
                    item.flush_id, item.staged, item.shards, state.generation, state.last_complete
                )
            )
