# SPDX-License-Identifier: Apache-2.0
"""Samples of the bytes that flushes send during an evacuation, for its farewell."""

from __future__ import annotations

from swansongd.core.events import Flushed
from swansongd.core.state import State
from swansongd.observe.observer import Observation

SAMPLES_MAX = 240
INTERVAL_S = 0.25
"""Shortest interval between two samples; it doubles each time that :data:`SAMPLES_MAX` is exceeded."""


class FlushSamples:
    """An observer that samples the bytes sent since the newest evacuation opened.  For one thread."""

    def __init__(self) -> None:
        self._evacuation_id = ""
        self._opened_mono_s = 0.0
        self._interval_s = INTERVAL_S
        self._samples: list[tuple[float, int]] = []
        self._flush_id = ""
        self._flush_bytes = 0
        """Bytes of the flush in flight, those from before the opening included."""
        self._bytes_sent = 0

    def observe(self, observation: Observation) -> None:
        before, after, event, _, now_mono_s = observation
        evacuation = after.evacuation
        if evacuation is None:
            return
        if evacuation.id != self._evacuation_id:
            self._begin(evacuation.id, evacuation.opened_mono_s, before)
        for state in (before, after):
            if state.flush.flight is not None:
                self._count(state.flush.flight.flush_id, state.flush.flight.bytes_sent)
        if isinstance(event, Flushed) and event.bytes_sent is not None:
            self._count(event.flush_id, event.bytes_sent)
        self._sample(now_mono_s)

    def taken(self, evacuation_id: str, now_mono_s: float) -> tuple[tuple[float, int], ...]:
        """The samples of this evacuation, the newest of them taken now; at most :data:`SAMPLES_MAX`."""
        if evacuation_id != self._evacuation_id or not self._bytes_sent:
            return ()
        newest = (self._at_s(now_mono_s), self._bytes_sent)
        earlier = [sample for sample in self._samples if sample[0] < newest[0]]
        return (*earlier[: SAMPLES_MAX - 1], newest)

    def _begin(self, evacuation_id: str, opened_mono_s: float, before: State) -> None:
        self._evacuation_id, self._opened_mono_s = evacuation_id, opened_mono_s
        self._interval_s, self._samples, self._bytes_sent = INTERVAL_S, [(0.0, 0)], 0
        flight = before.flush.flight
        self._flush_id = "" if flight is None else flight.flush_id
        self._flush_bytes = 0 if flight is None else flight.bytes_sent

    def _count(self, flush_id: str, bytes_sent: int) -> None:
        if flush_id != self._flush_id:
            self._flush_id, self._flush_bytes = flush_id, 0
        self._bytes_sent += max(0, bytes_sent - self._flush_bytes)
        self._flush_bytes = max(self._flush_bytes, bytes_sent)

    def _sample(self, now_mono_s: float) -> None:
        at_s = self._at_s(now_mono_s)
        if at_s - self._samples[-1][0] < self._interval_s:
            return
        self._samples.append((at_s, self._bytes_sent))
        if len(self._samples) > SAMPLES_MAX:
            del self._samples[1::2]
            self._interval_s *= 2

    def _at_s(self, now_mono_s: float) -> float:
        return round(max(0.0, now_mono_s - self._opened_mono_s), 3)
