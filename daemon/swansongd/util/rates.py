# SPDX-License-Identifier: Apache-2.0
"""Rate limits: of the requests of a peer, and of the log lines about them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass


class TokenBucket:
    """Admits bursts of ``capacity`` events, and ``per_s`` events per second on average."""

    def __init__(self, capacity: float, per_s: float) -> None:
        self._capacity = capacity
        self._per_s = per_s
        self._tokens = capacity
        self._filled_mono_s: float | None = None

    def take(self, now_mono_s: float, cost: float = 1.0) -> bool:
        """Count an event that costs as much as ``cost`` events; False if it exceeds the rate."""
        if self._filled_mono_s is not None:
            earned = (now_mono_s - self._filled_mono_s) * self._per_s
            self._tokens = min(self._capacity, self._tokens + earned)
        self._filled_mono_s = now_mono_s
        if self._tokens < cost:
            return False
        self._tokens -= cost
        return True


@dataclass
class _Kind:
    bucket: TokenBucket
    suppressed: int = 0


class LogLimit:
    """Limits the log lines that peers can cause.

    No kind of line is suppressed forever: after ``interval_s`` the next line of the kind is written, with the
    number of lines that were suppressed before it.

    Args:
        burst: lines of one kind that are written without a limit.
        interval_s: time after which one more line of the kind is written.
        kinds_max: number of kinds in memory; a further kind replaces the least recently seen one.
    """

    def __init__(self, *, burst: int, interval_s: float, kinds_max: int = 256) -> None:
        self._burst = burst
        self._interval_s = interval_s
        self._kinds_max = kinds_max
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def admit(self, kind: Hashable, now_mono_s: float) -> dict[str, int] | None:
        """Fields to add to the line: ``suppressed`` if lines were suppressed.  None to suppress this line."""
        known = self._kinds.pop(kind, None) or _Kind(
            TokenBucket(self._burst, 1.0 / self._interval_s)
        )
        self._kinds[kind] = known
        if len(self._kinds) > self._kinds_max:
            self._kinds.popitem(last=False)
        if not known.bucket.take(now_mono_s):
            known.suppressed += 1
            return None
        suppressed, known.suppressed = known.suppressed, 0
        return {"suppressed": suppressed} if suppressed else {}
