# SPDX-License-Identifier: Apache-2.0
"""The daemon: whether it runs, its configuration and version, its store, and how trainers reach it."""

from __future__ import annotations

import os
import shlex
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from swansong.protocol import DEFAULT_SOCKET
from swansong_bucket.errors import ConfigError, FencedError, Unreachable
from swansong_bucket.model import Health
from swansongd import __version__
from swansongd.observe.status import TrainerStatus
from swansongd.trainers import peers, unconnected
from swansongd.trainers.signals import SignalRefusal, SignalSender
from swansongd.trainers.users import may_be_signalled

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Checklist, Judgement, failure, ok, skipped, warning
from swansong_tools.doctor.installation import (
    TRAINER_GROUP,
    Account,
    Installation,
    account,
    group_id,
    with_trainers,
)
from swansong_tools.doctor.sandbox import of_unit, properties
from swansong_tools.units import counted

_SHOWN = 3
"""Processes that one finding names."""

_UNIT_DIRECTORIES = tuple(
    Path(place, "systemd", "system")
    for place in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
)
SETTLE_S = 8.0
"""Time limit of the daemon's start, and of its first report about the store."""
_POLL_S = 0.1
_RECENT_S = 600.0
"""Refusals older than this are over: the hooks of a refused process retry continuously."""


def show_log(vm: Installation) -> str:
    """Show the end of the daemon's log; ``swansong run`` writes it to a file."""
    if fixes.is_of_run(vm.path):
        return f"tail -n 30 {fixes.quoted(vm.path.with_name('swansongd.log'))}"
    return fixes.log("-n 30")


_CAUSES = (
    "users", "trainer users", "permissions", "unit file", "sandbox", "as the daemon",
    "signing key", "staging", "staging rights", "socket directory",
)  # fmt: skip
"""Checks whose failure prevents the daemon from running."""
CHECKS = Checklist(family="daemon", fix=show_log)


@CHECKS.add("trainer users", family="trainers", needs=("users",))
def trainer_users(vm: Installation) -> Judgement:
    """All ``trainer.users`` exist.

    The daemon does not start otherwise.
    """
    users = vm.config.trainer.users
    # A uid needs no account.
    missing = [user for user in users if isinstance(user, str) and account(user) is None]
    if missing:
        groups = "" if group_id(TRAINER_GROUP) is None else f"--groups {TRAINER_GROUP} "
        make = [fixes.as_root(f"useradd {groups}{fixes.quoted(user)}") for user in missing]
        found = f"trainer.users: no such user: {', '.join(missing)}"
        return failure(found, fixes.then(*make, fixes.restart()))
    if not users:
        return ok("trainer.users is empty: only root and the daemon's user may connect")
    return ok(f"{counted(len(users), 'user')} of trainer.users found")


@CHECKS.add("socket directory", family="trainers")
def socket_directory(vm: Installation) -> Judgement:
    """The directory of ``trainer.socket`` exists."""
    directory = vm.config.trainer.socket.parent
    if directory.is_dir():
        return ok(f"{directory} exists")
    is_of_the_unit = directory == Path(DEFAULT_SOCKET).parent and fixes.restart()
    make = "" if is_of_the_unit else fixes.harmless(f"install -d {fixes.quoted(directory)}")
    return failure(
        f"{directory}, the directory of trainer.socket, does not exist"
        + ("; it exists while the daemon runs" if is_of_the_unit else ""),
        fixes.then(make, fixes.start(vm.path)),
    )


# ------------------------------------------------------------ whether it runs


@CHECKS.add("daemon", needs=_CAUSES)
def runs(vm: Installation) -> Judgement:
    """The daemon runs, and if not, why."""
    restarts = 0
    if vm.by_systemd:
        deadline_mono_s = time.monotonic() + SETTLE_S
        facts = of_unit()
        while facts.get("ActiveState") in ("activating", "reloading", "deactivating"):
            if time.monotonic() > deadline_mono_s:
                break
            time.sleep(_POLL_S)
            facts = of_unit()
        if facts.get("ActiveState") != "active":
            return judge_down(facts, vm.run / ".swansongd" / "claim.json")
        restarts = int(facts.get("NRestarts") or 0)
    try:
        status = vm.status()
    except Unreachable as error:
        return failure(str(error), fixes.start(vm.path))
    blind = [source.name for source in status.sources if source.health is Health.BLIND]
    if restarts and status.uptime_s < SETTLE_S and _restarts_again(restarts):
        return failure(
            f"the daemon restarts repeatedly; restarts so far: {restarts}", fixes.log("-n 30")
        )
    words = f"answers: run {status.run}, state {status.state}"
    if blind:
        return warning(f"{words}; blind sources: {', '.join(blind)}", "swansong status")
    return ok(words)


def _restarts_again(restarts: int) -> bool:
    """Whether a daemon that has just started exits again within the next seconds."""
    deadline_mono_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_mono_s:
        facts = of_unit()
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
    again = f"; restarts so far: {restarts}" if restarts not in ("", "0") else ""
    result, code = facts.get("Result", ""), facts.get("ExecMainStatus", "")
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


@CHECKS.add("running configuration", needs=("daemon",))
def is_current(vm: Installation) -> Judgement:
    """The daemon was started with the current configuration and unit."""
    path, status = vm.path, vm.status()
    started_wall_s = time.time() - status.uptime_s
    if path.stat().st_mtime > started_wall_s + 1.0:
        return warning(
            f"{path} was changed after the daemon started; the daemon still uses the old configuration",
            fixes.restart() or f"kill {status.pid}; {fixes.start(path)}",
        )
    if vm.by_systemd and of_unit().get("NeedDaemonReload") == "yes":
        return warning(
            "the unit was changed; systemd still uses the old one",
            fixes.then(fixes.harmless("systemctl daemon-reload"), fixes.restart()),
        )
    return ok(f"the daemon uses the current {path}")


@CHECKS.add("version", needs=("daemon",))
def version(vm: Installation) -> Judgement:
    """The daemon runs the installed version.

    An upgrade requires a restart.
    """
    running = vm.status().version
    if running == __version__:
        return ok(f"the daemon runs the installed version, {running}")
    return warning(
        f"the daemon runs version {running:.100}, but version {__version__} is installed",
        fixes.start(vm.path),
    )


# ------------------------------------------------------------ store and ranks


@CHECKS.add(
    "store health",
    needs=("daemon", "network", "credentials", "bucket", "write", "create-if-absent", "read back"),
    settle_s=SETTLE_S,
)
def store_health(vm: Installation) -> Judgement:
    """The daemon reaches its store.

    The checks of the store have passed before this one, so a failure here requires a restart.
    """
    store, fix = vm.status().store, fixes.start(vm.path)
    if store is None:
        return failure("the daemon has not reached its store yet", fix)
    words = f"{store.health}, {store.reason}, for {store.for_s} s"
    if store.health is Health.OK:
        return ok(f"the daemon reaches its store: {words}")
    return failure(f"doctor reaches the store, but the running daemon does not: {words}", fix)


@CHECKS.add("ranks", needs=("daemon",))
def ranks(vm: Installation) -> Judgement:
    """No two connected trainers have one rank.

    Otherwise the daemon recently refused processes because their rank was taken.
    """
    status = vm.status()
    refused = status.trainers_refused
    if refused.age_s is not None and refused.age_s < _RECENT_S:
        return warning(
            f"the daemon refused {refused.count} connections: {refused.last}",
            "# start the processes of a job with torchrun; run one daemon per job",
        )
    connected = sum(trainer.connected for trainer in status.trainers)
    if not connected:
        return skipped("no trainer is connected")
    return ok(f"{counted(connected, 'trainer')}, all with different ranks")


# ------------------------------------------------------------ trainers


@CHECKS.add("socket", family="trainers", needs=("daemon",))
def socket(vm: Installation) -> Judgement:
    """``trainer.users`` reach the socket, by their groups or by ``SupplementaryGroups=`` of a unit."""
    socket, users = vm.config.trainer.socket, vm.config.trainer.users
    facts = socket.stat()
    if not stat.S_ISSOCK(facts.st_mode):
        return failure(f"{socket} is not a socket", fixes.restart())
    mode = f"{socket}, mode {stat.S_IMODE(facts.st_mode):o}, group {facts.st_gid}"
    known = [found for user in users if (found := account(user)) is not None]
    if os.geteuid() != 0 and known:
        return skipped(f"{mode}; checking whether trainers reach it requires root")
    if vm.by_systemd and not facts.st_mode & stat.S_IWGRP:
        # A restart of the daemon would not help: systemd keeps the listening socket open.
        group = fixes.as_root(f"chgrp {TRAINER_GROUP} {fixes.quoted(socket)}")
        fix = fixes.then(group, fixes.as_root(f"chmod 0660 {fixes.quoted(socket)}"))
        return failure(f"the trainers' group may not connect to {mode}", fix)
    connected = _processes_of(vm.status().trainers)
    granted = _users_granted() if vm.by_systemd else {}
    granted_by, excluded = [], []
    for user in known:
        process = connected.get(user.uid, user)
        if user.may("rw", socket) or process.may("rw", socket):
            continue
        if user.name in granted and with_trainers(user).may("rw", socket):
            granted_by.append(f"{user.name} by SupplementaryGroups= of {granted[user.name]}")
        elif closed := _closed_above(socket, process):
            return failure(
                f"{user.name} of trainer.users may not enter {closed}: no trainer can connect to {mode}",
                fixes.as_root(f"chmod a+x {fixes.quoted(closed)}"),
            )
        else:
            excluded.append(user.name)
    if excluded:
        # Processes get their groups at their start, sessions at the login.
        add = [
            fixes.harmless(f"usermod --append --groups {TRAINER_GROUP} {fixes.quoted(name)}")
            for name in excluded
        ]
        return failure(
            f"{', '.join(excluded)} of trainer.users may not connect to {mode}; restart running trainers "
            "after the fix",
            fixes.then(*add),
        )
    return ok("; ".join([mode, *granted_by]))


def _processes_of(trainers: Iterable[TrainerStatus]) -> dict[int, Account]:
    """Users of the connected trainers with the groups of their processes, by uid.

    A unit, a container or a login may have given them groups that the account does not have.
    """
    found = {}
    for trainer in trainers:
        with suppress(OSError):
            if trainer.connected:
                uid = os.stat(f"/proc/{trainer.pid}").st_uid
                gid, *groups = peers.groups_of(trainer.pid)
                found[uid] = Account(str(uid), uid, gid, tuple(groups))
    return found


def _closed_above(path: Path, user: Account) -> Path | None:
    """The first directory above ``path`` that the user may not enter."""
    return next((each for each in reversed(path.parents) if not user.may("x", each)), None)


def _users_granted() -> dict[str, str]:
    """Users that get the trainers' group from ``SupplementaryGroups=`` of a unit, each with its unit."""
    units = set()
    for directory in _UNIT_DIRECTORIES:
        for path in (*directory.glob("*.service"), *directory.glob("*.service.d/*.conf")):
            with suppress(OSError):
                if TRAINER_GROUP in path.read_text(errors="replace"):
                    name = path.parent.name if path.suffix == ".conf" else path.name
                    units.add(name.removesuffix(".d"))
    granted = {}
    for unit in sorted(units):
        if "@." not in unit:
            facts = properties(unit, ("User", "SupplementaryGroups"))
            if TRAINER_GROUP in facts.get("SupplementaryGroups", "").split():
                granted[facts.get("User") or "root"] = unit
    return granted


@CHECKS.add("signal", family="trainers", fix=lambda vm: fixes.edit(vm.path))
def signal(vm: Installation) -> Judgement:
    """The trainer catches ``trainer.signal``."""
    trainer = vm.config.trainer
    if trainer.signal == "none":
        return skipped("trainer.signal = none: trainers use the hooks")
    if trainer.pid_file is not None and not trainer.pid_file.exists():
        return warning(
            f"{trainer.pid_file} does not exist: no trainer to signal",
            f"# start the trainer, which writes its process id to {trainer.pid_file}",
        )
    known = frozenset(found.uid for user in trainer.users if (found := account(user)) is not None)
    numbers = frozenset(user for user in trainer.users if isinstance(user, int))
    allowed_uids = may_be_signalled(known | numbers, vm.user.uid)
    sender = SignalSender(trainer, allowed_uids, boot_id="", post=lambda _event: None)
    try:
        pid = sender.examine()
    except SignalRefusal as refusal:
        if refusal.command:
            return failure(refusal.reason, fixes.as_root(shlex.join(refusal.command)))
        status = f"systemctl status {trainer.unit or fixes.unit().stem}"
        return failure(refusal.reason, f"# {refusal.advice}" if refusal.advice else status)
    return ok(f"process {pid} handles {trainer.signal}")


@CHECKS.add("unconnected trainers", family="trainers", needs=("daemon",))
def unconnected_trainers(vm: Installation) -> Judgement:
    """No unconnected process holds a GPU."""
    answer = vm.answer()
    search = unconnected.search(vm.config.trainer, answer.status, answer.uid)
    if search.found:
        shown = [each.line for each in search.found[:_SHOWN]]
        more = [f"{len(search.found) - _SHOWN} more"] if len(search.found) > _SHOWN else []
        remedies = dict.fromkeys(each.fix for each in search.found)
        return warning(
            "; ".join([*shown, *more]), f"# if it trains this run: {'; '.join(remedies)}"
        )
    if search.is_complete:
        return ok("every process that holds a GPU is known to the daemon, or none holds one")
    return skipped("not all processes could be examined: this requires root on the daemon's host")
