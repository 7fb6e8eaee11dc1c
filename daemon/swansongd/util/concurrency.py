# SPDX-License-Identifier: Apache-2.0
"""How many parts of a flush or a restore travel at once: as few as it takes to be as fast as it goes.

Where the store or the distance holds each connection back, more of them bring more.  Where this process is
the limit they only cost: threads that wait for the interpreter, or for the same file, hand it to and fro,
and it is the training that pays.  No IO in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST = 2
"""Enough where nothing but this process is in the way: one part computes while another waits."""
SAMPLE_S = 0.1
_GAIN = 1.1
_LOOKS = 3
"""More of them must have paid by then: the first look is spent on making connections."""
_BUSY_SHARE = 0.6
"""Of all processors: who has so much of them gets no more by asking oftener."""
_CONTENT_S = 2.0
"""After more of them brought nothing; then it is tried again."""


@dataclass(slots=True)
class ConcurrencyLimit:
    """Doubles as long as that pays, and takes back what did not.

    Attributes:
        most: never more than so many.
        now: so many may travel.
    """

    most: int
    now: int = field(init=False)
    _before: int = field(init=False)
    """What there was before the doubling that is being looked at; the same as ``now`` without one."""
    _rate_before: float = field(init=False, default=0.0)
    _looks: int = field(init=False, default=0)
    """At that doubling, without having seen that it pays."""
    _seen: tuple[float, int, float] | None = field(init=False, default=None)
    _content_until_mono_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.now = self._before = min(FIRST, self.most)

    def reset_counters(self) -> None:
        """The bytes are counted from nothing again; what has been found stays."""
        self._seen, self._before, self._looks = None, self.now, 0

    def look(self, now_mono_s: float, moved_bytes: int, cpu_s: float, cpus: int) -> None:
        """See how it goes; as often as one likes.

        Args:
            moved_bytes: all that has left, or come, since the beginning or :meth:`count_anew`.
            cpu_s: all that this process has used of its ``cpus`` processors so far.
        """
        if self._seen is None:
            self._seen = now_mono_s, moved_bytes, cpu_s
            return
        seen_mono_s, seen_bytes, seen_cpu_s = self._seen
        took_s = now_mono_s - seen_mono_s
        if took_s < SAMPLE_S:
            return
        self._seen = now_mono_s, moved_bytes, cpu_s
        rate = (moved_bytes - seen_bytes) / took_s
        if self._before < self.now and rate < _GAIN * self._rate_before:
            self._looks += 1
            if self._looks == _LOOKS:
                self.now, self._looks = self._before, 0
                self._content_until_mono_s = now_mono_s + _CONTENT_S
            return
        self._before, self._rate_before, self._looks = self.now, rate, 0
        is_busy = cpu_s - seen_cpu_s > _BUSY_SHARE * took_s * cpus
        if not is_busy and now_mono_s >= self._content_until_mono_s:
            self.now = min(2 * self.now, self.most)
