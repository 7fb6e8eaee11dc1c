# SPDX-License-Identifier: Apache-2.0
"""Checks and findings, and the loop that runs checks one after the other, each with a time limit."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from swansong_bucket.errors import StoreError, SwansongError

from swansong_tools.doctor import fixes
from swansong_tools.doctor.installation import Installation

_POLL_S = 0.2
_COMMAND = re.compile(r"`([^`]+)`")
_OFFERED = re.compile(r"; fix it with `([^`]+)`")


class Level(StrEnum):
    OK = "ok"
    """Works."""
    WARNING = "warning"
    """Works now, and will cause trouble later."""
    FAILURE = "failure"
    """Checkpoints would be lost, or the image must not be used."""
    SKIPPED = "skipped"
    """Could not be checked, does not apply here, or depends on a check that did not succeed."""


class Judgement(NamedTuple):
    """The result of a check."""

    level: Level
    found: str
    """Description of the observation, with numbers."""
    fix: str = ""
    """The command that fixes it."""


def ok(found: str) -> Judgement:
    return Judgement(Level.OK, found)


def warning(found: str, fix: str) -> Judgement:
    return Judgement(Level.WARNING, found, fix)


def failure(found: str, fix: str) -> Judgement:
    return Judgement(Level.FAILURE, found, fix)


def skipped(found: str) -> Judgement:
    return Judgement(Level.SKIPPED, found)


@dataclass(frozen=True, slots=True)
class Finding:
    """The judgement of a check, with the name of the check."""

    family: str
    name: str
    level: Level
    found: str
    fix: str


Probe = Callable[[Installation], Judgement]


@dataclass(frozen=True, slots=True)
class Check:
    """One check of an installation."""

    family: str
    name: str
    """Unique among all checks."""
    shows: str
    """The subject of the check, for the reference page."""
    probe: Probe
    """May block and may raise: a SwansongError is a finding, any other exception a bug of doctor."""
    needs: tuple[str, ...] = ()
    """Names of earlier checks.  If one of them does not succeed, this check is skipped."""
    fix: Callable[[Installation], str] = lambda _: ""
    """The fix for an error that names no command."""
    applies: Callable[[Installation], object] = lambda _: True
    """Whether the installation has the thing that this check examines."""
    limit_s: float = 30.0
    settle_s: float = 0.0
    """Time in which a failure is probed again, because its fix may still take effect."""

    def finding(self, judgement: Judgement) -> Finding:
        return Finding(self.family, self.name, *judgement)


class Examination:
    """Runs checks in order, and skips a check if one that it needs did not succeed."""

    def __init__(self, vm: Installation) -> None:
        self._vm = vm
        self._unsuccessful: set[str] = set()

    def run(self, checks: Iterable[Check]) -> Iterator[Finding]:
        """Yield exactly one finding for each check that applies."""
        for check in checks:
            if not _applies(check, self._vm):
                continue
            if lacking := self.lacking(check.needs):
                judgement = skipped(f"depends on a check that did not succeed: {lacking}")
            else:
                judgement = _bounded(check, self._vm)
            yield self.note(check.finding(judgement))

    def lacking(self, needs: Iterable[str]) -> str:
        """The first of these checks that ran without success; empty if there is none."""
        return next((name for name in needs if name in self._unsuccessful), "")

    def note(self, finding: Finding) -> Finding:
        """Record a finding, so that later checks may need its check."""
        if finding.level in (Level.FAILURE, Level.SKIPPED):
            self._unsuccessful.add(finding.name)
        return finding


def examine(vm: Installation, checks: Iterable[Check]) -> Iterator[Finding]:
    """Run the checks that apply in order, one finding each."""
    return Examination(vm).run(checks)


def has_failure(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.FAILURE for finding in findings)


def of_error(error: Exception, fix: str) -> Judgement:
    """Turn an error into a failure.  A command between backticks in its hint replaces ``fix``.

    The text of an error of the store contains the store's own words, and so never a command.
    """
    words, hint = str(error), error.hint if isinstance(error, SwansongError) else ""
    offered = None if isinstance(error, StoreError) else _OFFERED.search(words)
    if offered:
        words = words[: offered.start()]
    command = offered or _COMMAND.search(hint)
    if command:
        is_of_the_cloud = command[1].startswith(("aws ", "gcloud ", "az "))
        return failure(words, command[1] if is_of_the_cloud else fixes.as_root(command[1]))
    return failure(f"{words.removesuffix('.')}. {hint}" if hint else words, fix)


def _applies(check: Check, vm: Installation) -> bool:
    """Whether the check applies; also if that cannot be said, because its probe then says why."""
    try:
        return bool(check.applies(vm))
    except Exception:
        return True


def _fix(check: Check, vm: Installation) -> str:
    """The fix of the check; empty if it cannot be made: the finding matters more."""
    try:
        return check.fix(vm)
    except Exception:
        return ""


def _bounded(check: Check, vm: Installation) -> Judgement:
    # A daemon thread: a check that hangs is abandoned and does not prevent the process from exiting.
    judgements: queue.SimpleQueue[Judgement] = queue.SimpleQueue()
    settled_mono_s = time.monotonic() + check.settle_s

    def work() -> None:
        try:
            judgement = check.probe(vm)
            while judgement.level is Level.FAILURE and time.monotonic() < settled_mono_s:
                time.sleep(_POLL_S)
                judgement = check.probe(vm)
        except SwansongError as error:
            judgement = of_error(error, _fix(check, vm))
        except Exception as error:
            judgement = failure(
                f"the check crashed: {type(error).__name__}: {error}", _fix(check, vm)
            )
        judgements.put(judgement)

    threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True).start()
    try:
        return judgements.get(timeout=check.limit_s)
    except queue.Empty:
        return failure(f"timed out after {check.limit_s:g} s", _fix(check, vm))
