# SPDX-License-Identifier: Apache-2.0
"""The notifications that a decision causes: of notices, verdicts and resumptions.  Pure.

:mod:`swansongd.observe.conditions` has those of problems that last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum

from swansong_bucket.model import DRILL, PEER_SOURCE, Notice, Severity, Verdict
from swansong_bucket.model import is_drill as is_of_drills
from swansong_bucket.util.printable import printable

from swansongd.core.events import Action, Conclude
from swansongd.core.notices import OUTLIVED_S
from swansongd.core.state import State
from swansongd.observe.accounting import MeasuredResume
from swansongd.observe.facts import StepsCompared

TEXT_CHARS_MAX = 500
NOTICES, DRILLS = "notices", "drills"
"""Groups: all notices of this VM are one problem, and so are all drills."""
GROUPS = frozenset({NOTICES, DRILLS})


class NotificationKind(StrEnum):
    NOTICE = "notice"
    VERDICT = "verdict"
    STALL = "stall"
    BLIND = "blind"
    MARGIN = "margin"
    METRICS = "metrics"
    RESUMPTION = "resumption"
    REDONE = "redone"
    TEST = "test"


class Importance(StrEnum):
    """The four severities of PagerDuty's Events API."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


_OF_VERDICT = {
    Verdict.SAFE: Importance.INFO,
    Verdict.PARTIAL: Importance.ERROR,
    Verdict.LOST: Importance.CRITICAL,
    Verdict.NO_TRAINING: Importance.INFO,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """One event for operators.  All texts are short and printable."""

    key: str
    """Identifies the event on this VM and boot: sent once."""
    group: str
    """The same for the start and the end of one problem."""
    ends: str = ""
    """With the end of a notice or a condition: beginning of the keys that count as new from now on."""
    kind: NotificationKind
    is_over: bool = False
    """The problem has ended: the condition, or every notice is gone or answered by SAFE."""
    summary: str
    importance: Importance
    wall_s: float
    step: int | None = None
    generation: int | None = None
    verdict: str = ""
    reason: str = ""
    source: str = ""
    urgency: str = ""
    """Of a notice: ``advisory``, ``scheduled``, ``imminent`` or ``shutting_down``."""
    seconds_left: float | None = None
    """Time to the deadline, counted from ``wall_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The sender of all notifications of this daemon."""

    run: str
    vm: str
    host: str

    def identity(self, notification: Notification) -> str:
        """The id of the notification, unique among all VMs."""
        return self._digest(notification.key)

    def group(self, notification: Notification) -> str:
        """The id of the problem, unique among all VMs."""
        return self._digest(f"group {notification.group}")

    def _digest(self, name: str) -> str:
        return hashlib.sha256(f"{self.run} {self.vm} {name}".encode()).hexdigest()[:32]


def fields(origin: Origin, notification: Notification) -> dict[str, object]:
    """The JSON fields of a notification; unknown values are None."""
    step, generation = notification.step, notification.generation
    return {
        "id": origin.identity(notification),
        "group": origin.group(notification),
        "kind": notification.kind.value,
        "over": notification.is_over,
        "summary": notification.summary,
        "severity": notification.importance.value,
        "run": origin.run,
        "vm": origin.vm,
        "host": origin.host,
        "step": None if step is None or step < 0 else step,
        "generation": generation,
        "verdict": notification.verdict or None,
        "reason": notification.reason or None,
        "seconds_left": notification.seconds_left,
        "source": notification.source or None,
        "urgency": notification.urgency or None,
        "time": rfc3339(notification.wall_s),
    }


def rfc3339(wall_s: float) -> str:
    """A time in UTC with milliseconds."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


# ---------------------------------------------------------------- events


def caused(
    before: State,
    after: State,
    actions: Sequence[Action],
    *,
    step: int,
    now_mono_s: float,
    wall_s: float,
) -> list[Notification]:
    """The notifications of one transition.

    A notice of another VM of the job causes none, and neither does its evacuation: that VM sends its own.

    Args:
        step: newest one that training has completed.
    """
    found = []
    if before.notices.live is not after.notices.live:
        found += _of_notices(before, after, step, now_mono_s, wall_s)
    for action in actions:
        if isinstance(action, Conclude) and action.is_final and not _is_of_peers(after):
            found.append(_of_verdict(action, after, wall_s))
    return found


def _of_notices(
    before: State, after: State, step: int, now_mono_s: float, wall_s: float
) -> list[Notification]:
    live_before, live_after = _live(before), _live(after)
    found = [
        _of_notice(notice, after, step, now_mono_s, wall_s)
        for identity, notice in live_after.items()
        if identity not in live_before or live_before[identity].severity < notice.severity
    ]
    found += [
        _notice_over(notice, after, step, now_mono_s, wall_s)
        for identity, notice in live_before.items()
        if identity not in live_after
    ]
    return found


def _live(state: State) -> dict[str, Notice]:
    """Notices in force about this VM, by identity."""
    return {
        notice.identity: notice for notice in state.notices.in_force if notice.source != PEER_SOURCE
    }


def _of_notice(
    notice: Notice, state: State, step: int, now_mono_s: float, wall_s: float
) -> Notification:
    urgency = notice.severity.name.lower()
    left_s = max(0.0, notice.deadline_mono_s - now_mono_s)
    words = {
        Severity.ADVISORY: "this VM may be terminated",
        Severity.SCHEDULED: f"this VM will be terminated in {left_s:.0f} s",
        Severity.IMMINENT: f"this VM will be terminated in {left_s:.0f} s",
        Severity.SHUTTING_DOWN: "the operating system of this VM is shutting down",
    }[notice.severity]
    is_drill = notice.source == DRILL
    head = "Drill" if is_drill else f"Notice of {notice.source} ({notice.kind})"
    if is_drill:
        words = "an evacuation is rehearsed, and this VM continues"
    return Notification(
        key=f"notice/{notice.identity}/{urgency}",
        group=_group(is_drill=is_drill),
        kind=NotificationKind.NOTICE,
        is_over=is_answered(state, is_drill=is_drill),
        summary=text(f"{head}: {words}"),
        importance=Importance.INFO if is_drill else Importance.WARNING,
        wall_s=wall_s,
        step=step,
        generation=state.generation,
        reason=text(notice.detail),
        source=text(notice.source),
        urgency=urgency,
        seconds_left=round(left_s, 1),
    )


def _notice_over(
    notice: Notice, state: State, step: int, now_mono_s: float, wall_s: float
) -> Notification:
    is_outlived = now_mono_s > notice.deadline_mono_s + OUTLIVED_S
    reason = "the VM has outlived the deadline" if is_outlived else "the notice was withdrawn"
    return replace(
        _of_notice(notice, state, step, now_mono_s, wall_s),
        key=f"notice/{notice.identity}/over/{wall_s:.3f}",
        ends=f"notice/{notice.identity}/",
        summary=text(f"Notice of {notice.source} ({notice.kind}) is over: {reason}"),
        importance=Importance.INFO,
        reason=reason,
        seconds_left=None,
    )


def _group(*, is_drill: bool) -> str:
    return DRILLS if is_drill else NOTICES


def is_answered(state: State, *, is_drill: bool) -> bool:
    """Whether a verdict that needs no action answers the most urgent notice, or none is in force.

    Args:
        is_drill: of the drills, otherwise of all other notices of this VM.
    """
    live = [notice for notice in _live(state).values() if (notice.source == DRILL) == is_drill]
    if not live:
        return True
    evacuation = state.evacuation
    settled = (Verdict.SAFE, Verdict.NO_TRAINING)
    if evacuation is None or evacuation.is_precaution or evacuation.verdict not in settled:
        return False
    most_urgent = max(notice.severity for notice in live)
    return any(n.severity == most_urgent and n.identity in evacuation.identities for n in live)


def _is_of_peers(state: State) -> bool:
    """Whether the open evacuation answers only notices of other VMs."""
    evacuation = state.evacuation
    if evacuation is None:
        return False
    answered = [
        n.source for n in state.notices.live.values() if n.identity in evacuation.identities
    ]
    return bool(answered) and all(source == PEER_SOURCE for source in answered)


def _of_verdict(conclusion: Conclude, state: State, wall_s: float) -> Notification:
    commit = conclusion.commit
    evacuation = state.evacuation
    is_drill = evacuation is not None and is_of_drills(evacuation.identities)
    head = "Verdict of a drill" if is_drill else "Verdict"
    return Notification(
        key=f"verdict/{conclusion.evacuation_id}/{conclusion.verdict.value}",
        group=_group(is_drill=is_drill),
        kind=NotificationKind.VERDICT,
        is_over=is_answered(state, is_drill=is_drill),
        summary=text(f"{head} {conclusion.verdict.value}: {conclusion.reason}"),
        importance=Importance.INFO if is_drill else _OF_VERDICT[conclusion.verdict],
        wall_s=wall_s,
        step=None if commit is None else commit.step,
        generation=state.generation if commit is None else commit.generation,
        verdict=conclusion.verdict.value,
        reason=text(conclusion.reason),
        source=DRILL if is_drill else text(_source_of_verdict(state)),
        seconds_left=conclusion.slack_s,
    )


def _source_of_verdict(state: State) -> str:
    """The source that opened the evacuation, or that of a real notice that joined a drill."""
    if state.evacuation is None:
        return ""
    opened_by = state.evacuation.reason.partition(":")[0]
    joined = (n.source for n in _live(state).values() if n.source != DRILL)
    return next(joined, "") if opened_by == DRILL else opened_by


def of_resume(measured: MeasuredResume, wall_s: float) -> Notification | None:
    """The notification of a resume; None if the first VM of the job sends it."""
    if measured.training.node != 0:
        return None
    generation = measured.generation
    start = max(0, measured.milestones.start_step)
    origin = "from the beginning" if start == 0 else f"at step {start}"
    return Notification(
        key=f"resumption/{generation}",
        group=f"resumption/{generation}",
        kind=NotificationKind.RESUMPTION,
        is_over=True,
        summary=f"Training runs {origin}, as generation {generation}",
        importance=Importance.INFO,
        wall_s=wall_s,
        step=start,
        generation=generation,
    )


def of_comparison(found: StepsCompared, state: State, wall_s: float) -> Notification | None:
    """The notification of redone steps; None if they are as before."""
    if not found.differs:
        return None
    start_id = "" if state.start is None else state.start.id
    return Notification(
        key=f"redone/{start_id}/{found.text}",
        group=f"redone/{start_id}",
        kind=NotificationKind.REDONE,
        is_over=True,
        summary=text(f"The resume is not exact: {found.text}"),
        importance=Importance.WARNING,
        wall_s=wall_s,
        generation=state.generation,
        reason=text(found.text),
    )


def sample(wall_s: float) -> Notification:
    """The notification of ``swansong doctor --send-notification``."""
    return Notification(
        key=f"test/{wall_s:.3f}",
        group=f"test/{wall_s:.3f}",
        kind=NotificationKind.TEST,
        summary="Test notification of swansong doctor: no action is needed",
        importance=Importance.INFO,
        wall_s=wall_s,
        seconds_left=None,
    )


def text(value: str) -> str:
    """The value as short printable text."""
    return str(printable(value))[:TEXT_CHARS_MAX]
