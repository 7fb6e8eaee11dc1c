# SPDX-License-Identifier: Apache-2.0
"""The flush in flight: the set that it sends, and the bandwidth that its progress shows."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace

from swansong_bucket.model import CheckpointId, Staged

from swansongd.core import events, learning, planner, ranks, staged_sets
from swansongd.core.planner import Candidate
from swansongd.core.state import Flight, FlushState, State
from swansongd.core.transition import Transition

EARLY_EVERY_S = 1.0
"""Files that became final meanwhile join the flush at this interval, and whenever it is idle."""
START_S = 1.0
"""A flush without progress lowers the measured bandwidth only after this time."""
SAMPLE_S = 0.25
"""Interval between two samples of the bandwidth during a flush."""
SAMPLE_FIRST_S = 1.0
"""The first sample takes longer: no earlier one smooths it."""
RETRY_S_MAX = 10.0
"""Longest backoff without a notice: a flush may wait this long after the store has recovered."""
RETRY_URGENT_S = 0.5


def record_progress(transition: Transition, event: events.FlushProgress) -> None:
    """The flush has stored more bytes."""
    flight = transition.state.flush.flight
    if flight is None or flight.flush_id != event.flush_id:
        return
    moved = replace(
        flight,
        bytes_sent=max(flight.bytes_sent, event.bytes_sent),
        bytes_before=max(flight.bytes_before, event.bytes_stored - event.bytes_sent),
        bytes_compared=max(flight.bytes_compared, event.bytes_compared),
        has_begun=flight.has_begun or event.bytes_sent > 0,
    )
    is_comparing = event.bytes_compared > flight.bytes_compared
    if is_comparing and not moved.bytes_sent:
        moved = replace(moved, sending_mono_s=transition.now)
    if moved.has_begun and not flight.has_begun:
        # The time to the first byte is not part of the bandwidth.
        moved = replace(moved, sampled_mono_s=transition.now, sampled_bytes=event.bytes_sent)
    elif is_comparing and event.bytes_sent <= flight.bytes_sent:
        sampled_mono_s = max(flight.sampled_mono_s, transition.now)
        moved = replace(moved, sampled_mono_s=sampled_mono_s, sampled_bytes=moved.bytes_sent)
    flush = transition.state.flush
    stored_bytes = {**flush.stored_bytes, flight.staged.id: event.bytes_stored}
    sent_bytes = flush.sent_bytes + moved.bytes_sent - flight.bytes_sent
    flush = replace(flush, flight=moved, stored_bytes=stored_bytes, sent_bytes=sent_bytes)
    _put(transition, flush)
    sample_bandwidth(transition)


def record_flushed(transition: Transition, event: events.Flushed) -> Staged | None:
    """All shards of the set in flight are stored: it has landed.

    Returns:
        The set; None if the event is of an earlier flush.
    """
    flush = transition.state.flush
    flight = flush.flight
    if flight is None or flight.flush_id != event.flush_id or not flight.is_sealed:
        return None
    size_bytes = flight.staged.size_bytes
    before = max(flight.bytes_before, event.bytes_referenced)
    sent = event.bytes_sent if event.bytes_sent is not None else size_bytes - before
    sent = max(sent, flight.bytes_sent)
    learning.record_flushed(transition, flight, event, sent)
    _learn_from_the_end(transition, flight, sent)
    others = {id_: size for id_, size in flush.stored_bytes.items() if id_ != flight.staged.id}
    sent_bytes = flush.sent_bytes + sent - flight.bytes_sent
    flush = replace(flush, flight=None, failures=0, stored_bytes=others, sent_bytes=sent_bytes)
    _put(transition, flush)
    transition.mark("flushed", step=flight.staged.id.step, size_bytes=size_bytes)
    return flight.staged


def _learn_from_the_end(transition: Transition, flight: Flight, bytes_sent: int) -> None:
    if bytes_sent < planner.BANDWIDTH_SAMPLE_MIN_BYTES:
        return
    if not flight.is_sampled:  # too short for a sample on the way
        begun_mono_s = flight.sending_mono_s or flight.started_mono_s
        learning.record_sent(transition, bytes_sent, transition.now - begun_mono_s)
    elif moved := bytes_sent - flight.sampled_bytes:
        learning.record_sent(transition, moved, transition.now - flight.sampled_mono_s)


def sample_bandwidth(transition: Transition) -> None:
    """Update the bandwidth with the bytes sent since the last sample, even if there were none."""
    flight = transition.state.flush.flight
    if flight is None:
        return
    to_send = flight.staged.size_bytes - flight.bytes_before
    duration_s = transition.now - flight.sampled_mono_s
    is_known = transition.state.learned.bandwidth_bytes_per_s is not None
    least_s = SAMPLE_S if is_known else SAMPLE_FIRST_S
    if to_send < planner.BANDWIDTH_SAMPLE_MIN_BYTES or duration_s < least_s:
        return
    moved = flight.bytes_sent - flight.sampled_bytes
    if moved or flight.bytes_unsent:  # else the flush only waits for responses
        learning.record_sent(transition, moved, duration_s)
    sampled = replace(
        flight, sampled_mono_s=transition.now, sampled_bytes=flight.bytes_sent, is_sampled=True
    )
    _put(transition, replace(transition.state.flush, flight=sampled))


def record_failed(transition: Transition, event: events.FlushFailed) -> None:
    """The flush failed: the set is void, or the store is retried after a pause."""
    flight = transition.state.flush.flight
    if flight is None or flight.flush_id != event.flush_id:
        return
    _put(transition, replace(transition.state.flush, flight=None))
    step, kind = flight.staged.id.step, event.kind
    transition.log(
        "error", "flush_failed", step=step, kind=kind, reason=event.reason, void=event.void
    )
    if event.void and flight.is_sealed:  # sealing itself may have changed a growing set
        staged_sets.give_up(transition, {flight.staged.id})
        ranks.record_changed(transition)  # another set may take its place
    else:
        back_off(transition)


def record_scan(transition: Transition, event: events.Scanned) -> None:
    """A scan ended: forget the sets that disappeared, because another set may get the name."""
    flush = transition.state.flush
    present = {staged.id for staged in event.staged}
    here = present | {staged.id for staged in event.growing}
    stored_bytes = {id_: size for id_, size in flush.stored_bytes.items() if id_ in here}
    _put(transition, replace(flush, stored_bytes=stored_bytes))
    flight = flush.flight
    if flight is not None and flight.is_sealed and flight.staged.id not in present:
        stop(transition)


def stop(transition: Transition) -> None:
    """Cancel the flush in flight, if there is one."""
    flush = transition.state.flush
    if flush.flight is not None:
        transition.do(events.CancelFlush(flush.flight.flush_id))
        _put(transition, replace(flush, flight=None))


def mark_suspect(transition: Transition, ids: Set[CheckpointId]) -> None:
    """Suspect training has sealed these sets."""
    flush = transition.state.flush
    if flush.flight is not None and flush.flight.staged.id in ids:
        marked = staged_sets.marked(flush.flight.staged)
        _put(transition, replace(flush, flight=replace(flush.flight, staged=marked)))


def record_committed(transition: Transition) -> None:
    """The store took a manifest: it works again."""
    _put(transition, replace(transition.state.flush, failures=0))


def record_link(transition: Transition, *, is_needed: bool) -> None:
    """Another daemon of this VM needs the link, or does not need it any more."""
    until_mono_s = math.inf if is_needed else transition.now
    flush = replace(transition.state.flush, link_needed_until_mono_s=until_mono_s)
    _put(transition, flush)


def cut_backoff(transition: Transition) -> None:
    """Retry at once: an evacuation opens, and the time is short."""
    _put(transition, replace(transition.state.flush, retry_mono_s=transition.now))


def forget(transition: Transition) -> None:
    """Forget the flush in flight and the failures; the number of flushes makes their ids unique."""
    flush = transition.state.flush
    kept = FlushState(
        flushes=flush.flushes,
        sent_bytes=flush.sent_bytes,
        link_needed_until_mono_s=flush.link_needed_until_mono_s,
    )
    _put(transition, kept)


def back_off(transition: Transition) -> None:
    """Retry after an exponential backoff, or after a short pause during an evacuation."""
    failures = transition.state.flush.failures + 1
    wait_s = min(RETRY_S_MAX, 2.0 ** min(failures, 10) / 2)
    if transition.state.evacuation is not None:
        wait_s = RETRY_URGENT_S
    flush = transition.state.flush
    _put(transition, replace(flush, failures=failures, retry_mono_s=transition.now + wait_s))


def reconcile(transition: Transition) -> None:
    """Start, change or cancel the flush so that it sends the best set."""
    _change_flight(transition)
    flight = transition.state.flush.flight
    if flight is not None and not flight.is_sealed and transition.state.early is None:
        stop(transition)  # no request waits for this set any more


def _change_flight(transition: Transition) -> None:
    state = transition.state
    flying = state.flush.flight
    flight = flying if flying is not None and flying.is_sealed else None
    reserve_s = state.settings.reserve_s
    if state.evacuation is not None and 0 < transition.left_s <= reserve_s:
        _spare_the_reserve(transition)
        return
    if transition.now < state.flush.retry_mono_s or not state.commits.is_run_read:
        return  # before the run is read, a set in staging may be committed already
    candidates = state.candidates
    if state.evacuation is None:
        if flight is None and candidates:  # a flush finishes before the next one begins
            _start_flush(transition, max(candidates, key=lambda each: each.order).id)
        return
    data_left_s = transition.left_s - reserve_s
    if transition.left_s <= 0:  # the VM has outlived its deadline: whatever still arrives counts
        data_left_s = math.inf
    for answer in state.answers:
        # A trainer that continues may seal newer sets: they wait until this one is committed.
        if not state.is_covered(answer):
            candidates = tuple(c for c in candidates if c.order <= state.order(answer))
    wanted = planner.choose(
        candidates,
        left_s=data_left_s,
        bandwidth_bytes_per_s=state.learned.bandwidth_bytes_per_s,
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
    bandwidth = state.learned.bandwidth_bytes_per_s
    return (
        not planner.fits(wanted, data_left_s, bandwidth)
        and planner.send_s(state.measured, state.bytes_to_come) <= data_left_s
    )


def _start_early(transition: Transition) -> None:
    """Send the final files of the growing set, and at intervals those that became final since."""
    early, flight = transition.state.early, transition.state.flush.flight
    assert early is not None
    if flight is not None and not flight.is_sealed and flight.staged.id == early.id:
        is_stored = transition.state.flush.stored_bytes.get(early.id, 0) >= flight.staged.size_bytes
        is_due = is_stored or transition.now - flight.started_mono_s >= EARLY_EVERY_S
        if flight.staged.files == early.files or not is_due:
            return
    _fly(transition, early, is_sealed=False)


def _spare_the_reserve(transition: Transition) -> None:
    """From here to the deadline the link belongs to the manifest."""
    flight = transition.state.flush.flight
    if flight is not None:
        stored = transition.state.flush.stored_bytes.get(flight.staged.id, 0)
        transition.mark("flush_stopped", step=flight.staged.id.step, bytes_stored=stored)
        stop(transition)


def _start_flush(transition: Transition, wanted: CheckpointId) -> None:
    staged = next(item for item in transition.state.staging.staged if item.id == wanted)
    _fly(transition, staged, is_sealed=True)


def _fly(transition: Transition, staged: Staged, *, is_sealed: bool) -> None:
    state, before = transition.state, transition.state.flush.flight
    ref = state.ref_of(staged.id)
    assert ref is not None
    flush_id = f"{staged.id}.{state.flush.flushes + 1}"
    flight = Flight(
        flush_id=flush_id,
        staged=staged,
        is_sealed=is_sealed,
        started_mono_s=transition.now,
        first_started_mono_s=transition.now,
        bytes_before=state.flush.stored_bytes.get(staged.id, 0),
        sampled_mono_s=transition.now + START_S,
    )
    if before is not None and before.staged.id == staged.id:
        flight = replace(
            flight,
            first_started_mono_s=before.first_started_mono_s,
            bytes_sent_before=before.bytes_sent_before + before.bytes_sent,
        )
        if before.bytes_unsent:  # the engine continues its parts in flight, without another start
            flight = replace(
                flight,
                has_begun=before.has_begun,
                sampled_mono_s=before.sampled_mono_s,
                sampled_bytes=before.sampled_bytes - before.bytes_sent,
            )
    _put(transition, replace(state.flush, flushes=state.flush.flushes + 1, flight=flight))
    transition.mark(
        "flush" if is_sealed else "early_shards",
        step=staged.id.step,
        size_bytes=staged.size_bytes,
    )
    transition.do(events.StartFlush(flush_id, staged, ref.generation, is_sealed=is_sealed))


def _put(transition: Transition, flush: FlushState) -> None:
    transition.state = replace(transition.state, flush=flush)
