# SPDX-License-Identifier: Apache-2.0
"""What a check is, what it finds, and how checks are run: one after the other, each bounded and isolated."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

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
    mend: str = ""
    """The command that mends it."""


def ok(found: str) -> Judgement:
    return Judgement(Level.OK, found)


def warning(found: str, mend: str) -> Judgement:
    return Judgement(Level.WARNING, found, mend)


def failure(found: str, mend: str) -> Judgement:
    return Judgement(Level.FAILURE, found, mend)


def skipped(found: str) -> Judgement:
    return Judgement(Level.SKIPPED, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A judgement, and the check that it comes from."""

    family: str
    name: str
    level: Level
    found: str
    mend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question to the installation."""

    family: str
    name: str
    """Unique among all checks."""
    ask: Callable[[], Judgement]
    """May block and may raise: a SwansongError says what is wrong, anything else is a fault of ours."""
    mend: str = ""
    """The command for an error that names none."""
    needs: str = ""
    """Name of an earlier check without whose success this one would only repeat its failure."""
    limit_s: float = 10.0

    def says(self, judgement: Judgement) -> Finding:
        return Finding(
            family=self.family,
            name=self.name,
            level=judgement.level,
            found=judgement.found,
            mend=judgement.mend,
        )


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """Run the checks in order; each gives exactly one finding, whatever happens in it."""
    without: set[str] = set()
    for check in checks:
        if check.needs in without:
            judgement = skipped(f"not looked at, for want of {check.needs}")
        else:
            judgement = _bounded(check)
        if judgement.level in (Level.FAILURE, Level.SKIPPED):
            without.add(check.name)
        yield check.says(judgement)


def has_failure(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.FAILURE for finding in findings)


def of_error(error: Exception, mend: str) -> Judgement:
    """The failure that an error is; a command between backticks in its words becomes the mending one."""
    words = str(error)
    command = _COMMAND.search(words)
    if command:
        words = words[: command.start()].removesuffix("; mend it with ").rstrip(" ,;:")
        return failure(words, command[1])
    hint = error.hint if isinstance(error, SwansongError) else ""
    return failure(f"{words}. {hint}" if hint else words, mend)


def _bounded(check: Check) -> Judgement:
    # A daemon thread: one that hangs is left behind, and does not keep the process from ending.
    said: queue.SimpleQueue[Judgement] = queue.SimpleQueue()

    def work() -> None:
        try:
            judgement = check.ask()
        except SwansongError as error:
            judgement = of_error(error, check.mend)
        except Exception as error:
            judgement = failure(f"the check broke: {type(error).__name__}: {error}", check.mend)
        said.put(judgement)

    threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True).start()
    try:
        return said.get(timeout=check.limit_s)
    except queue.Empty:
        return failure(f"no answer within {check.limit_s:g} s", check.mend)
