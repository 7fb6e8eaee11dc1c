# SPDX-License-Identifier: Apache-2.0
"""The preemption loss of a run: ``L = GPUs x (stall + redone + down)`` for each interruption.

Pure.  docs/operations/loss.md describes the figures.  The parts are a partition of the wall time: from the
start of the first daemon to the newest known step, each second belongs to exactly one of them.  The clocks of
several VMs differ, so an instant before its predecessor is moved to it, and the interruption is marked.

Steps that are done twice count as *redone* where they were done first.  *Down* ends with the first new step,
and includes it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from swansong_bucket.loss_records import LOST, PARTS, TRAINED, GenerationEnd, Life, down_parts

HOUR_S = 3600.0
WINDOWS_MAX = 48
_WINDOW_LENGTHS_S = (60.0, 300.0, 900.0, HOUR_S, 6 * HOUR_S, 24 * HOUR_S, 168 * HOUR_S)
SKEW_S = 1.0
"""A daemon that started this long before the earlier VM's last step has another clock."""
GOODPUT = {
    "cloud": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "boot": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "start": "TRAINING_PREP",
    "fetch": "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    "load": "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    "warm_up": "PROGRAM_STARTUP",
    "stall": "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    "saves": "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    "redone": "WASTED_PROGRESS_FROM_DISRUPTION",
    "unknown": "OTHER",
}
"""Category of each part in Google's ml-goodput-measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The loss between the last step of one generation and the first new step of the next."""

    after_generation: int
    generation: int
    ended_wall_s: float
    """When the last step was completed."""
    resumed_wall_s: float
    """When the first new step was completed."""
    last_step: int
    start_step: int
    """The step of the restored state."""
    is_same_vm: bool
    """A restart, not a preemption."""
    is_estimated: bool
    """The last step is not known exactly: time may belong to *down* instead of *redone*, or conversely."""
    is_skewed: bool
    """The clocks of the VMs contradict each other."""
    ranks: int
    nodes: int
    """VMs of the job; 1 if the resume was not recorded."""
    stall_s: float | None
    redone_s: float
    down_s: float
    parts_s: dict[str, float | None]
    """Of *down*; None: unknown, and contained in another part."""
    lost_parts_gpu_s: dict[str, float]
    """GPU seconds: *stall* and *redone* of the GPUs that trained, the others of those that resumed."""
    bytes_fetched: int | None
    bytes_linked: int | None

    @property
    def lost_s(self) -> float:
        return (self.stall_s or 0.0) + self.redone_s + self.down_s

    @property
    def lost_gpu_s(self) -> float:
        return sum(self.lost_parts_gpu_s.values())

    @property
    def down_gpu_s(self) -> float:
        return sum(gpu_s for part, gpu_s in self.lost_parts_gpu_s.items() if part not in TRAINED)


def lost_gpu_s(interruptions: Iterable[Interruption]) -> dict[str, float]:
    """GPU seconds of the interruptions, by part."""
    total: defaultdict[str, float] = defaultdict(float, dict.fromkeys(LOST, 0.0))
    for each in interruptions:
        for part, gpu_s in each.lost_parts_gpu_s.items():
            total[part] += gpu_s
    return dict(total)


@dataclass(frozen=True, slots=True)
class Window:
    """The productive time in a part of the run."""

    from_wall_s: float
    length_s: float
    productive_s: float

    @property
    def ettr(self) -> float:
        return self.productive_s / self.length_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a whole run."""

    begun_wall_s: float
    until_wall_s: float
    """Newest known step."""
    productive_s: float
    parts_s: dict[str, float]
    """All time that is not productive: the parts of *down*, ``redone``, ``stall``, ``saves``, ``unknown``."""
    productive_gpu_s: float
    """GPU seconds of the run in ``productive_s``."""
    parts_gpu_s: dict[str, float]
    """The other GPU seconds, by the names of ``parts_s``."""
    last_hour_productive_s: float
    """In the window that ends with the newest known step: an hour, or all of a shorter run."""
    interruptions: tuple[Interruption, ...]
    windows: tuple[Window, ...] = ()
    """The run in windows of equal length, the last one shorter; at most :data:`WINDOWS_MAX`."""

    @property
    def wall_s(self) -> float:
        return self.until_wall_s - self.begun_wall_s

    @property
    def gpu_s(self) -> float:
        """GPU seconds of the run."""
        return self.productive_gpu_s + sum(self.parts_gpu_s.values())

    @property
    def lost_gpu_s(self) -> float:
        """GPU seconds of all interruptions."""
        return sum(each.lost_gpu_s for each in self.interruptions)

    @property
    def ettr(self) -> float | None:
        """Effective-training-time ratio of the run; None without any time."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else None

    @property
    def ettr_last_hour(self) -> float | None:
        """The same for the last hour of training, which ends with the newest step."""
        last_s = min(HOUR_S, self.wall_s)
        return self.last_hour_productive_s / last_s if last_s > 0 else None

    @property
    def goodput_s(self) -> dict[str, float]:
        """The parts under the names of Google's ml-goodput-measurement."""
        named = dict.fromkeys(GOODPUT.values(), 0.0)
        for part, seconds in self.parts_s.items():
            named[GOODPUT[part]] += seconds
        return named


@dataclass(kw_only=True)
class _Segment:
    """The training of one life, after its first new step."""

    begun_s: float
    ended_s: float
    low: int
    """The first new step, which belongs to *down*."""
    high: int
    """The last step that no later state has replaced."""
    ranks: int
    pace_s: float | None
    train_s: float
    """Training time of the steps up to ``high``."""
    saves_s: float
    stall_s: float

    def cancel(self, from_step: int) -> float:
        """Training continues from ``from_step``: returns the training time of the steps after it."""
        if from_step >= self.high:
            return 0.0
        redone_s = self.train_s
        if from_step > self.low:
            pace_s = self.pace_s or self.train_s / (self.high - self.low)
            redone_s = min(self.train_s, (self.high - from_step) * pace_s)
        self.high = max(self.low, from_step)
        self.train_s -= redone_s
        return redone_s

    def productive_s(self, since_s: float) -> float:
        """Productive time since then: saves are spread evenly, and the lost steps come last."""
        length_s = self.train_s + self.saves_s
        inside_s = min(length_s, max(0.0, self.begun_s + length_s - since_s))
        return inside_s * self.train_s / length_s if length_s > 0 else 0.0


@dataclass
class _Sum:
    segments: list[_Segment] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    parts_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((*PARTS, "redone", "stall", "saves", "unknown"), 0.0)
    )
    parts_gpu_s: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.parts_gpu_s = dict.fromkeys(self.parts_s, 0.0)

    def add(self, part: str, seconds: float, ranks: int) -> None:
        self.parts_s[part] += seconds
        self.parts_gpu_s[part] += seconds * ranks


def loss(lives: Sequence[Life]) -> Loss | None:
    """The loss of a run; None if no generation has trained.

    Args:
        lives: the generations that trained, oldest first.
    """
    if not lives:
        return None
    total = _Sum()
    begun_s = cursor_s = _begun_s(lives[0])
    for place, life in enumerate(lives):
        first_s = max(cursor_s, _first_s(life))
        parts = down_parts(life.resumption, cursor_s, first_s)
        for name, seconds in parts.items():
            total.add(name, seconds or 0.0, _ranks(life))
        if place > 0:
            total.interruptions.append(
                _interruption(total, lives[place - 1], life, (cursor_s, first_s), parts)
            )
        following = lives[place + 1] if place + 1 < len(lives) else None
        segment = _segment(life, first_s, following)
        total.segments.append(segment)
        total.add("saves", segment.saves_s, segment.ranks)
        total.add("stall", segment.stall_s, segment.ranks)
        cursor_s = segment.ended_s
    window_s = min(HOUR_S, cursor_s - begun_s)
    return Loss(
        begun_wall_s=begun_s,
        until_wall_s=cursor_s,
        productive_s=sum(segment.train_s for segment in total.segments),
        parts_s=total.parts_s,
        productive_gpu_s=sum(each.ranks * each.train_s for each in total.segments),
        parts_gpu_s=total.parts_gpu_s,
        last_hour_productive_s=sum(s.productive_s(cursor_s - window_s) for s in total.segments),
        interruptions=tuple(total.interruptions),
        windows=tuple(_windows(total.segments, begun_s, cursor_s)),
    )


def _windows(segments: Sequence[_Segment], begun_s: float, until_s: float) -> Iterator[Window]:
    wall_s = until_s - begun_s
    if wall_s <= 0:
        return
    fits = (each for each in _WINDOW_LENGTHS_S if wall_s <= each * WINDOWS_MAX)
    length_s = next(fits, wall_s / WINDOWS_MAX)
    count = max(1, min(WINDOWS_MAX, math.ceil(wall_s / length_s)))  # the quotient may be 0
    starts_s = [begun_s + place * length_s for place in range(count)]
    since_s = [sum(each.productive_s(at_s) for each in segments) for at_s in starts_s]
    for at_s, productive_s, later_s in zip(starts_s, since_s, (*since_s[1:], 0.0), strict=True):
        own_s = min(length_s, until_s - at_s)
        if own_s > 0:
            yield Window(at_s, own_s, min(own_s, max(0.0, productive_s - later_s)))


def _begun_s(life: Life) -> float:
    """The start of the first daemon; the VM may have been up for days before."""
    if life.resumption is not None:
        return min(life.resumption.daemon_wall_s, life.resumption.first_step_wall_s)
    return _first_s(life)


def _first_s(life: Life) -> float:
    """When the first new step was completed; without a record, when the generation was claimed."""
    if life.resumption is not None:
        return life.resumption.first_step_wall_s
    if life.claimed_wall_s is not None:
        return min(life.claimed_wall_s, life.ending.wall_s)
    return life.ending.wall_s


def _ranks(life: Life) -> int:
    if life.resumption is not None:
        return life.resumption.ranks
    return life.ending.ranks or 1


def _segment(life: Life, first_s: float, following: Life | None) -> _Segment:
    last = life.ending
    limit_s = last.wall_s if following is None else min(last.wall_s, _first_s(following))
    ended_s = max(first_s, limit_s)
    stall_s = min(last.stall_s or 0.0, ended_s - first_s)
    saves_s = min(last.saves_s or 0.0, ended_s - first_s - stall_s)
    low = life.start_step if life.resumption is None else life.resumption.first_step
    return _Segment(
        begun_s=first_s,
        ended_s=ended_s,
        low=low,
        high=max(low, last.step),
        ranks=_ranks(life),
        pace_s=last.step_s,
        train_s=ended_s - first_s - stall_s - saves_s,
        saves_s=saves_s,
        stall_s=stall_s,
    )


def _interruption(
    total: _Sum,
    before: Life,
    life: Life,
    down: tuple[float, float],
    parts: dict[str, float | None],
) -> Interruption:
    last, resumption = before.ending, life.resumption
    cancelled = list(_cancelled(total.segments, life.start_step))
    redone_s = sum(seconds for _, seconds in cancelled)
    redone_gpu_s = sum(ranks * seconds for ranks, seconds in cancelled)
    total.parts_s["redone"] += redone_s
    total.parts_gpu_s["redone"] += redone_gpu_s
    known_stall_s = None if last.stall_s is None else total.segments[-1].stall_s
    return Interruption(
        after_generation=before.generation,
        generation=life.generation,
        ended_wall_s=down[0],
        resumed_wall_s=down[1],
        last_step=last.step,
        start_step=life.start_step,
        is_same_vm=_is_same_vm(before, life),
        is_estimated=last.is_estimated or resumption is None,
        is_skewed=_is_skewed(before, life, last),
        ranks=_ranks(life),
        nodes=1 if resumption is None else resumption.nodes,
        stall_s=known_stall_s,
        redone_s=redone_s,
        down_s=down[1] - down[0],
        parts_s=parts,
        lost_parts_gpu_s={
            "stall": (known_stall_s or 0.0) * total.segments[-1].ranks,
            "redone": redone_gpu_s,
            **{part: (seconds or 0.0) * _ranks(life) for part, seconds in parts.items()},
        },
        bytes_fetched=None if resumption is None else resumption.bytes_fetched,
        bytes_linked=None if resumption is None else resumption.bytes_linked,
    )


def _cancelled(segments: Sequence[_Segment], from_step: int) -> Iterator[tuple[int, float]]:
    """GPUs and training time of the steps that are done again; a resume may go back over several lives."""
    for segment in reversed(segments):
        yield segment.ranks, segment.cancel(from_step)
        if segment.low < from_step:
            return


def _is_same_vm(before: Life, life: Life) -> bool:
    own, earlier = life.resumption, before.resumption
    return own is not None and earlier is not None and own.vm == earlier.vm


def _is_skewed(before: Life, life: Life, last: GenerationEnd) -> bool:
    """Whether a VM did something before it could; other VMs of a job run on while one is replaced."""
    own = life.resumption
    if own is None or _is_same_vm(before, life):
        return False
    is_early = own.nodes == 1 and own.daemon_wall_s < last.wall_s - SKEW_S
    return own.first_step_wall_s < last.wall_s or is_early
