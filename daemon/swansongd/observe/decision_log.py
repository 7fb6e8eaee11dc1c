# SPDX-License-Identifier: Apache-2.0
"""Logs the lines of the decision loop, at a limited rate, and records the timeline."""

from __future__ import annotations

import structlog

from swansongd.core.events import Conclude, Log, Mark
from swansongd.observe import log as logs
from swansongd.observe.timeline import Timeline
from swansongd.util.rates import LogLimit

# More than a normal job causes: a trainer must not fill the system journal.
_LINES_AT_ONCE, _LINE_EVERY_S = 50, 2.0
_MARKS_AT_ONCE, _MARK_EVERY_S = 200, 1.0
# Neither must a source whose values change with each poll.
_SOURCE_LINES_AT_ONCE, _SOURCE_LINE_EVERY_S = 10, 30.0
_OF_SOURCES = (
    "health",
    "notice",
    "notice_withdrawn",
    "evacuation_held",
    "precaution_skipped",
    "gpu_health",
)

_log = structlog.get_logger(__name__)


class DecisionLog:
    """The log lines of the decision loop, and the timeline of the latest evacuation.  For one thread."""

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self._lines = LogLimit(burst=_LINES_AT_ONCE, interval_s=_LINE_EVERY_S)
        self._source_lines = LogLimit(burst=_SOURCE_LINES_AT_ONCE, interval_s=_SOURCE_LINE_EVERY_S)
        self._marks = LogLimit(burst=_MARKS_AT_ONCE, interval_s=_MARK_EVERY_S)

    def write(self, line: Log, now_mono_s: float) -> None:
        """Log a line, unless too many like it were logged."""
        facts = dict(line.facts)
        limit = self._source_lines if line.event in _OF_SOURCES else self._lines
        extra = limit.admit((line.event, facts.get("source")), now_mono_s)
        if extra is not None:
            _log.log(logs.LEVELS[line.level], line.event, **facts, **extra)

    def mark(self, mark: Mark, now_mono_s: float) -> bool:
        """Append to the timeline.

        Returns:
            Whether this mark is the first one of its evacuation.
        """
        is_first = self.timeline is None or self.timeline.evacuation_id != mark.evacuation_id
        if self.timeline is None or is_first:
            self.timeline = Timeline(mark.evacuation_id, now_mono_s)
        entry = self.timeline.add(mark, now_mono_s)
        extra = self._marks.admit(mark.phase, now_mono_s)
        if extra is not None:
            _log.info("evacuation", id=mark.evacuation_id, **entry, **extra)
        return is_first

    def verdict(self, conclusion: Conclude, now_mono_s: float) -> None:
        """Log the verdict, and append it to the timeline."""
        if self.timeline is not None:
            facts = (("verdict", conclusion.verdict.value), ("slack_s", conclusion.slack_s))
            self.timeline.add(Mark(conclusion.evacuation_id, "verdict", facts), now_mono_s)
        commit = conclusion.commit
        _log.warning(
            "verdict",
            verdict=conclusion.verdict.value,
            reason=conclusion.reason,
            generation=commit.generation if commit else None,
            step=commit.step if commit else None,
            slack_s=conclusion.slack_s,
            expected_s=conclusion.expected_s,
            took_s=conclusion.took_s,
        )
