# SPDX-License-Identifier: Apache-2.0
"""The course of an evacuation and of the resumption after it, as lanes of bars on one time axis.  Pure.

Times are seconds since the notice was acted on.  A farewell is not signed, so its timeline may have any
phases in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from swansong_bucket.format.farewell import RecordedEvacuation, TimelineEntry
from swansong_bucket.loss_records import Resumption
from swansong_bucket.model import PEER_SOURCE

from swansong_tools.economics.loss import Interruption
from swansong_tools.units import counted, human_bytes, human_span

BARS_MAX = 40
"""Bars of one lane."""
_RATE_S_MIN = 0.01
"""Samples closer than this give no bandwidth."""
_ENDED = ("request_failed", "withdrawn", "verdict")
RESUMING = {
    "cloud": ("No VM", "From the last step until the next VM boots."),
    "boot": ("Boot", "From the start of the kernel to the start of the daemon."),
    "start": (
        "Start",
        "Until the trainer asks for its checkpoint: container, interpreter, imports.",
    ),
    "fetch": ("Fetch", "Until the daemon has fetched the checkpoint."),
    "load": ("Load", "The trainer loads the checkpoint."),
    "warm_up": ("First step", "Until the first new step is completed."),
    "unknown": ("Not recorded", "The resume was not recorded."),
}
"""Lane and explanation of each part of the time without training, by its name in
:mod:`swansong_tools.economics.loss`."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time; None: from or to the edge of the picture."""

    kind: str
    """``training``, ``grace``, ``forecast``, ``work``, ``idle`` ... names its colour."""
    from_s: float | None
    to_s: float | None


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of the picture."""

    name: str
    note: str
    bars: tuple[Bar, ...]
    explains: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """A vertical line through all lanes."""

    kind: str
    name: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Rate:
    """The bandwidth between two samples."""

    from_s: float
    to_s: float
    bytes_per_s: float

    def joined(self, later: Rate) -> Rate:
        """The mean bandwidth of this stretch and of the next one."""
        length_s, more_s = self.to_s - self.from_s, later.to_s - later.from_s
        sent = self.bytes_per_s * length_s + later.bytes_per_s * more_s
        return Rate(self.from_s, later.to_s, sent / (length_s + more_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """An evacuation, and the resumption after it if there is one."""

    old_vm: tuple[Lane, ...]
    next_vm: tuple[Lane, ...]
    moments: tuple[Moment, ...]
    rates: tuple[Rate, ...]
    is_of_peer: bool = False
    """Another VM of the job had the notice."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (*self.old_vm, *self.next_vm)

    def times_s(self) -> Iterable[float]:
        """All times that the axis must show."""
        for lane in self.lanes:
            for bar in lane.bars:
                yield from (time_s for time_s in (bar.from_s, bar.to_s) if time_s is not None)
        yield from (moment.at_s for moment in self.moments)
        for rate in self.rates:
            if rate.bytes_per_s > 0:
                yield from (rate.from_s, rate.to_s)


def course(
    recorded: RecordedEvacuation,
    interruption: Interruption | None = None,
    resumption: Resumption | None = None,
) -> Course:
    """The course of an evacuation.

    Args:
        interruption: the loss that followed; None while no VM has resumed the run.
        resumption: how it was resumed; None if that was not recorded.
    """
    entries = recorded.timeline
    place = next((i for i, entry in enumerate(entries) if entry.phase == "follow_up"), len(entries))
    first, follow_ups = entries[:place], entries[place:]
    old_vm = (
        _training(recorded, interruption),
        _grace(recorded),
        _forecast(first),
        _waiting(
            first,
            "waiting_for_trainer",
            "request",
            "No trainer",
            "The daemon waits for a trainer that it can ask for a checkpoint.",
        ),
        _request(first),
        _save(first),
        _upload(first),
        _commit(first),
        _waiting(
            first,
            "waiting_for_peers",
            "complete",
            "Other VMs",
            "The checkpoint is whole once all VMs of the job have committed their parts.",
        ),
        _follow_ups(follow_ups),
    )
    next_vm = () if interruption is None else _next_vm(recorded, interruption, resumption)
    return Course(
        old_vm=tuple(lane for lane in old_vm if lane is not None and lane.bars),
        next_vm=tuple(next_vm),
        moments=tuple(_moments(recorded)),
        rates=_rates(recorded.samples),
        is_of_peer=is_of_peer(recorded),
    )


def is_of_peer(recorded: RecordedEvacuation) -> bool:
    """Whether this VM had no notice, and another VM of the job asked it for its part."""
    sources = {notice.source for notice in recorded.notices}
    return sources == {PEER_SOURCE}


def decided_s(recorded: RecordedEvacuation) -> float | None:
    """When this verdict was reached: each follow-up that is committed confirms it later."""
    concluded = [entry for entry in recorded.timeline if entry.phase == "verdict"]
    same = [entry for entry in concluded if entry.facts.get("verdict") == recorded.verdict.value]
    return next((entry.at_s for entry in (*same, *reversed(concluded))), None)


# ---------------------------------------------------------------- the old VM


def _training(recorded: RecordedEvacuation, interruption: Interruption | None) -> Lane | None:
    report = recorded.training
    if interruption is None:
        if report is None:
            return None
        known_s = report.wall_s - recorded.opened_wall_s
        return Lane(
            "Training",
            f"step {report.step}, the last one known",
            (Bar("training", None, known_s),),
            "Steps that this VM completed.",
        )
    ended_s = interruption.ended_wall_s - recorded.opened_wall_s
    resumed_s = max(ended_s, interruption.resumed_wall_s - recorded.opened_wall_s)
    about = "about " if interruption.is_estimated else ""
    note = f"to {about}step {interruption.last_step}, then from {interruption.start_step}"
    return Lane(
        "Training",
        note,
        (Bar("training", None, ended_s), Bar("training", resumed_s, None)),
        "Training on the old VM until its last step, then on the next VM from its first new step.",
    )


def _grace(recorded: RecordedEvacuation) -> Lane | None:
    if recorded.deadline_s is None or recorded.deadline_s <= 0:
        return None
    note = human_span(recorded.deadline_s)
    note += f", from {recorded.source}" if recorded.source else " until the deadline"
    return Lane(
        "Notice", note, (Bar("grace", 0.0, recorded.deadline_s),), "The time that the cloud leaves."
    )


def _forecast(entries: Sequence[TimelineEntry]) -> Lane | None:
    opening = first_entry(entries, "notice")
    asked = first_entry(entries, "request", "signal")
    expected_s = number_in(opening, "expected_s")
    if opening is None or expected_s is None or asked is None:
        return None
    pessimistic_s = max(expected_s, number_in(opening, "pessimistic_s") or 0.0)
    from_s = asked.at_s
    bars = (
        Bar("forecast", from_s, from_s + expected_s),
        Bar("pessimistic", from_s + expected_s, from_s + pessimistic_s),
    )
    note = f"{human_span(expected_s)}, at worst {human_span(pessimistic_s)}"
    return Lane("Forecast", note, bars, "Expected time from the request to the commit.")


def _waiting(
    entries: Sequence[TimelineEntry], begin: str, end: str, name: str, explained: str
) -> Lane:
    """The daemon waits from the phase ``begin`` to the phase ``end``."""
    bars = _between(entries, begins=(begin,), ends=(end, "verdict", "withdrawn"), fails=())
    idle = tuple(replace(bar, kind="idle") for bar in bars)
    return Lane(name, human_span(_union_s(bars)), idle, explained)


def _request(entries: Sequence[TimelineEntry]) -> Lane | None:
    asked = first_entry(entries, "request", "signal")
    if asked is None:
        return None
    later = [entry for entry in entries if entry.at_s >= asked.at_s]
    agreed = first_entry(later, "target") or _last(later, "accepted")
    ended = agreed or first_entry(later, "sealed", *_ENDED)
    to_s = asked.at_s if ended is None else ended.at_s
    # A rank accepts each request again after a failed save.
    accepted = [entry.facts for entry in later if entry.phase == "accepted"]
    ranks = len({facts.get("rank", facts.get("pid")) for facts in accepted})
    counted_ranks = counted(ranks, "rank") if ranks else ""
    return Lane(
        "Request",
        _note(human_span(to_s - asked.at_s), counted_ranks, _step(agreed)),
        (Bar("work", asked.at_s, to_s),),
        "The daemon asks all ranks for a checkpoint, and they agree on its step.",
    )


def _save(entries: Sequence[TimelineEntry]) -> Lane | None:
    sealed = first_entry(entries, "sealed")
    ended = sealed or first_entry(entries, *_ENDED)
    if ended is None:
        return None
    before = [entry for entry in entries if entry.at_s <= ended.at_s]
    begun = (
        first_entry(before, "target")
        or _last(before, "accepted")
        or first_entry(before, "request", "signal")
    )
    if begun is None:
        return None
    kind = "work" if sealed is not None else "failed"
    return Lane(
        "Save",
        _note(human_span(ended.at_s - begun.at_s), _size(sealed)),
        (Bar(kind, begun.at_s, ended.at_s),),
        "The trainer writes the checkpoint to local staging.",
    )


def _upload(entries: Sequence[TimelineEntry]) -> Lane:
    bars = _between(
        entries,
        begins=("flush", "early_shards"),
        ends=("flushed", "flush_stopped", "verdict", "withdrawn"),
        fails=("flush_stopped",),
    )
    note = _note(human_span(_union_s(bars)), _size(first_entry(entries, "flushed")))
    return Lane("Upload", note, bars, "The daemon sends the checkpoint to the store.")


def _commit(entries: Sequence[TimelineEntry]) -> Lane:
    bars = _between(
        entries, begins=("flushed",), ends=("committed", "verdict", "withdrawn"), fails=("verdict",)
    )
    step = _step(_last(entries, "committed"))
    note = _note(human_span(_union_s(bars)), step and f"{step} is durable")
    return Lane("Commit", note, bars, "The manifest is created: from here on the step is durable.")


def _follow_ups(entries: Sequence[TimelineEntry]) -> Lane:
    bars = _between(
        entries,
        begins=("follow_up",),
        ends=("committed", "follow_up_failed", "withdrawn"),
        fails=("follow_up_failed", "withdrawn", ""),
    )
    committed = sum(bar.kind == "work" for bar in bars)
    return Lane(
        "Follow-ups",
        _note(f"{committed} of {len(bars)} committed", _step(_last(entries, "committed"))),
        bars[:BARS_MAX],
        "Further checkpoints while the VM still runs: fewer steps are done again.",
    )


def _between(
    entries: Sequence[TimelineEntry],
    *,
    begins: Sequence[str],
    ends: Sequence[str],
    fails: Sequence[str],
) -> tuple[Bar, ...]:
    """Bars from each of these phases to the next one that ends it; they do not overlap.

    Args:
        fails: ends that count as a failure; an empty one stands for a missing end.
    """
    bars: list[Bar] = []
    from_s: float | None = None
    for entry in entries:
        if from_s is not None and entry.phase in ends:
            bars.append(Bar("failed" if entry.phase in fails else "work", from_s, entry.at_s))
            from_s = None
        if entry.phase in begins:
            if from_s is not None and entry.at_s > from_s:
                bars.append(Bar("failed" if "" in fails else "work", from_s, entry.at_s))
            from_s = entry.at_s
    if from_s is not None and entries[-1].at_s > from_s:
        bars.append(Bar("failed", from_s, entries[-1].at_s))
    return tuple(bars)[:BARS_MAX]


def _union_s(bars: Iterable[Bar]) -> float:
    return sum((bar.to_s or 0.0) - (bar.from_s or 0.0) for bar in bars)


# ---------------------------------------------------------------- the next VM


def _next_vm(
    recorded: RecordedEvacuation, interruption: Interruption, resumption: Resumption | None
) -> Iterable[Lane]:
    """The parts of the time without training, one after the other, with the figures of the loss."""
    offset_s = interruption.ended_wall_s - recorded.opened_wall_s
    has_new_vm = not interruption.is_same_vm and interruption.parts_s.get("boot") is not None
    cursor_s = offset_s
    for part, seconds in interruption.parts_s.items():
        if seconds is None:
            continue
        bar = Bar(
            "idle" if part in ("cloud", "unknown") else "resume", cursor_s, cursor_s + seconds
        )
        cursor_s += seconds
        note = human_span(seconds)
        if part == "fetch" and resumption is not None:
            note += _fetched(resumption)
        name, explained = RESUMING[part]
        if part == "cloud" and not has_new_vm:
            name = "No daemon"
        yield Lane(name, note, (bar,), explained)


def _fetched(resumption: Resumption) -> str:
    linked = f", {human_bytes(resumption.bytes_linked)} local" if resumption.bytes_linked else ""
    return f", {human_bytes(resumption.bytes_fetched)} fetched{linked}"


# ---------------------------------------------------------------- moments and bandwidth


def _moments(recorded: RecordedEvacuation) -> Iterable[Moment]:
    yield Moment("notice", "notice", 0.0)
    at_s = decided_s(recorded)
    if at_s is not None:
        yield Moment("verdict", f"{recorded.verdict.value}", at_s)
    if recorded.deadline_s is not None and recorded.deadline_s > 0:
        yield Moment("deadline", "deadline", recorded.deadline_s)


def _rates(samples: Sequence[tuple[float, int]]) -> tuple[Rate, ...]:
    rates: list[Rate] = []
    from_s, from_bytes = samples[0] if samples else (0.0, 0)
    for at_s, sent_bytes in samples:
        if at_s - from_s >= _RATE_S_MIN:
            rates.append(Rate(from_s, at_s, (sent_bytes - from_bytes) / (at_s - from_s)))
            from_s, from_bytes = at_s, sent_bytes
    return tuple(rates)


# ---------------------------------------------------------------- entries


def first_entry(entries: Sequence[TimelineEntry], *phases: str) -> TimelineEntry | None:
    """The first entry of one of these phases; None without any."""
    return next((entry for entry in entries if entry.phase in phases), None)


def _last(entries: Sequence[TimelineEntry], *phases: str) -> TimelineEntry | None:
    return next((entry for entry in reversed(entries) if entry.phase in phases), None)


def number_in(entry: TimelineEntry | None, name: str) -> float | None:
    """A number of zero or more among the facts of an entry."""
    value = None if entry is None else entry.facts.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        return None
    return float(value)


def _note(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _step(entry: TimelineEntry | None) -> str:
    """The step of an entry in words; empty if the entry has none."""
    step = number_in(entry, "step")
    return "" if step is None else f"step {step:.0f}"


def _size(ended: TimelineEntry | None) -> str:
    """The size that the end of a phase states, or that the phase has no end; empty without a size."""
    if ended is None:
        return "not finished"
    size_bytes = number_in(ended, "size_bytes")
    return "" if size_bytes is None else human_bytes(size_bytes)
