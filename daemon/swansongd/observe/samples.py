# SPDX-License-Identifier: Apache-2.0
"""Samples of the bytes that flushes send during an evacuation, for its farewell."""

from __future__ import annotations

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
        self._bytes_before = 0
        """Bytes that were sent before the opening."""
        self._bytes_sent = 0

    def observe(self, observation: Observation) -> None:
        before, after, _, _, now_mono_s = observation
        evacuation = after.evacuation
        if evacuation is None:
            return
        if evacuation.id != self._evacuation_id:
            self._evacuation_id, self._opened_mono_s = evacuation.id, evacuation.opened_mono_s
            self._interval_s, self._samples = INTERVAL_S, [(0.0, 0)]
            self._bytes_before = before.flush.sent_bytes
        self._bytes_sent = after.flush.sent_bytes - self._bytes_before
        self._sample(now_mono_s)

    def taken(self, evacuation_id: str, now_mono_s: float) -> tuple[tuple[float, int], ...]:
        """The samples of this evacuation, the newest of them taken now; at most :data:`SAMPLES_MAX`."""
        if evacuation_id != self._evacuation_id or not self._bytes_sent:
            return ()
        newest = (self._at_s(now_mono_s), self._bytes_sent)
        earlier = [sample for sample in self._samples if sample[0] < newest[0]]
        return (*earlier[: SAMPLES_MAX - 1], newest)

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
