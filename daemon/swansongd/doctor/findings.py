# SPDX-License-Identifier: Apache-2.0
"""What a check is, what it finds, and how checks are run: one after the other, each bounded and isolated."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from swansongd.doctor import fixes
from swansongd.errors import SwansongError

_COMMAND = re.compile(r"`([^`]+)`")


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """Works, and will disappoint some day."""
    FAILURE = "failure"
    """Checkpoints would be lost."""
    SKIPPED = "skipped"
    """Could not be looked at, or does not apply here."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a check says of what it found."""

    level: Level
    found: str
    """In words, with numbers."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A judgement, and the check that it comes from."""

    family: str
    name: str
    level: Level
    found: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question to the installation."""

    family: str
    name: str
    """Unique among all checks."""
    ask: Callable[[], Judgement]
    """May block and may raise: a SwansongError says what is wrong, anything else is a fault of ours."""
    fix: str = ""
    """The command for an error that names none."""
    needs: str | tuple[str, ...] = ()
    """Names of earlier checks without whose success this one would only repeat their failure."""
    limit_s: float = 10.0

    def says(self, judgement: Judgement) -> Finding:
        return Finding(
            family=self.family,
            name=self.name,
            level=judgement.level,
            found=judgement.found,
            fix=judgement.fix,
        )


class Examination:
    """Runs checks in order; a check that needs one without success is skipped as its consequence."""

    def __init__(self) -> None:
        self._without: set[str] = set()

    def run(self, checks: Iterable[Check]) -> Iterator[Finding]:
        """One finding for each check, whatever happens in it."""
        for check in checks:
            needs = (check.needs,) if isinstance(check.needs, str) else check.needs
            if lacking := self.lacking(needs):
                judgement = skipped(f"not looked at, for want of {lacking}")
            else:
                judgement = _bounded(check)
            yield self.note(check.says(judgement))

    def lacking(self, needs: Iterable[str]) -> str:
        """The first of these checks that had no success; empty if all had, or were not made."""
        return next((name for name in needs if name in self._without), "")

    def note(self, finding: Finding) -> Finding:
        """A finding from elsewhere, which checks of here may need."""
        if finding.level in (Level.FAILURE, Level.SKIPPED):
            self._without.add(finding.name)
        return finding


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """One finding for each check, in order."""
    return Examination().run(checks)


def has_failure(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.FAILURE for finding in findings)


def of_error(error: Exception, fix: str) -> Judgement:
    """The failure that an error is; a command between backticks in its words becomes the mending one."""
    words, hint = str(error), error.hint if isinstance(error, SwansongError) else ""
    command = _COMMAND.search(words) or _COMMAND.search(hint)
    if command:
        if command.string == words:
            words = words[: command.start()].removesuffix("; fix it with ").rstrip(" ,;:")
        is_of_the_cloud = command[1].startswith(("aws ", "gcloud "))
        return failure(words, command[1] if is_of_the_cloud else fixes.as_root(command[1]))
    return failure(f"{words.removesuffix('.')}. {hint}" if hint else words, fix)


def _bounded(check: Check) -> Judgement:
    # A daemon thread: one that hangs is left behind, and does not keep the process from ending.
    said: queue.SimpleQueue[Judgement] = queue.SimpleQueue()

    def work() -> None:
        try:
            judgement = check.ask()
        except SwansongError as error:
            judgement = of_error(error, check.fix)
        except Exception as error:
            judgement = failure(f"the check broke: {type(error).__name__}: {error}", check.fix)
        said.put(judgement)

    threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True).start()
    try:
        return said.get(timeout=check.limit_s)
    except queue.Empty:
        return failure(f"no answer within {check.limit_s:g} s", check.fix)
