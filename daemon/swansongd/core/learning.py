# SPDX-License-Identifier: Apache-2.0
"""Learns the pace of the run from its checkpoints, and compares each forecast with the outcome.

Every checkpoint shows how long a save, a whole upload and the manifest take.  A checkpoint of an evacuation
also shows which part of the upload passed during the save: only then are early shards sent.  A set of which
an earlier flush has sent most bytes shows nothing about the sending time.  After early shards the rest of a
set shows it: a VM may flush no other set before its last follow-up.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from swansong_bucket.loss_records import History
from swansong_bucket.model import Staged

from swansongd.core import pace, planner
from swansongd.core.events import Flushed, HistoryRead, PaceRead
from swansongd.core.state import CheckpointRequest, Flight, Learned, State, StoredSet
from swansongd.core.transition import Transition

THROTTLED = 0.8
"""A background flush at this fraction of its limit, or more, measures the limit and not the store."""
SENT_SHARE_MIN = 0.5
"""A flush that sent a smaller share of the unreferenced bytes shows mostly its start and its end."""


def record_read(transition: Transition, event: PaceRead) -> None:
    """The newest commit at the claim carries the figures of an earlier VM."""
    learned = transition.state.learned
    _put(transition, replace(learned, pace=pace.inherited(learned.pace, event.figures)))


def record_history(transition: Transition, event: HistoryRead) -> None:
    """The interruptions of the run's earlier VMs are known."""
    history = History(event.observed_s, event.uncovered)
    _put(transition, replace(transition.state.learned, history=history))


def forget(transition: Transition) -> None:
    """Forget what trainers and flushes have shown, which may be forged."""
    learned = transition.state.learned
    _put(transition, Learned(history=learned.history))


def record_found(transition: Transition, new: Collection[Staged], *, is_first: bool) -> None:
    """A scan found new sealed sets: the ranks have reported how long the save took."""
    if not new or is_first:
        return
    newest = max(new, key=lambda staged: staged.id)
    saves_s = [t.save_s for t in transition.state.ranks.trainers if t.save_s is not None]
    _learn(transition, "size_bytes", newest.size_bytes)
    if saves_s:
        _learn(transition, "save_s", max(saves_s))


def record_sealed(transition: Transition, request: CheckpointRequest) -> None:
    """The set that answers a request of an evacuation is sealed."""
    took_s = transition.now - request.asked_mono_s
    if request.by_signal:
        _put(transition, replace(transition.state.learned, signal_save_s=took_s))
    if request.by_signal or not request.is_urgent:
        return
    save_s = _longest_save_s(transition.state)
    if not 0 < save_s <= took_s:  # the report of the new save has not arrived yet
        return
    _learn(transition, "urgent_save_s", save_s)
    _learn(transition, "wait_s", took_s - save_s)


def record_sent(transition: Transition, size_bytes: int, duration_s: float) -> None:
    """A flush has sent these bytes: update the bandwidth."""
    if transition.state.must_yield:
        return  # the sample shows that the flush is paused
    learned = transition.state.learned
    known = learned.bandwidth_bytes_per_s
    limit = transition.state.settings.background_limit_bytes_per_s
    is_limited = limit is not None and transition.state.evacuation is None  # any notice lifts it
    is_at_limit = is_limited and size_bytes >= THROTTLED * (limit or 0.0) * duration_s
    if is_at_limit and (known is None or known * duration_s >= size_bytes):
        return  # the sample shows the limit: the store is at least this fast
    bandwidth = planner.updated_bandwidth(known, size_bytes, duration_s)
    _put(transition, replace(learned, bandwidth_bytes_per_s=bandwidth))


def record_flushed(transition: Transition, flight: Flight, event: Flushed, sent_bytes: int) -> None:
    """All shards of a set are stored."""
    size_bytes = flight.staged.size_bytes
    if not size_bytes:
        return
    new_bytes = size_bytes - event.bytes_referenced
    if new_bytes > 0:  # a set that equals its predecessor shows nothing about the next one
        _learn(transition, "new_share", new_bytes / size_bytes)
    least_bytes = max(planner.BANDWIDTH_SAMPLE_MIN_BYTES, SENT_SHARE_MIN * new_bytes)
    if sent_bytes >= least_bytes and not is_throttled(transition.state, flight):
        rest_s_per_byte = (transition.now - flight.started_mono_s) / sent_bytes
        # Sent bytes may lie in the buffers of the kernel until after the seal, so the rest alone appears
        # too slow.  With the early shards it does so only if the link waited for files.
        whole_s = transition.now - flight.first_started_mono_s
        whole_s_per_byte = whole_s / (flight.bytes_sent_before + sent_bytes)
        _learn(transition, "send_s_per_byte", min(rest_s_per_byte, whole_s_per_byte))
    _learn_hidden(transition, flight.staged)  # last: in proportion to the sending time of this set


def is_throttled(state: State, flight: Flight) -> bool:
    """Whether this flush, or a part of it, was limited: in the background, or for another daemon."""
    if flight.started_mono_s < state.flush.link_needed_until_mono_s:
        return True
    evacuation = state.evacuation
    is_background = evacuation is None or evacuation.opened_mono_s > flight.started_mono_s
    return state.settings.background_limit_bytes_per_s is not None and is_background


def _learn_hidden(transition: Transition, staged: Staged) -> None:
    """The requested set is stored: the shorter its flush after the seal, the more was sent before."""
    state = transition.state
    request = next((r for r in state.requests_made if r.sealed == staged.id), None)
    if request is None or request.sealed_mono_s is None:
        return
    save_s = _longest_save_s(state)
    measured = replace(state.measured, save_bytes=staged.size_bytes, is_sending=False)
    send_s = planner.flush_s(measured)
    if request.by_signal or not request.is_urgent or save_s <= 0 or send_s <= 0:
        return
    tail_s = transition.now - request.sealed_mono_s
    hidden_s = min(max(0.0, send_s - tail_s), send_s, save_s)
    _learn(transition, "hidden_share", hidden_s / send_s)
    _learn(transition, "hidden_use", hidden_s / save_s)


def record_manifest(transition: Transition, stored: StoredSet) -> None:
    """The manifest of this set is written."""
    if stored.asked_mono_s is not None:
        _learn(transition, "commit_s", max(0.0, transition.now - stored.asked_mono_s))


def record_error(transition: Transition, request: CheckpointRequest, took_s: float) -> None:
    """A requested checkpoint is committed: compare its time with the forecast."""
    if request.expected_s:
        error = took_s / request.expected_s - 1
        _learn(transition, "error_square", min(max(error * error, 1e-4), 1.0))


def _longest_save_s(state: State) -> float:
    return max((t.save_s for t in state.connected if t.save_s is not None), default=0.0)


def _learn(transition: Transition, name: str, value: float) -> None:
    learned = transition.state.learned
    figure = pace.updated(getattr(learned.pace, name), value)
    _put(transition, replace(learned, pace=replace(learned.pace, **{name: figure})))


def _put(transition: Transition, learned: Learned) -> None:
    transition.state = replace(transition.state, learned=learned)
