# SPDX-License-Identifier: Apache-2.0
"""The recent past of a daemon: the newest poll, and sparklines of the statuses before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swansongd.observe.status import DaemonStatus

from swansong_tools.commands.view.countdown import Countdown, countdowns
from swansong_tools.commands.view.poller import Poll

SAMPLES_MAX = 240
_RATE_S = 5.0
"""A rate is measured over this time: some polls fall between two steps of the training."""
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇", "_.-=+*#"
"""Without the full block: lines below each other stay apart."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one status; None: unknown."""

    at_mono_s: float
    lag_s: float | None
    flight: int | None
    """Step of the set in flight: its bytes start at zero."""
    stored_bytes: float | None
    step: float | None


class PollHistory:
    """The newest poll, and samples of those before."""

    def __init__(self) -> None:
        self.status: DaemonStatus | None = None
        """The newest status; None before the first one."""
        self.status_mono_s = 0.0
        self.away: Poll | None = None
        """The first poll since which the daemon does not answer, with the newest reason."""
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._totals_s: dict[str, float] = {}

    def take(self, poll: Poll) -> None:
        """Record a poll."""
        status = poll.status
        if status is None:
            self.away = replace(self.away or poll, reason=poll.reason)
            return
        self.status, self.status_mono_s, self.away = status, poll.at_mono_s, None
        flush = status.flush
        self._samples.append(
            Sample(
                at_mono_s=poll.at_mono_s,
                lag_s=status.replication_lag.seconds,
                flight=None if flush is None else flush.step,
                stored_bytes=None if flush is None else flush.stored_bytes,
                step=max((trainer.step for trainer in status.trainers), default=None),
            )
        )
        grace_s = {margin.source: margin.grace_s for margin in status.margins}
        self._totals_s = {
            each.key: max(
                each.left_s, self._totals_s.get(each.key, 0.0), grace_s.get(each.source, 0.0)
            )
            for each in countdowns(status)
        }

    def total_s(self, countdown: Countdown) -> float:
        """The length of the whole notice, as far as this command has seen it."""
        return self._totals_s.get(countdown.key, countdown.left_s)

    @property
    def lag_s(self) -> list[float | None]:
        """The replication lag."""
        return [sample.lag_s for sample in self._samples]

    @property
    def bytes_per_s(self) -> list[float | None]:
        """The rate at which the store acknowledged bytes; 0 without a flush."""
        return [
            0.0 if now.flight is None else _rate(before.stored_bytes, now.stored_bytes, before, now)
            for before, now in self._pairs(is_same_flight=True)
        ]

    @property
    def steps_per_s(self) -> list[float | None]:
        """The speed of the training; None across a restart that went back."""
        return [_rate(before.step, now.step, before, now) for before, now in self._pairs()]

    def _pairs(self, *, is_same_flight: bool = False) -> list[tuple[Sample, Sample]]:
        """Each sample, behind the oldest one that is at most :data:`_RATE_S` older."""
        pairs = []
        samples, first = list(self._samples), 0
        for place, now in enumerate(samples):
            while first < place - 1 and samples[first].at_mono_s < now.at_mono_s - _RATE_S:
                first += 1
            while is_same_flight and first < place and samples[first].flight != now.flight:
                first += 1
            pairs.append((samples[first], now))
        return pairs


def _rate(before: float | None, now: float | None, first: Sample, last: Sample) -> float | None:
    elapsed_s = last.at_mono_s - first.at_mono_s
    if before is None or now is None or elapsed_s <= 0 or now < before:
        return None
    return (now - before) / elapsed_s


def sparkline(values: Sequence[float | None], width: int, *, is_ascii: bool = False) -> str:
    """The newest values as blocks from 0 to the greatest one, right-aligned; unknown ones are blank."""
    blocks = _ASCII_BLOCKS if is_ascii else _BLOCKS
    shown = list(values)[-width:] if width > 0 else []
    top = max((value for value in shown if value is not None), default=0.0)
    cells = (" " if value is None else blocks[_level(value, top, len(blocks))] for value in shown)
    return "".join(cells).rjust(width)


def _level(value: float, top: float, levels: int) -> int:
    return min(levels - 1, int(levels * max(0.0, value) / top)) if top > 0 else 0
