# SPDX-License-Identifier: Apache-2.0
"""What flush and commit say, written down: what is stored, and how fast the store takes it."""

from __future__ import annotations

from dataclasses import replace

from swansongd.core import nodes, planner
from swansongd.core.events import (
    CommitFailed,
    Flushed,
    FlushFailed,
    FlushProgress,
)
from swansongd.core.state import Flight, Stored
from swansongd.core.transition import Transition
from swansongd.model import CommitRef, is_healthy

SAMPLE_S = 0.25
"""So often the speed of a flush under way goes into the bandwidth."""
SAMPLE_FIRST_S = 1.0
"""The very first measurement has no earlier one to steady it."""
THROTTLED = 0.8
"""A background flush at this part of its limit, or more, has measured the limit and not the store."""
RETRY_S_MAX = 30.0
RETRY_URGENT_S = 0.5


def flush_progress(transition: Transition, event: FlushProgress) -> None:
    flight = transition.state.flight
    if flight is None or flight.flush_id != event.flush_id:
        return
    first = flight.bytes_sent == 0 and event.bytes_sent > 0
    moved = replace(
        flight,
        bytes_sent=max(flight.bytes_sent, event.bytes_sent),
        bytes_before=max(flight.bytes_before, event.bytes_stored - event.bytes_sent),
    )
    if first:  # how long it took to begin says nothing of how fast it goes
        moved = replace(moved, sampled_mono_s=transition.now, sampled_bytes=event.bytes_sent)
    transition.state = replace(
        transition.state,
        flight=moved,
        kept={**transition.state.kept, flight.staged.id: event.bytes_stored},
    )
    sample_bandwidth(transition)


def flushed(transition: Transition, event: Flushed) -> None:
    flight = transition.state.flight
    if flight is None or flight.flush_id != event.flush_id or not flight.is_sealed:
        return
    size_bytes = flight.staged.size_bytes
    before = max(flight.bytes_before, event.bytes_referenced)
    sent = event.bytes_sent if event.bytes_sent is not None else size_bytes - before
    _learn_from_the_end(transition, flight, max(sent, flight.bytes_sent))
    transition.state = replace(
        transition.state,
        flight=None,
        failures=0,
        kept={id_: size for id_, size in transition.state.kept.items() if id_ != flight.staged.id},
        stored=(
            *transition.state.stored,
            Stored(
                flush_id=event.flush_id, staged=flight.staged, shards=event.shards, is_asked=False
            ),
        ),
    )
    transition.mark("flushed", step=flight.staged.id.step, size_bytes=size_bytes)


def _learn_from_the_end(transition: Transition, flight: Flight, bytes_sent: int) -> None:
    if bytes_sent < planner.BANDWIDTH_SAMPLE_MIN_BYTES:
        return
    if flight.is_sampled:
        _learn(
            transition, bytes_sent - flight.sampled_bytes, transition.now - flight.sampled_mono_s
        )
    else:  # too short for a look at it on the way
        _learn(transition, bytes_sent, transition.now - flight.started_mono_s)


def sample_bandwidth(transition: Transition) -> None:
    """Learn from what the flush has moved since the last sample, were it nothing at all."""
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
    if moved or flight.bytes_unsent:  # else the wire has nothing to do but to wait for answers
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
        return  # the store may be faster: nobody knows how much, only that it is not slower
    transition.state = replace(
        transition.state,
        bandwidth_bytes_per_s=planner.updated_bandwidth(known, size_bytes, duration_s),
    )


def flush_failed(transition: Transition, event: FlushFailed) -> None:
    flight = transition.state.flight
    if flight is None or flight.flush_id != event.flush_id:
        return
    transition.state = replace(transition.state, flight=None)
    transition.log(
        "error", "flush_failed", step=flight.staged.id.step, reason=event.reason, void=event.void
    )
    if event.void and flight.is_sealed:  # else it may be its seal that changed it
        transition.state = replace(
            transition.state, unusable=transition.state.unusable | {flight.staged.id}
        )
    else:
        _back_off(transition)


def commit_done(transition: Transition, flush_id: str, ref: CommitRef) -> None:
    done = next((item for item in transition.state.stored if item.flush_id == flush_id), None)
    newest = transition.state.last_commit
    transition.state = replace(
        transition.state,
        stored=tuple(item for item in transition.state.stored if item.flush_id != flush_id),
        failures=0,
    )
    if newest is None or ref > newest:
        seen_mono_s = (
            transition.now
            if done is None
            else transition.state.seen.get(done.staged.id, transition.now)
        )
        transition.state = replace(
            transition.state, last_commit=ref, last_commit_seen_mono_s=seen_mono_s
        )
    if ref.generation == transition.state.generation:
        transition.state = replace(transition.state, owes_checkpoint=False)
    if done is not None and is_healthy(done.staged.health):
        healthy = transition.state.healthy_commit
        transition.state = replace(
            transition.state, healthy_commit=ref if healthy is None else max(ref, healthy)
        )
    transition.mark("committed", generation=ref.generation, step=ref.step)
    transition.log(
        "info",
        "committed",
        generation=ref.generation,
        step=ref.step,
        size_bytes=done.staged.size_bytes if done else None,
    )
    nodes.committed(transition, ref, done.staged if done else None)


def commit_failed(transition: Transition, event: CommitFailed) -> None:
    failed = next(
        (item for item in transition.state.stored if item.flush_id == event.flush_id), None
    )
    if failed is None:
        return
    transition.log("error", "commit_failed", step=failed.staged.id.step, reason=event.reason)
    others = tuple(item for item in transition.state.stored if item.flush_id != event.flush_id)
    if event.conflict:
        transition.state = replace(
            transition.state, stored=others, unusable=transition.state.unusable | {failed.staged.id}
        )
    else:
        transition.state = replace(
            transition.state, stored=(*others, replace(failed, is_asked=False))
        )
        _back_off(transition)


def _back_off(transition: Transition) -> None:
    """Try again later; at once, nearly, when the end is near."""
    failures = transition.state.failures + 1
    wait_s = min(RETRY_S_MAX, 2.0 ** min(failures, 10) / 2)
    if transition.state.evacuation is not None:
        wait_s = RETRY_URGENT_S
    transition.state = replace(
        transition.state, failures=failures, retry_mono_s=transition.now + wait_s
    )
