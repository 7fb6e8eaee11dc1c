# SPDX-License-Identifier: Apache-2.0
"""How many parts of a flush travel at once: as few as it takes to be as fast as it goes.

Where the store or the distance holds each connection back, more of them bring more; where the processors
of this VM are the limit they only cost, and it is the training that pays.  No IO in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST = 8
"""Enough where nothing but the processors is in the way."""
LOOK_S = 0.25
_GAIN = 1.1
_BUSY_SHARE = 0.75
"""Of all processors: who has so much of them gets no more by asking oftener."""
_CONTENT_S = 2.0
"""After more of them brought nothing; then it is tried again."""


@dataclass(slots=True)
class Width:
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
    _seen: tuple[float, int, float] | None = field(init=False, default=None)
    _content_until_mono_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.now = self._before = min(FIRST, self.most)

    def look(self, now_mono_s: float, sent_bytes: int, cpu_s: float, cpus: int) -> None:
        """See how it goes; as often as one likes.

        Args:
            sent_bytes: all that has left so far.
            cpu_s: all that this process has used of its ``cpus`` processors so far.
        """
        if self._seen is None:
            self._seen = now_mono_s, sent_bytes, cpu_s
            return
        seen_mono_s, seen_bytes, seen_cpu_s = self._seen
        took_s = now_mono_s - seen_mono_s
        if took_s < LOOK_S:
            return
        self._seen = now_mono_s, sent_bytes, cpu_s
        rate = (sent_bytes - seen_bytes) / took_s
        if self._before < self.now and rate < _GAIN * self._rate_before:
            self.now = self._before
            self._content_until_mono_s = now_mono_s + _CONTENT_S
            return
        self._before, self._rate_before = self.now, rate
        is_busy = cpu_s - seen_cpu_s > _BUSY_SHARE * took_s * cpus
        if not is_busy and now_mono_s >= self._content_until_mono_s:
            self.now = min(2 * self.now, self.most)
