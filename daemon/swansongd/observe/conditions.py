# SPDX-License-Identifier: Apache-2.0
"""Problems that last: a stalled trainer, a blind source, a negative margin, unserved metrics.  Pure.

They are found in a state, and not in a transition, so a restart of the daemon neither repeats nor loses their
start and their end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swansong_bucket.model import Health

from swansongd.core.state import State
from swansongd.observe.margin import margins
from swansongd.observe.notifications import (
    DRILLS,
    GROUPS,
    Importance,
    Notification,
    NotificationKind,
    is_answered,
    text,
)
from swansongd.observe.stall import stalled
from swansongd.observe.status import STORE_HEALTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A problem that may last: whether it holds, and its description."""

    kind: NotificationKind
    source: str = ""
    holds: bool
    summary: str
    reason: str = ""
    importance: Importance = Importance.WARNING

    def notification(
        self, group: str, since_wall_s: float, *, step: int, generation: int | None
    ) -> Notification:
        """The notification of its start, or of its end."""
        return Notification(
            key=f"{group}/{'begun' if self.holds else 'over'}/{since_wall_s:.3f}",
            group=group,
            ends="" if self.holds else f"{group}/",
            kind=self.kind,
            is_over=not self.holds,
            summary=text(self.summary),
            importance=self.importance if self.holds else Importance.INFO,
            wall_s=since_wall_s,
            step=step,
            generation=generation,
            reason=text(self.reason),
            source=text(self.source),
        )


def conditions(
    state: State,
    step: int,
    now_mono_s: float,
    metrics_failure: str = "",
    told: frozenset[str] = frozenset(),
) -> dict[str, Condition]:
    """The known conditions by group.  One that is absent is unknown: its last value remains.

    Args:
        step: newest one that training has completed.
        metrics_failure: why ``metrics.listen`` is not served.
        told: groups whose last message was not their end.
    """
    found = {f"blind/{name}": made for name, made in _blind(state).items()}
    found["metrics"] = _metrics(metrics_failure)
    found |= {group: _notices(state, group) for group in GROUPS & told}
    stall = _stall(state, step, now_mono_s)
    if stall is not None:
        found["stall"] = stall
    if state.evacuation is None:
        found |= {f"margin/{name}": made for name, made in _margins(state).items()}
    return found


def _blind(state: State) -> dict[str, Condition]:
    found = {}
    for name, status in state.notices.sources.items():
        if status.health is Health.DEGRADED:
            continue
        is_store, holds = name == STORE_HEALTH, status.health is Health.BLIND
        what = "The store" if is_store else f"Source {name}"
        effect = "no checkpoint can be committed" if is_store else "a notice would be missed"
        summary = (
            f"{what} is blind, {effect}: {status.reason}" if holds else f"{what} responds again"
        )
        found[name] = Condition(
            kind=NotificationKind.BLIND,
            source=name,
            holds=holds,
            summary=summary,
            reason=status.reason,
            importance=Importance.ERROR,
        )
    return found


def _metrics(failure: str) -> Condition:
    return Condition(
        kind=NotificationKind.METRICS,
        holds=bool(failure),
        summary=f"The metrics are not served, do not trust what Prometheus shows: {failure}"
        if failure
        else "The metrics are served again",
        reason=failure,
        importance=Importance.ERROR,
    )


def _notices(state: State, group: str) -> Condition:
    """A problem that began with a notice.  No decision ends it if no daemon ran when it ended."""
    return Condition(
        kind=NotificationKind.NOTICE,
        holds=not is_answered(state, is_drill=group == DRILLS),
        summary="No notice is in force, or SAFE answers it",
    )


def _stall(state: State, step: int, now_mono_s: float) -> Condition | None:
    ranks = sorted(trainer.rank for trainer in stalled(state, now_mono_s))
    if ranks:
        shown = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
        return Condition(
            kind=NotificationKind.STALL,
            holds=True,
            summary=f"Training makes no progress since step {step}: rank {shown}",
            importance=Importance.ERROR,
        )
    if not any(t.step_s is not None for t in state.connected):
        return None
    return Condition(
        kind=NotificationKind.STALL, holds=False, summary="Training makes progress again"
    )


def _margins(state: State) -> dict[str, Condition]:
    found = {}
    for margin in margins(state):
        if margin.spare_s is None:
            continue
        holds, source = margin.spare_s < 0, margin.source
        late = (
            f"After a notice of {source} right now the commit would be {-margin.spare_s:.1f} s late"
        )
        found[source] = Condition(
            kind=NotificationKind.MARGIN,
            source=source,
            holds=holds,
            summary=late if holds else f"A notice of {source} leaves enough time again",
        )
    return found


@dataclass
class Watch:
    """Turns conditions into notifications: one for each start and end that lasts for ``settle_s``.

    Args:
        begun: groups that were begun, and not over, when the last daemon of this boot ended.
    """

    settle_s: float
    begun: set[str] = field(default_factory=set)
    _changed_mono_s: dict[str, float] = field(default_factory=dict)

    def look(
        self,
        state: State,
        *,
        step: int,
        now_mono_s: float,
        wall_s: float,
        metrics_failure: str = "",
        told: frozenset[str] = frozenset(),
    ) -> list[Notification]:
        """The notifications that are due; call it about once a second.

        Args:
            step, metrics_failure, told: see :func:`conditions`.
        """
        found = []
        self.begun = (self.begun - GROUPS) | (told & GROUPS)
        known = conditions(state, step, now_mono_s, metrics_failure, told)
        for group in self._changed_mono_s.keys() - known.keys():
            del self._changed_mono_s[group]
        for group, condition in known.items():
            if condition.holds == (group in self.begun):
                self._changed_mono_s.pop(group, None)
                continue
            since_mono_s = self._changed_mono_s.setdefault(group, now_mono_s)
            if now_mono_s - since_mono_s < self.settle_s:
                continue
            del self._changed_mono_s[group]
            (self.begun.add if condition.holds else self.begun.discard)(group)
            found.append(
                condition.notification(group, wall_s, step=step, generation=state.generation)
            )
        return found
