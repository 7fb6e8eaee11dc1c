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
_TRIAL_S = (0.2, 0.6)
"""Shortest and longest time for a doubling to raise the mean rate, after a first sample: a new connection
connects, and reads and digests a chunk, before it sends."""
_BUSY_SHARE = 0.6
"""Of all processors.  Above this CPU share, more connections do not help."""
_PAUSE_S = (0.5, 4.0)
"""Shortest and longest time from a doubling without effect to the next attempt; it doubles, too."""
_MEMORY_S = 1.0
"""Longest time of the mean rate that a doubling must raise: the rate of a sample varies."""


@dataclass(frozen=True, slots=True)
class _Sample:
    mono_s: float
    moved_bytes: int
    cpu_s: float

    def rate_since(self, before: _Sample) -> float:
        """Bytes per second."""
        return (self.moved_bytes - before.moved_bytes) / (self.mono_s - before.mono_s)


@dataclass(slots=True)
class ConcurrencyLimit:
    """Doubles while that raises the rate, and reverts a doubling that did not.

    Attributes:
        most: upper bound of the limit.
        first: its initial value.
        now: the limit: the number of parts that may be in flight.
    """

    most: int
    first: int = FIRST
    now: int = field(init=False)
    _before: int = field(init=False)
    """The limit before the doubling under trial; equal to ``now`` if none is under trial."""
    _judged: int = field(init=False)
    """The last limit that was long enough in use to be judged; half of it is the first one of a transfer."""
    _rate_before: float = field(init=False, default=0.0)
    _pause_s: float = field(init=False, default=_PAUSE_S[0])
    _pause_until_mono_s: float = field(init=False, default=0.0)
    """A clearly higher rate ends the pause: a notice has lifted the limit of the background, for example."""
    _rate_without_gain: float = field(init=False, default=0.0)
    """The mean rate of the last doubling without effect."""
    _samples: list[_Sample] = field(init=False, default_factory=list)
    """Those since the doubling under trial, or of the last second."""

    def __post_init__(self) -> None:
        self.now = self._before = self._judged = min(self.first, self.most)

    def begin(self) -> None:
        """Prepare for another transfer: half of the last limit, whose doubling is tried first.

        A transfer that ended before a doubling was judged changes nothing: it may be small.
        """
        self.now = self._before = min(self.most, max(self.first, self._judged // 2))
        self._samples = []
        self._pause_s, self._pause_until_mono_s = _PAUSE_S[0], 0.0

    def sample(self, now_mono_s: float, moved_bytes: int, cpu_s: float, cpus: int) -> None:
        """Take a sample, and adapt the limit.  Calls within :data:`SAMPLE_S` of the last sample do nothing.

        Args:
            moved_bytes: total bytes transferred since the start or :meth:`begin`.
            cpu_s: total CPU time of this process, which may use ``cpus`` processors.
        """
        last = self._samples[-1] if self._samples else None
        if last is not None and now_mono_s - last.mono_s < SAMPLE_S:
            return
        new = _Sample(now_mono_s, moved_bytes, cpu_s)
        self._samples.append(new)
        if last is None:
            return
        if self._before < self.now:
            self._judge(new, new.rate_since(last))
        else:
            while self._samples[0] is not last and new.mono_s - self._samples[0].mono_s > _MEMORY_S:
                del self._samples[0]
        is_busy = cpu_s - last.cpu_s > _BUSY_SHARE * (now_mono_s - last.mono_s) * cpus
        if is_busy and new.mono_s - self._samples[0].mono_s >= _TRIAL_S[1]:
            self._judged = self._before
        may_double = self._before == self.now < self.most and not is_busy
        is_faster = new.rate_since(self._samples[0]) > _CLEAR_GAIN * self._rate_without_gain
        if may_double and (now_mono_s >= self._pause_until_mono_s or is_faster):
            # No bytes move while all requests await responses: more of them may.
            is_moving = new.moved_bytes > last.moved_bytes
            self._rate_before = new.rate_since(self._samples[0]) if is_moving else 0.0
            self.now, self._samples = min(2 * self.now, self.most), [new]

    def _judge(self, new: _Sample, last_rate: float) -> None:
        """Keep or revert the doubling under trial, or leave it for further samples."""
        first = self._samples[1]
        took_s = new.mono_s - first.mono_s
        if last_rate >= _CLEAR_GAIN * self._rate_before or (
            took_s >= _TRIAL_S[0] and new.rate_since(first) >= _GAIN * self._rate_before
        ):
            self._before = self._judged = self.now
            self._pause_s = _PAUSE_S[0]
            self._samples = self._samples[-2:] if new is first else self._samples[1:]
        elif took_s >= _TRIAL_S[1]:
            self._rate_without_gain = new.rate_since(first)
            self.now = self._judged = self._before
            self._samples = [self._samples[-2], new]
            self._pause_until_mono_s = new.mono_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])
