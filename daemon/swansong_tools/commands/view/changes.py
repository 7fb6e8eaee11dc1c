# SPDX-License-Identifier: Apache-2.0
"""The changes between two status reports, one line each, for logs and for terminals without a screen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

from swansong_tools.commands.view.poller import Poll
from swansong_tools.commands.view.rows import newer_generation, rows
from swansong_tools.commands.view.values import seconds, table, tables, word

Facts = dict[str, tuple[str, str]]
"""By name: the words that are compared, and words with figures that change all the time."""
_FITS = {True: "fits", False: "too late"}


def facts_of(report: dict[str, Any]) -> Facts:
    """The facts whose change is worth a line."""
    evacuation, commit = table(report.get("evacuation")), table(report.get("last_commit"))
    place = f"generation {word(commit.get('generation'))} step {word(commit.get('step'))}"
    facts: Facts = {
        "daemon": (f"version {word(report.get('version'))}, pid {word(report.get('pid'))}", ""),
        "state": (f"{word(report.get('state'))}{newer_generation(report)}", ""),
        "generation": (word(report.get("generation")), ""),
        "verdict": (word(report.get("verdict")), ""),
        "last commit": (place if commit else "none", ""),
    }
    if evacuation:
        plan = f"{word(evacuation.get('reason'))}: {word(evacuation.get('plan'))}"
        facts["evacuation"] = (plan, f", {seconds(evacuation.get('seconds_left'))} left")
    for notice in tables(report.get("notices")):
        left = f", {seconds(notice.get('seconds_left'))} left"
        facts[f"notice {word(notice.get('source'))}"] = (word(notice.get("severity")), left)
    for row in tables(report.get("sources")):
        facts[f"source {word(row.get('name'))}"] = _health(row)
    if isinstance(report.get("store"), dict):
        facts["store"] = _health(report["store"])
    for margin in tables(report.get("margins")):
        fits = margin.get("fits")
        shown = _FITS.get(fits, "unknown") if isinstance(fits, bool) else "unknown"
        spare = "" if shown == "unknown" else f", {seconds(margin.get('spare_s'))} to spare"
        facts[f"margin {word(margin.get('source'))}"] = (shown, spare)
    trainers = sum(row.get("connected") is not False for row in tables(report.get("trainers")))
    facts["trainers"] = (f"{trainers} connected", "")
    if isinstance(report.get("mirror"), dict):
        facts["mirror"] = (word(report["mirror"].get("state")), "")
    return facts | _problems(report)


def _problems(report: dict[str, Any]) -> Facts:
    """The rows that only a problem has; the first words of such a row name it."""
    found: Facts = {}
    for row in rows(report):
        if row.label in ("problem", "failed saves", "decision faults"):
            name = f"{row.label} {len(found) + 1}" if row.label in found else row.label
            found[name] = ("yes", f": {row.text}")
    return found


def _health(row: dict[str, Any]) -> tuple[str, str]:
    return word(row.get("health")), f": {word(row.get('reason'))}"


def changes(before: Facts, now: Facts) -> Iterator[str]:
    """A line for each fact that is new, different or over."""
    for name, (words, figures) in now.items():
        if name not in before or before[name][0] != words:
            yield f"{name}: {words}{figures}"
    for name in before:
        if name not in now:
            yield f"{name}: none"


class ChangeLog:
    """Prints the changes on standard output, with the time in UTC."""

    def __init__(self) -> None:
        self._facts: Facts = {}

    def take(self, poll: Poll) -> None:
        """Print a line for each change since the poll before."""
        if poll.report is None:
            facts = self._facts | {"daemon": ("away", f": {poll.reason}")}
        else:
            facts = facts_of(poll.report)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(poll.at_wall_s))
        for line in changes(self._facts, facts):
            print(f"{at} {line}", flush=True)
        self._facts = facts

    def draw(self) -> None:
        """Nothing changes between two polls."""

    def suspended(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass
