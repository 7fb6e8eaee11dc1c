# SPDX-License-Identifier: Apache-2.0
"""Counts decisions for the metrics, in the thread of the decision loop.

That thread is the only writer, and takes no lock.  Each mapping is replaced by a changed copy, so a scrape in
another thread reads a consistent one at any time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from swansong_bucket.model import CheckpointKind, Verdict, is_drill

from swansongd.core.events import (
    CommitDone,
    CommitFailed,
    Conclude,
    FlushFailed,
    Mark,
)
from swansongd.core.state import State
from swansongd.observe.families import Histogram
from swansongd.observe.observer import Observation

KEYS_MAX = 64
"""Keys of one counter: all sources and verdicts are fewer."""
PHASES = ("request", "agree", "save", "flush", "commit", "peers")
_PHASE_ENDED_BY = {
    "request": "request",
    "signal": "request",
    "target": "agree",
    "sealed": "save",
    "flushed": "flush",
    "committed": "commit",
    "complete": "peers",
}
"""Phase that ends with each mark of the timeline."""
_REQUESTED = ("request", "agree")
"""After these phases, only the answer to the request counts: a flush or a commit of an older set does not."""

Key = TypeVar("Key", bound=Hashable)


class Counters:
    """Counters and histograms since the daemon's start; an :class:`~swansongd.observe.observer.Observer`."""

    def __init__(self) -> None:
        self.notices: Mapping[str, int] = {}
        """By source."""
        self.precautions: Mapping[str, int] = {}
        self.evacuations: Mapping[tuple[str, str], int] = {}
        """By source and verdict."""
        self.last_verdicts: Mapping[bool, Conclude] = {}
        """The newest verdict of a drill (True), and of any other evacuation."""
        self.follow_ups = 0
        self.commits: Mapping[str, int] = {kind.value: 0 for kind in CheckpointKind}
        self.commit_failures = 0
        self.flush_failures = 0
        self.phases: Mapping[str, Histogram] = {phase: Histogram() for phase in PHASES}
        self.durations = Histogram()
        """From the opening of an evacuation to its first verdict."""
        self._evacuation_id = ""
        self._source = ""
        self._opened_mono_s = 0.0
        self._verdict: Verdict | None = None
        self._phase = ""
        """The last phase of this evacuation that has ended."""
        self._phase_mono_s = 0.0
        self._step = -1
        """Step of the set that answers the request."""

    def observe(self, observation: Observation) -> None:
        """Count one decision."""
        before, after, event, actions, now_mono_s = observation
        if after.notices.live is not before.notices.live:
            self._count_notices(before, after)
        if (
            after.course.last_verdict is not None
            and after.course.last_verdict is not before.course.last_verdict
        ):
            self._record_verdict(after.course.last_verdict)
        match event:
            case FlushFailed():
                self.flush_failures += not event.void
            case CommitDone():
                self._count_commit(before, event)
            case CommitFailed():
                self.commit_failures += not event.is_obsolete
        for action in actions:
            match action:
                case Mark():
                    self._mark(action, now_mono_s)
                case Conclude(is_final=True):
                    self._conclude(action, now_mono_s)

    def _count_notices(self, before: State, after: State) -> None:
        known = {notice.identity for notice in before.notices.live.values()}
        for notice in after.notices.live.values():
            if notice.identity not in known:
                self.notices = _plus_one(self.notices, notice.source)

    def _record_verdict(self, last: Conclude) -> None:
        """A drill hides no verdict of a real evacuation, and becomes one by a notice that joins it."""
        others = {
            key: each
            for key, each in self.last_verdicts.items()
            if each.evacuation_id != last.evacuation_id
        }
        self.last_verdicts = {**others, is_drill(last.notices): last}

    def _count_commit(self, before: State, event: CommitDone) -> None:
        stored = next(
            (item for item in before.commits.stored if item.flush_id == event.flush_id), None
        )
        if stored is not None:
            self.commits = _plus_one(self.commits, stored.staged.kind.value)

    def _mark(self, mark: Mark, now_mono_s: float) -> None:
        if mark.phase in ("notice", "precaution"):
            source = str(dict(mark.facts).get("source"))
            if mark.phase == "precaution":
                self.precautions = _plus_one(self.precautions, source)
                return
            self._evacuation_id, self._source, self._verdict = mark.evacuation_id, source, None
            self._opened_mono_s = self._phase_mono_s = now_mono_s
            self._phase, self._step = "", -1
        elif mark.evacuation_id != self._evacuation_id:
            return
        elif mark.phase == "follow_up":
            self.follow_ups += 1
        elif mark.phase == "request_failed":
            self._phase = ""
        elif mark.phase in _PHASE_ENDED_BY and self._verdict is None:
            step = dict(mark.facts).get("step")
            if mark.phase == "sealed" and isinstance(step, int):
                self._step = step
            if not isinstance(step, int) or step >= self._step:
                self._end_phase(_PHASE_ENDED_BY[mark.phase], now_mono_s)

    def _end_phase(self, phase: str, now_mono_s: float) -> None:
        """The phases of an evacuation end in their order; some are left out."""
        is_next = not self._phase or PHASES.index(phase) > PHASES.index(self._phase)
        is_of_older_set = self._phase in _REQUESTED and phase in ("flush", "commit", "peers")
        if not is_next or is_of_older_set:
            return
        seconds = max(0.0, now_mono_s - self._phase_mono_s)
        self.phases = {**self.phases, phase: self.phases[phase].plus(seconds)}
        self._phase, self._phase_mono_s = phase, now_mono_s

    def _conclude(self, conclusion: Conclude, now_mono_s: float) -> None:
        if conclusion.evacuation_id != self._evacuation_id or conclusion.verdict is self._verdict:
            return
        if self._verdict is None:
            self.durations = self.durations.plus(max(0.0, now_mono_s - self._opened_mono_s))
        self._verdict = conclusion.verdict
        self.evacuations = _plus_one(self.evacuations, (self._source, conclusion.verdict.value))


def _plus_one(counts: Mapping[Key, int], key: Key) -> Mapping[Key, int]:
    """A copy with one more of this key; further keys than KEYS_MAX are not counted."""
    if key not in counts and len(counts) >= KEYS_MAX:
        return counts
    return {**counts, key: counts.get(key, 0) + 1}
