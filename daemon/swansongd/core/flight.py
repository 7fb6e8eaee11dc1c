# SPDX-License-Identifier: Apache-2.0
"""The flush in flight: the set that it sends, and the bandwidth that its progress shows."""

from __future__ import annotations

import math
from dataclasses import replace

from swansongd.core import learning, planner
from swansongd.core.events import (
    CancelFlush,
    Flushed,
    FlushFailed,
    FlushProgress,
    StartFlush,
)
from swansongd.core.planner import Candidate
from swansongd.core.state import (
    Flight,
    State,
    StoredSet,
)
from swansongd.core.transition import Transition
from swansongd.model import (
    CheckpointId,
    Staged,
)

EARLY_EVERY_S = 1.0
"""Files that became final meanwhile join the flush at this interval, and whenever it is idle."""
START_S = 1.0
"""A flush without progress lowers the measured bandwidth only after this time."""
SAMPLE_S = 0.25
"""Interval between two samples of the bandwidth during a flush."""
SAMPLE_FIRST_S = 1.0
"""The first sample takes longer: no earlier one smooths it."""
THROTTLED = 0.8
"""A background flush at this fraction of its limit, or more, measures the limit and not the store."""
RETRY_S_MAX = 10.0
"""Longest backoff without a notice: a flush may wait this long after the store has recovered."""
RETRY_URGENT_S = 0.5


def record_progress(transition: Transition, event: FlushProgress) -> None:
    """The flush has stored more bytes."""
    flight = transition.state.flight
    if flight is None or flight.flush_id != event.flush_id:
        return
    first = not flight.has_begun and event.bytes_sent > 0
    moved = replace(
        flight,
        bytes_sent=max(flight.bytes_sent, event.bytes_sent),
        bytes_before=max(flight.bytes_before, event.bytes_stored - event.bytes_sent),
    )
    is_comparing = event.bytes_compared > flight.bytes_compared
    moved = replace(moved, bytes_compared=max(flight.bytes_compared, event.bytes_compared))
    if is_comparing and event.bytes_sent <= flight.bytes_sent:
        moved = replace(moved, sampled_mono_s=max(flight.sampled_mono_s, transition.now))
        moved = replace(moved, sampled_bytes=moved.bytes_sent)
    if is_comparing and not moved.bytes_sent:
        moved = replace(moved, sending_mono_s=transition.now)
    if first:  # the time to the first byte is not part of the bandwidth
        moved = replace(
            moved,
            has_begun=True,
            sampled_mono_s=transition.now,
            sampled_bytes=event.bytes_sent,
        )
    if event.bytes_stored < flight.staged.size_bytes:
        moved = replace(moved, parts_stored_mono_s=None)
    elif moved.parts_stored_mono_s is None:
        moved = replace(moved, parts_stored_mono_s=transition.now)
    transition.state = replace(
        transition.state,
        flight=moved,
        stored_bytes={**transition.state.stored_bytes, flight.staged.id: event.bytes_stored},
    )
    sample_bandwidth(transition)


def record_flushed(transition: Transition, event: Flushed) -> None:
    """All shards of the set are stored: its manifest is due."""
    flight = transition.state.flight
    if flight is None or flight.flush_id != event.flush_id or not flight.is_sealed:
        return
    size_bytes = flight.staged.size_bytes
    before = max(flight.bytes_before, event.bytes_referenced)
    sent = event.bytes_sent if event.bytes_sent is not None else size_bytes - before
    sent = max(sent, flight.bytes_sent)
    learning.record_flushed(transition, flight, event, sent)
    _learn_from_the_end(transition, flight, sent)
    transition.state = replace(
        transition.state,
        flight=None,
        failures=0,
        stored_bytes={
            id_: size
            for id_, size in transition.state.stored_bytes.items()
            if id_ != flight.staged.id
        },
        stored=(
            *transition.state.stored,
            StoredSet(
                flush_id=event.flush_id, staged=flight.staged, shards=event.shards, is_asked=False
            ),
        ),
    )
    transition.mark("flushed", step=flight.staged.id.step, size_bytes=size_bytes)


def _learn_from_the_end(transition: Transition, flight: Flight, bytes_sent: int) -> None:
    if bytes_sent < planner.BANDWIDTH_SAMPLE_MIN_BYTES:
        return
    # The completion of uploads is not part of the bandwidth.
    end_mono_s = flight.parts_stored_mono_s or transition.now
    if flight.is_sampled:
        _learn(transition, bytes_sent - flight.sampled_bytes, end_mono_s - flight.sampled_mono_s)
    else:  # too short for a sample on the way
        begun_mono_s = flight.sending_mono_s or flight.started_mono_s
        _learn(transition, bytes_sent, end_mono_s - begun_mono_s)


def sample_bandwidth(transition: Transition) -> None:
    """Update the bandwidth with the bytes sent since the last sample, even if there were none."""
    flight = transition.state.flight
    if flight is None:
        return
    to_send = flight.staged.size_bytes - flight.bytes_before
    duration_s = transition.now - flight.sampled_mono_s
    is_known = transition.state.bandwidth_bytes_per_s is not None
    if to_send < planner.BANDWIDTH_SAMPLE_MIN_BYTES or duration_s < (
        SAMPLE_S if is_known else SAMPLE_FIRST_S
    ):
        return
    moved = flight.bytes_sent - flight.sampled_bytes
    if flight.parts_stored_mono_s is not None:
        return  # the rest counts at the end
    if moved or flight.bytes_unsent:  # else the flush only waits for responses
        _learn(transition, moved, duration_s)
    transition.state = replace(
        transition.state,
        flight=replace(
            flight, sampled_mono_s=transition.now, sampled_bytes=flight.bytes_sent, is_sampled=True
        ),
    )


def _learn(transition: Transition, size_bytes: int, duration_s: float) -> None:
    known = transition.state.bandwidth_bytes_per_s
    limit = transition.state.settings.background_limit_bytes_per_s
    is_limited = limit is not None and transition.state.evacuation is None  # any notice lifts it
    is_at_limit = is_limited and size_bytes >= THROTTLED * (limit or 0.0) * duration_s
    if is_at_limit and (known is None or known * duration_s >= size_bytes):
        return  # the sample shows the limit: the store is at least this fast
    transition.state = replace(
        transition.state,
        bandwidth_bytes_per_s=planner.updated_bandwidth(known, size_bytes, duration_s),
    )


def record_failed(transition: Transition, event: FlushFailed) -> None:
    """The flush failed: the set is void, or the store is retried after a pause."""
    flight = transition.state.flight
    if flight is None or flight.flush_id != event.flush_id:
        return
    transition.state = replace(transition.state, flight=None)
    transition.log(
        "error", "flush_failed", step=flight.staged.id.step, reason=event.reason, void=event.void
    )
    if event.void and flight.is_sealed:  # sealing itself may have changed a growing set
        transition.state = replace(
            transition.state, unusable=transition.state.unusable | {flight.staged.id}
        )
    else:
        back_off(transition)


def record_absent(transition: Transition, present: frozenset[CheckpointId]) -> None:
    """A scan did not find the set in flight any more."""
    flight = transition.state.flight
    if flight is not None and flight.is_sealed and flight.staged.id not in present:
        transition.do(CancelFlush(flight.flush_id))
        transition.state = replace(transition.state, flight=None)


def back_off(transition: Transition) -> None:
    """Retry after an exponential backoff, or after a short pause during an evacuation."""
    failures = transition.state.failures + 1
    wait_s = min(RETRY_S_MAX, 2.0 ** min(failures, 10) / 2)
    if transition.state.evacuation is not None:
        wait_s = RETRY_URGENT_S
    transition.state = replace(
        transition.state, failures=failures, retry_mono_s=transition.now + wait_s
    )


def reconcile(transition: Transition) -> None:
    """Start, change or cancel the flush so that it sends the best set."""
    _change_flight(transition)
    flight = transition.state.flight
    if flight is not None and not flight.is_sealed and transition.state.early is None:
        transition.do(CancelFlush(flight.flush_id))  # no request waits for this set any more
        transition.state = replace(transition.state, flight=None)


def _change_flight(transition: Transition) -> None:
    state = transition.state
    flight = state.flight if state.flight is not None and state.flight.is_sealed else None
    if transition.now < state.retry_mono_s or not state.is_run_read:
        return  # before the run is read, a set in staging may be committed already
    candidates = state.candidates
    if state.evacuation is None:
        if (
            flight is None and candidates
        ):  # without a notice, a flush finishes before the next begins
            _start_flush(transition, max(candidates, key=lambda each: each.order).id)
        return
    data_left_s = transition.left_s - state.settings.reserve_s
    if transition.left_s > 0 >= data_left_s:
        _spare_the_reserve(transition)
        return
    if transition.left_s <= 0:  # the VM has outlived its deadline: whatever still arrives counts
        data_left_s = math.inf
    answer = state.answer if state.evacuation.verdict is None else state.follow_up_answer
    if answer is not None and not state.is_covered(answer):
        # A trainer that continues may seal newer sets: they wait until this one is committed.
        candidates = tuple(c for c in candidates if c.order <= state.order(answer))
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
    """Whether to send shards of the set that is being written, instead of a sealed set."""
    early = state.early
    if early is None or state.ref_of(early.id) is None:
        return False
    if wanted is None:
        return True
    bandwidth = state.bandwidth_bytes_per_s
    return (
        not planner.fits(wanted, data_left_s, bandwidth)
        and planner.send_s(state.measured, state.bytes_to_come) <= data_left_s
    )


def _start_early(transition: Transition) -> None:
    """Send the final files of the growing set, and at intervals those that became final since."""
    early, flight = transition.state.early, transition.state.flight
    assert early is not None
    if flight is not None and not flight.is_sealed and flight.staged.id == early.id:
        is_stored = transition.state.stored_bytes.get(early.id, 0) >= flight.staged.size_bytes
        is_due = is_stored or transition.now - flight.started_mono_s >= EARLY_EVERY_S
        if flight.staged.files == early.files or not is_due:
            return
    _fly(transition, early, is_sealed=False)


def _spare_the_reserve(transition: Transition) -> None:
    """From here to the deadline the link belongs to the manifest."""
    flight = transition.state.flight
    if flight is not None:
        stored = transition.state.stored_bytes.get(flight.staged.id, 0)
        transition.mark("flush_stopped", step=flight.staged.id.step, bytes_stored=stored)
        transition.do(CancelFlush(flight.flush_id))
        transition.state = replace(transition.state, flight=None)


def _start_flush(transition: Transition, wanted: CheckpointId) -> None:
    staged = next(item for item in transition.state.staged if item.id == wanted)
    _fly(transition, staged, is_sealed=True)


def _fly(transition: Transition, staged: Staged, *, is_sealed: bool) -> None:
    state, before = transition.state, transition.state.flight
    ref = state.ref_of(staged.id)
    assert ref is not None
    flush_id = f"{staged.id}.{state.flushes + 1}"
    flight = Flight(
        flush_id=flush_id,
        staged=staged,
        is_sealed=is_sealed,
        started_mono_s=transition.now,
        bytes_before=state.stored_bytes.get(staged.id, 0),
        sampled_mono_s=transition.now + START_S,
    )
    if before is not None and before.staged.id == staged.id and before.bytes_unsent:
        flight = replace(  # the engine continues its parts in flight, without another start
            flight,
            has_begun=before.has_begun,
            sampled_mono_s=before.sampled_mono_s,
            sampled_bytes=before.sampled_bytes - before.bytes_sent,
        )
    if before is not None and before.staged.id == staged.id:
        first_mono_s = before.first_started_mono_s
        flight = replace(
            flight,
            first_started_mono_s=before.started_mono_s if first_mono_s is None else first_mono_s,
            bytes_sent_before=before.bytes_sent_before + before.bytes_sent,
        )
    transition.state = replace(state, flushes=state.flushes + 1, flight=flight)
    transition.mark(
        "flush" if is_sealed else "early_shards",
        step=staged.id.step,
        size_bytes=staged.size_bytes,
    )
    transition.do(StartFlush(flush_id, staged, ref.generation, is_sealed=is_sealed))
