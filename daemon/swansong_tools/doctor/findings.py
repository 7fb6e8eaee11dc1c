# SPDX-License-Identifier: Apache-2.0
"""Checks and findings: how a check is declared, and the loop that runs checks, each with a time limit."""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypedDict, Unpack

from swansong_bucket.errors import SwansongError

from swansong_tools.doctor import fixes
from swansong_tools.doctor.installation import Installation

_POLL_S = 0.2


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

    name: str
    """Unique among all checks."""
    probe: Probe
    """May block and may raise: a SwansongError is a finding, any other exception a bug of doctor."""
    family: str
    needs: tuple[str, ...] = ()
    """Names of earlier checks.  If one of them does not succeed, this check is skipped."""
    fix: Callable[[Installation], str] = lambda _: ""
    """The fix for an error, or a failure, that names no command."""
    applies: Callable[[Installation], object] = lambda _: True
    """Whether the installation has the thing that this check examines."""
    limit_s: float = 30.0
    settle_s: float = 0.0
    """Time in which a failure is probed again, because its fix may still take effect."""

    @property
    def shows(self) -> str:
        """The subject of the check, for the reference page: the summary of the probe's docstring."""
        summary, _, _ = inspect.cleandoc(self.probe.__doc__ or "").partition("\n\n")
        return " ".join(summary.split())

    def finding(self, judgement: Judgement) -> Finding:
        return Finding(self.family, self.name, *judgement)


class CheckFields(TypedDict, total=False):
    """The fields of a check that its declaration may set."""

    family: str
    needs: tuple[str, ...]
    fix: Callable[[Installation], str]
    applies: Callable[[Installation], object]
    limit_s: float
    settle_s: float


class Checklist(list[Check]):
    """Checks in the order in which they run, each declared at its probe.

    Args:
        common: fields of each check that its declaration does not set.
    """

    def __init__(self, **common: Unpack[CheckFields]) -> None:
        super().__init__()
        self._common = dict[str, Any](common)

    def add(self, name: str, **fields: Unpack[CheckFields]) -> Callable[[Probe], Probe]:
        """Declare the decorated probe as a check; the summary of its docstring describes the check."""

        def declare(probe: Probe) -> Probe:
            self.append(Check(name, probe, **{**self._common, **fields}))
            return probe

        return declare


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


def of_error(error: SwansongError | OSError, fix: str) -> Judgement:
    """Turn an error into a failure.  Its command replaces ``fix``; without both, its hint is the fix."""
    if not isinstance(error, SwansongError):
        return failure(str(error), fix)
    if error.command:
        is_of_the_cloud = error.command.startswith(("aws ", "gcloud ", "az "))
        return failure(
            str(error), error.command if is_of_the_cloud else fixes.as_root(error.command)
        )
    if error.hint and not fix:
        return failure(str(error), f"# {error.hint}")
    return failure(error.line(), fix)


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
            judgement = failure(f"the check crashed: {type(error).__name__}: {error}", "")
        if judgement.level in (Level.FAILURE, Level.WARNING) and not judgement.fix:
            judgement = judgement._replace(fix=_fix(check, vm))
        judgements.put(judgement)

    threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True).start()
    try:
        return judgements.get(timeout=check.limit_s)
    except queue.Empty:
        return failure(f"timed out after {check.limit_s:g} s", _fix(check, vm))
