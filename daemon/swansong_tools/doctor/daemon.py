# SPDX-License-Identifier: Apache-2.0
"""Checks of the daemon: whether it runs, its configuration and version, its store, its trainers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from swansong_bucket.errors import ConfigError, FencedError, Unreachable
from swansong_bucket.model import Health
from swansongd import __version__
from swansongd.config.config import Config
from swansongd.observe.status import DaemonStatus, HealthStatus

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Check, Judgement, Level, failure, ok, skipped, warning
from swansong_tools.doctor.sandbox import properties

FAMILY = "daemon"


@dataclass(frozen=True, slots=True)
class DaemonAnswer:
    """The answer of the daemon on a socket."""

    status: DaemonStatus
    uid: int
    """The user that listens on the socket."""


AskDaemon = Callable[[Path], DaemonAnswer]

_CAUSES = (
    "users", "trainer users", "permissions", "unit file", "sandbox", "as the daemon",
    "signing key", "staging", "staging rights", "socket directory",
)  # fmt: skip
"""Checks whose failure prevents the daemon from running."""
_PROPERTIES = (
    "LoadState", "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus", "NRestarts",
    "MemoryMax", "NeedDaemonReload",
)  # fmt: skip
_SETTLE_S = 8.0
"""Time limit of the daemon's start, and of its first report about the store."""
_POLL_S = 0.1
_RECENT_S = 600.0
"""Refusals older than this are over: the hooks of a refused process retry continuously."""


def checks(
    config: Config,
    path: Path,
    ask: AskDaemon,
    *,
    by_systemd: bool,
) -> Iterator[Check]:
    """The checks of the daemon, in order of their dependencies.

    Args:
        path: configuration file.
        ask: returns the answer of the daemon on a socket; raises Unreachable.
        by_systemd: whether systemd manages the daemon.
    """
    socket = config.trainer.socket

    def check(name: str, judge: Callable[[], Judgement], *needs: str) -> Check:
        limit_s = 3 * _SETTLE_S  # two waits and a request
        return Check(
            family=FAMILY,
            name=name,
            judge=judge,
            needs=needs,
            fix=fixes.log("-n 30"),
            limit_s=limit_s,
        )

    yield check("daemon", lambda: _runs(config, path, ask, by_systemd=by_systemd), *_CAUSES)
    yield check(
        "running configuration",
        lambda: _is_current(path, ask(socket).status, by_systemd=by_systemd),
        "daemon",
    )
    yield check(
        "version",
        lambda: judge_version(ask(socket).status.version, __version__, fixes.start(path)),
        "daemon",
    )
    probes = ("network", "credentials", "bucket", "write", "create-if-absent", "read back")
    yield check("store health", lambda: _store(config, path, ask), "daemon", *probes)
    yield check("ranks", lambda: judge_ranks(ask(socket).status), "daemon")


# ------------------------------------------------------------ whether it runs


def _runs(config: Config, path: Path, ask: AskDaemon, *, by_systemd: bool) -> Judgement:
    socket = config.trainer.socket
    restarts = 0
    if by_systemd:
        deadline_mono_s = time.monotonic() + _SETTLE_S
        facts = properties(fixes.unit().name, _PROPERTIES)
        while facts.get("ActiveState") in ("activating", "reloading", "deactivating"):
            if time.monotonic() > deadline_mono_s:
                break
            time.sleep(_POLL_S)
            facts = properties(fixes.unit().name, _PROPERTIES)
        if facts.get("ActiveState") != "active":
            claim = config.staging.path / config.run.name / ".swansongd" / "claim.json"
            return judge_down(facts, claim)
        restarts = int(facts.get("NRestarts") or 0)
    try:
        status = ask(socket).status
    except Unreachable as error:
        return failure(str(error), fixes.start(path))
    blind = [source.name for source in status.sources if source.health is Health.BLIND]
    if restarts and status.uptime_s < _SETTLE_S and _restarts_again(restarts):
        return failure(
            f"the daemon restarts repeatedly: {restarts} restarts so far", fixes.log("-n 30")
        )
    words = f"answers: run {status.run}, state {status.state}"
    if blind:
        return warning(f"{words}; blind sources: {', '.join(blind)}", "swansong status")
    return ok(words)


def _restarts_again(restarts: int) -> bool:
    """Whether a daemon that has just started exits again within the next seconds."""
    deadline_mono_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline_mono_s:
        facts = properties(fixes.unit().name, _PROPERTIES)
        if facts.get("ActiveState") != "active" or facts.get("NRestarts") != str(restarts):
            return True
        time.sleep(_POLL_S)
    return False


def judge_down(facts: Mapping[str, str], claim: Path) -> Judgement:
    """The reason why the daemon does not run, from systemd's record of its last exit.

    Args:
        facts: properties from ``systemctl show``.
        claim: file with this VM's claim.
    """
    restarts = facts.get("NRestarts", "0")
    again = f", {restarts} restarts so far" if restarts not in ("", "0") else ""
    result, code = facts.get("Result", ""), facts.get("ExecMainStatus", "")
    if facts.get("LoadState") == "masked":
        unit = fixes.unit().name
        unmask = [fixes.as_root(f"systemctl unmask {each}{unit}") for each in ("", "--runtime ")]
        return failure(
            f"{unit} is masked: systemd cannot start it", fixes.then(*unmask, fixes.restart())
        )
    if result == "oom-kill":
        return failure(
            f"the kernel killed the daemon: out of memory (MemoryMax={facts.get('MemoryMax')}){again}",
            fixes.more_memory(),
        )
    if result in ("", "success"):
        state = facts.get("ActiveState", "unknown")
        return failure(f"the daemon does not run ({state})", fixes.restart())
    is_exit = facts.get("ExecMainCode") == "1"  # CLD_EXITED
    if is_exit and code == str(ConfigError.exit_code):
        # The configuration is valid by now, else this check would have been skipped.
        return failure("the daemon exited with an invalid configuration", fixes.restart())
    if is_exit and code == str(FencedError.exit_code):
        # A comment, which does nothing when pasted: the operator decides.
        remove = fixes.as_root(f"rm -f {fixes.quoted(claim)}")
        return failure(
            "a newer generation owns the run: another VM has taken the run over",
            f"# only if no other VM runs it: {fixes.then(remove, fixes.restart())}",
        )
    how = f"status {code}" if is_exit else f"signal {code}"
    return failure(f"the daemon exits repeatedly: {result}, {how}{again}", fixes.log("-n 30"))


# ------------------------------------------------------------ configuration and version


def _is_current(path: Path, status: DaemonStatus, *, by_systemd: bool) -> Judgement:
    started_wall_s = time.time() - status.uptime_s
    if path.stat().st_mtime > started_wall_s + 1.0:
        return warning(
            f"{path} was changed after the daemon started; the daemon still uses the old configuration",
            fixes.restart() or f"kill {status.pid}; {fixes.start(path)}",
        )
    if by_systemd and properties(fixes.unit().name, _PROPERTIES).get("NeedDaemonReload") == "yes":
        return warning(
            "the unit was changed; systemd still uses the old one",
            fixes.then(fixes.as_root("systemctl daemon-reload"), fixes.restart()),
        )
    return ok(f"the daemon uses the current {path}")


def judge_version(running: str, installed: str, fix: str) -> Judgement:
    """Whether the daemon runs the installed version; an upgrade requires a restart."""
    if running == installed:
        return ok(f"the daemon runs the installed version, {installed}")
    return warning(
        f"the daemon runs version {running!s:.100}, but version {installed} is installed",
        fix,
    )


# ------------------------------------------------------------ store and ranks


def _store(config: Config, path: Path, ask: AskDaemon) -> Judgement:
    # The store may have been fixed a moment ago: wait until the daemon reaches it again.
    deadline_mono_s = time.monotonic() + _SETTLE_S
    while True:
        found = judge_store(ask(config.trainer.socket).status.store, fixes.start(path))
        if (found and found.level is Level.OK) or time.monotonic() > deadline_mono_s:
            break
        time.sleep(_POLL_S)
    return found or failure("the daemon has not reached its store yet", fixes.start(path))


def judge_store(store: HealthStatus | None, fix: str) -> Judgement | None:
    """Whether the daemon reaches its store; None before the daemon's first request.

    The checks of the store have passed before this one, so a failure here requires a restart.
    """
    if store is None:
        return None
    words = f"{store.health}, {store.reason}, for {store.for_s} s"
    if store.health is Health.OK:
        return ok(f"the daemon reaches its store: {words}")
    return failure(f"doctor reaches the store, but the running daemon does not: {words}", fix)


def judge_ranks(status: DaemonStatus) -> Judgement:
    """Whether the daemon recently refused processes because their rank was taken."""
    refused = status.trainers_refused
    if refused.age_s is not None and refused.age_s < _RECENT_S:
        return warning(
            f"the daemon refused {refused.count} connections: {refused.last}",
            "# start the processes of a job with torchrun; run one daemon per job",
        )
    connected = sum(trainer.connected for trainer in status.trainers)
    if not connected:
        return skipped("no trainer is connected")
    return ok(f"{connected} trainers, all with different ranks")
