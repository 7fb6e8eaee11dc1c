# SPDX-License-Identifier: Apache-2.0
"""The changes between two statuses, one line each, for logs and for terminals without a screen."""

from __future__ import annotations

import time
from collections.abc import Iterator

from swansongd.observe.status import DaemonStatus, HealthStatus

from swansong_tools.commands.view.poller import Display, Poll
from swansong_tools.commands.view.rows import newer_generation, rows, word
from swansong_tools.units import human_s

Facts = dict[str, tuple[str, str]]
"""By name: the words that are compared, and words with figures that change all the time."""
_FITS = {True: "fits", False: "too late", None: "unknown"}


def facts_of(status: DaemonStatus) -> Facts:
    """The facts whose change is worth a line."""
    evacuation, commit = status.evacuation, status.last_commit
    place = "none" if commit is None else f"generation {commit.generation} step {commit.step}"
    facts: Facts = {
        "daemon": (f"version {status.version}, pid {status.pid}", ""),
        "state": (f"{status.state}{newer_generation(status)}", ""),
        "generation": (word(status.generation), ""),
        "verdict": (word(status.verdict), ""),
        "last commit": (place, ""),
    }
    if evacuation is not None:
        plan = f"{evacuation.reason}: {evacuation.plan}"
        facts["evacuation"] = (plan, f", {human_s(evacuation.seconds_left)} left")
    for notice in status.notices:
        left = f", {human_s(notice.seconds_left)} left"
        facts[f"notice {notice.source}"] = (notice.severity, left)
    for source in status.sources:
        facts[f"source {source.name}"] = _health(source)
    if status.store is not None:
        facts["store"] = _health(status.store)
    for margin in status.margins:
        spare = "" if margin.spare_s is None else f", {human_s(margin.spare_s)} to spare"
        fits = (_FITS[margin.fits], spare)
        facts[f"margin {margin.source}"] = (
            ("not SAFE", f": {margin.problem}") if margin.problem else fits
        )
    connected = sum(trainer.connected for trainer in status.trainers)
    facts["trainers"] = (f"{connected} connected", "")
    if status.mirror is not None:
        facts["mirror"] = (status.mirror.state, "")
    return facts | _problems(status)


def _problems(status: DaemonStatus) -> Facts:
    """The rows that only a problem has; the first words of such a row name it."""
    found: Facts = {}
    for row in rows(status):
        if row.label in ("problem", "failed saves", "decision faults"):
            name = f"{row.label} {len(found) + 1}" if row.label in found else row.label
            found[name] = ("yes", f": {row.text}")
    return found


def _health(item: HealthStatus) -> tuple[str, str]:
    return item.health, f": {word(item.reason)}"


def changes(before: Facts, now: Facts) -> Iterator[str]:
    """A line for each fact that is new, different or over."""
    for name, (words, figures) in now.items():
        if name not in before or before[name][0] != words:
            yield f"{name}: {words}{figures}"
    for name in before:
        if name not in now:
            yield f"{name}: none"


class ChangeLog(Display):
    """Prints the changes on standard output, with the time in UTC."""

    def __init__(self) -> None:
        self._facts: Facts = {}

    def take(self, poll: Poll) -> None:
        """Print a line for each change since the poll before."""
        if poll.status is None:
            facts = self._facts | {"daemon": ("away", f": {poll.reason}")}
        else:
            facts = facts_of(poll.status)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(poll.at_wall_s))
        for line in changes(self._facts, facts):
            print(f"{at} {line}", flush=True)
        self._facts = facts
