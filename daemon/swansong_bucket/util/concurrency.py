# SPDX-License-Identifier: Apache-2.0
"""The concurrency limit of a flush or a restore: the fewest parallel transfers that saturate the link.

If the store or the round-trip time limits each connection, more connections raise the rate.  If this
process is the limit, more connections only cost: their threads compete for the interpreter lock or for the
same file, and the training pays.  This module does no IO.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST = 2
"""The initial limit.  If only this process is the bottleneck, two suffice: one part computes while the other
waits."""
SAMPLE_S = 0.1
"""Shortest interval between two samples of the rate."""
_GAIN = 1.1
_CLEAR_GAIN = 1.6
"""One sample of this gain is enough: with a smaller one, the new bytes may only lie in buffers on the way."""
_TRIAL_SAMPLES = 3
"""Samples until a doubling must have raised the rate: the first one is spent on new connections."""
_BUSY_SHARE = 0.6
"""Of all processors.  Above this CPU share, more connections do not help."""
_PAUSE_S = 2.0
"""Time from a doubling without effect to the next attempt."""


@dataclass(frozen=True, slots=True)
class _Sample:
    mono_s: float
    moved_bytes: int
    cpu_s: float


@dataclass(slots=True)
class ConcurrencyLimit:
    """Doubles while that raises the rate, and reverts a doubling that did not.

    Attributes:
        most: upper bound of the limit.
        now: the limit: the number of parts that may be in flight.
    """

    most: int
    now: int = field(init=False)
    _before: int = field(init=False)
    """The limit before the doubling under trial; equal to ``now`` if none is under trial."""
    _rate_before: float = field(init=False, default=0.0)
    _rates: list[float] = field(init=False, default_factory=list)
    """Samples of the doubling under trial."""
    _last: _Sample | None = field(init=False, default=None)
    _pause_until_mono_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.now = self._before = min(FIRST, self.most)

    def reset_counters(self) -> None:
        """Prepare for a byte counter that starts from zero.  The limit stays."""
        self._last, self._before, self._rates = None, self.now, []

    def sample(self, now_mono_s: float, moved_bytes: int, cpu_s: float, cpus: int) -> None:
        """Take a sample, and adapt the limit.  Calls within :data:`SAMPLE_S` of the last sample do nothing.

        Args:
            moved_bytes: total bytes transferred since the start or :meth:`reset_counters`.
            cpu_s: total CPU time of this process, which may use ``cpus`` processors.
        """
        last = self._last
        if last is not None and now_mono_s - last.mono_s < SAMPLE_S:
            return
        self._last = _Sample(now_mono_s, moved_bytes, cpu_s)
        if last is None:
            return
        took_s = now_mono_s - last.mono_s
        rate = (moved_bytes - last.moved_bytes) / took_s
        if self._before < self.now and rate < _CLEAR_GAIN * self._rate_before:
            self._rates.append(rate)
            if len(self._rates) < _TRIAL_SAMPLES:
                return
            rate = sum(self._rates[1:]) / (_TRIAL_SAMPLES - 1)
            if rate < _GAIN * self._rate_before:
                self.now, self._rates = self._before, []
                self._pause_until_mono_s = now_mono_s + _PAUSE_S
                return
        self._before, self._rate_before, self._rates = self.now, rate, []
        is_busy = cpu_s - last.cpu_s > _BUSY_SHARE * took_s * cpus
        if not is_busy and now_mono_s >= self._pause_until_mono_s:
            self.now = min(2 * self.now, self.most)
