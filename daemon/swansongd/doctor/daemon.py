# SPDX-License-Identifier: Apache-2.0
"""Checks of the daemon itself: does it run, and if not, why; what it runs with, and finds of its store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from swansongd import __version__
from swansongd.config.config import Config
from swansongd.doctor import fixes
from swansongd.doctor.findings import Check, Judgement, Level, failure, ok, skipped, warning
from swansongd.doctor.sandbox import properties
from swansongd.errors import ConfigError, FencedError, Unreachable

FAMILY = "daemon"

AskDaemon = Callable[[Path], dict[str, Any]]

_CAUSES = (
    "users", "trainer users", "permissions", "unit file", "sandbox", "as the daemon",
    "signing key", "staging", "staging rights", "socket directory",
)  # fmt: skip
"""Checks whose failure keeps the daemon down."""
_PROPERTIES = (
    "LoadState", "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus", "NRestarts",
    "MemoryMax", "NeedDaemonReload",
)  # fmt: skip
_LOOK = "journalctl -u swansongd -n 30 -o cat"
_SETTLE_S = 8.0
"""The time that a daemon has for its start, and then for its first word of the store."""
_POLL_S = 0.1
_RECENT_S = 600.0
"""A process that was refused longer ago than this does not try any more: the hooks retry all the time."""


def checks(
    config: Config,
    path: Path,
    ask_daemon: AskDaemon,
    *,
    by_systemd: bool,
) -> Iterator[Check]:
    """All of them, in the order in which they need one another.

    Args:
        path: of the configuration.
        ask_daemon: the report of the daemon on a socket; raises Unreachable.
        by_systemd: systemd has the daemon's unit.
    """
    socket = config.trainer.socket

    def check(name: str, ask: Callable[[], Judgement], *needs: str) -> Check:
        limit_s = 3 * _SETTLE_S  # two waits, and an answer
        return Check(family=FAMILY, name=name, ask=ask, needs=needs, fix=_LOOK, limit_s=limit_s)

    yield check("daemon", lambda: _runs(config, path, ask_daemon, by_systemd=by_systemd), *_CAUSES)
    yield check(
        "running configuration",
        lambda: _is_current(path, ask_daemon(socket), by_systemd=by_systemd),
        "daemon",
    )
    yield check(
        "version",
        lambda: judge_version(ask_daemon(socket).get("version"), __version__, fixes.start(path)),
        "daemon",
    )
    probes = ("network", "credentials", "bucket", "write", "create-if-absent", "read back")
    yield check("store health", lambda: _store(config, path, ask_daemon), "daemon", *probes)
    yield check("ranks", lambda: judge_ranks(ask_daemon(socket)), "daemon")


# ------------------------------------------------------------ does it run


def _runs(config: Config, path: Path, ask_daemon: AskDaemon, *, by_systemd: bool) -> Judgement:
    socket = config.trainer.socket
    restarts = 0
    if by_systemd:
        give_up_mono_s = time.monotonic() + _SETTLE_S
        facts = properties(fixes.DAEMON, _PROPERTIES)
        while facts.get("ActiveState") in ("activating", "reloading", "deactivating"):
            if time.monotonic() > give_up_mono_s:
                break
            time.sleep(_POLL_S)
            facts = properties(fixes.DAEMON, _PROPERTIES)
        if facts.get("ActiveState") != "active":
            claim = config.staging.path / config.run.name / ".swansongd" / "claim.json"
            return judge_down(facts, claim)
        restarts = int(facts.get("NRestarts") or 0)
    try:
        report = ask_daemon(socket)
    except Unreachable as error:
        return failure(str(error), fixes.start(path))
    blind = [
        str(source.get("name"))
        for source in report.get("sources") or []
        if source.get("health") == "blind"
    ]
    if restarts and float(report.get("uptime_s", 0.0)) < _SETTLE_S and _falls(restarts):
        found = f"the daemon ends again and again: {restarts} restarts, one more just now"
        return failure(found, _LOOK)
    words = f"answers: run {report.get('run')}, state {report.get('state')}"
    if blind:
        return warning(f"{words}, but is blind to {', '.join(blind)}", "swansong status")
    return ok(words)


def _falls(restarts: int) -> bool:
    """Whether a daemon that has just been started ends once more, while it is watched."""
    give_up_mono_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < give_up_mono_s:
        facts = properties(fixes.DAEMON, _PROPERTIES)
        if facts.get("ActiveState") != "active" or facts.get("NRestarts") != str(restarts):
            return True
        time.sleep(_POLL_S)
    return False


def judge_down(facts: Mapping[str, str], claim: Path) -> Judgement:
    """Why the daemon does not run, by what systemd knows of its last end.

    Args:
        facts: of ``systemctl show``.
        claim: the file in which this VM records its claim.
    """
    restarts = facts.get("NRestarts", "0")
    again = f", {restarts} restarts so far" if restarts not in ("", "0") else ""
    result, code = facts.get("Result", ""), facts.get("ExecMainStatus", "")
    if facts.get("LoadState") == "masked":
        unmask = "systemctl unmask swansongd.service && sudo systemctl unmask --runtime"
        return failure(
            "swansongd.service is masked: systemd never starts it",
            fixes.then(fixes.as_root(f"{unmask} swansongd.service"), fixes.restart()),
        )
    if result == "oom-kill":
        return failure(
            f"the kernel kills the daemon for want of memory (MemoryMax={facts.get('MemoryMax')}){again}",
            fixes.more_memory(),
        )
    if result in ("", "success"):
        state = facts.get("ActiveState", "not known")
        return failure(f"the daemon does not run ({state})", fixes.restart())
    is_exit = facts.get("ExecMainCode") == "1"  # CLD_EXITED
    if is_exit and code == str(ConfigError.exit_code):
        # The configuration is in order by now, or this check would not have been made.
        return failure(
            "the daemon refused its configuration and was not started again", fixes.restart()
        )
    if is_exit and code == str(FencedError.exit_code):
        # The decision is the operator's: a comment, which does nothing when pasted.
        remove = fixes.as_root(f"rm -f {fixes.quoted(claim)}")
        return failure(
            "a newer generation owns the run: another VM has taken it over",
            f"# only when no other VM runs it: {fixes.then(remove, fixes.restart())}",
        )
    how = f"status {code}" if is_exit else f"signal {code}"
    return failure(f"the daemon ends again and again: {result}, {how}{again}", _LOOK)


# ------------------------------------------------------------ what it runs with


def _is_current(path: Path, report: Mapping[str, Any], *, by_systemd: bool) -> Judgement:
    started_wall_s = time.time() - float(report.get("uptime_s", 0.0))
    if path.stat().st_mtime > started_wall_s + 1.0:
        return warning(
            f"{path} was changed after the daemon had started, which goes by the old one",
            fixes.restart() or f"kill {int(report['pid'])}; {fixes.start(path)}",
        )
    if by_systemd and properties(fixes.DAEMON, _PROPERTIES).get("NeedDaemonReload") == "yes":
        return warning(
            "the unit was changed, and systemd goes by the old one",
            fixes.then(fixes.as_root("systemctl daemon-reload"), fixes.restart()),
        )
    return ok(f"the daemon goes by {path} as it is")


def judge_version(running: object, installed: str, fix: str) -> Judgement:
    """Whether the daemon runs the program that is installed: an upgrade takes a restart."""
    if running == installed:
        return ok(f"the daemon runs the installed version, {installed}")
    return warning(
        f"the daemon runs version {running!s:.100}, and version {installed} is installed",
        fix,
    )


# ------------------------------------------------------------ what it finds


def _store(config: Config, path: Path, ask_daemon: AskDaemon) -> Judgement:
    # It may have lost its store a moment ago, together with what was fixed since.
    give_up_mono_s = time.monotonic() + _SETTLE_S
    while True:
        found = judge_store(ask_daemon(config.trainer.socket).get("store"), fixes.start(path))
        if (found and found.level is Level.OK) or time.monotonic() > give_up_mono_s:
            break
        time.sleep(_POLL_S)
    return found or failure("the daemon has not reached its store yet", fixes.start(path))


def judge_store(health: Mapping[str, Any] | None, fix: str) -> Judgement | None:
    """What the daemon finds of its store; None before its first answer.

    It is asked only when the store itself is in order: what the daemon lacks then is a restart.
    """
    if health is None:
        return None
    words = f"{health.get('health')}, {health.get('reason')}, for {health.get('for_s')} s"
    if health.get("health") == "ok":
        return ok(f"the daemon reaches its store: {words}")
    return failure(f"the store is in order, but not for the daemon that runs: {words}", fix)


def judge_ranks(report: Mapping[str, Any]) -> Judgement:
    """Whether processes were refused a moment ago because another one has their rank."""
    refused = report.get("trainers_refused") or {}
    if refused.get("count") and float(refused.get("age_s") or 0.0) < _RECENT_S:
        return warning(
            f"{refused['count']} times a process was refused: {refused.get('last')}",
            "# start the processes of one job with torchrun; give each job a daemon of its own",
        )
    connected = [each for each in report.get("trainers") or [] if each.get("connected")]
    if not connected:
        return skipped("no trainer is connected")
    return ok(f"{len(connected)} trainers, each with a rank of its own")
