# SPDX-License-Identifier: Apache-2.0
"""Checks and findings, and the loop that runs checks one after the other, each with a time limit."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from swansong_bucket.errors import SwansongError

from swansong_tools.doctor import fixes

FAMILIES = {
    "configuration": "every problem of the file; the cloud against the firmware; variables in the "
    "daemon's environment that would redirect metadata requests",
    "host": "packages, polkit, users, unit file and its syntax, file permissions (where the unit "
    "is installed); logind's delay and the drop-in that sets it; the unit's timeouts; the sandbox "
    "lets the daemon write to staging and to a `file://` store",
    "network": "the names of store and metadata service resolve, and a route exists",
    "metadata": "the token (a hop limit that is too low has its own message) or the flavor "
    "header; every watched path; the clock",
    "store": "signing key; disk and space of a `file://` store; credentials; clock; the rehearsal "
    "of a checkpoint; lifecycle rules, versioning, object lock, bucket policy (see "
    'docs/operations/stores.md), or "unknown" without the right to read them and on Azure; the '
    "mirror can be listed and written, and honours create-if-absent",
    "staging": "exists, writable for the daemon's user, not replaceable by others, one file "
    "system, space for two checkpoints, speed of 64 MiB",
    "trainers": "`trainer.users` exist and reach the socket, by their groups or by "
    "`SupplementaryGroups=` of a unit; the process for `trainer.signal` catches it; no "
    "unconnected process holds a GPU",
    "daemon": "it runs, and if not, why; it was started with the current configuration and unit; "
    "it reaches its store; no two connected trainers have one rank",
    "metrics": "the daemon serves `metrics.listen`, or the address is free and local; otherwise "
    "the process that has it, with its user; the directory of `metrics.textfile` is writable",
    "notify": "the secret files of `[notify]` are private, addresses resolve, the template "
    "becomes JSON, the program can run; sends something only with `--send-notification`",
    "image": "only with `--image`: no credential in any home, in `/etc/swansong` or in drop-ins; "
    "no machine id",
}
"""The scope of each family of checks."""
_COMMAND = re.compile(r"`([^`]+)`")


class Level(StrEnum):
    OK = "ok"
    """Works."""
    WARNING = "warning"
    """Works now, and will cause trouble later."""
    FAILURE = "failure"
    """Checkpoints would be lost, or the image must not be used."""
    SKIPPED = "skipped"
    """Could not be checked, does not apply here, or depends on a check that did not succeed."""


@dataclass(frozen=True, slots=True)
class Judgement:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The judgement of a check, with the name of the check."""

    family: str
    name: str
    level: Level
    found: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of the installation."""

    family: str
    name: str
    """Unique among all checks."""
    judge: Callable[[], Judgement]
    """May block and may raise: a SwansongError is a finding, any other exception a bug of doctor."""
    fix: str = ""
    """The fix for an error that names no command."""
    needs: str | tuple[str, ...] = ()
    """Names of earlier checks.  If one of them does not succeed, this check is skipped."""
    limit_s: float = 10.0

    def __post_init__(self) -> None:
        assert self.family in FAMILIES, self.family

    def finding(self, judgement: Judgement) -> Finding:
        return Finding(
            family=self.family,
            name=self.name,
            level=judgement.level,
            found=judgement.found,
            fix=judgement.fix,
        )


class Examination:
    """Runs checks in order, and skips a check if one that it needs did not succeed."""

    def __init__(self) -> None:
        self._unsuccessful: set[str] = set()

    def run(self, checks: Iterable[Check]) -> Iterator[Finding]:
        """Yield exactly one finding per check."""
        for check in checks:
            needs = (check.needs,) if isinstance(check.needs, str) else check.needs
            if lacking := self.lacking(needs):
                judgement = skipped(f"depends on a check that did not succeed: {lacking}")
            else:
                judgement = _bounded(check)
            yield self.note(check.finding(judgement))

    def lacking(self, needs: Iterable[str]) -> str:
        """The first of these checks that ran without success; empty if there is none."""
        return next((name for name in needs if name in self._unsuccessful), "")

    def note(self, finding: Finding) -> Finding:
        """Record a finding, so that later checks may need its check."""
        if finding.level in (Level.FAILURE, Level.SKIPPED):
            self._unsuccessful.add(finding.name)
        return finding


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """Run the checks in order, one finding each."""
    return Examination().run(checks)


def has_failure(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.FAILURE for finding in findings)


def of_error(error: Exception, fix: str) -> Judgement:
    """Turn an error into a failure.  A command between backticks in its text replaces ``fix``."""
    words, hint = str(error), error.hint if isinstance(error, SwansongError) else ""
    command = _COMMAND.search(words) or _COMMAND.search(hint)
    if command:
        if command.string == words:
            words = words[: command.start()].removesuffix("; fix it with ").rstrip(" ,;:")
        is_of_the_cloud = command[1].startswith(("aws ", "gcloud ", "az "))
        return failure(words, command[1] if is_of_the_cloud else fixes.as_root(command[1]))
    return failure(f"{words.removesuffix('.')}. {hint}" if hint else words, fix)


def _bounded(check: Check) -> Judgement:
    # A daemon thread: a check that hangs is abandoned and does not prevent the process from exiting.
    judgements: queue.SimpleQueue[Judgement] = queue.SimpleQueue()

    def work() -> None:
        try:
            judgement = check.judge()
        except SwansongError as error:
            judgement = of_error(error, check.fix)
        except Exception as error:
            judgement = failure(f"the check crashed: {type(error).__name__}: {error}", check.fix)
        judgements.put(judgement)

    threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True).start()
    try:
        return judgements.get(timeout=check.limit_s)
    except queue.Empty:
        return failure(f"timed out after {check.limit_s:g} s", check.fix)
