# SPDX-License-Identifier: Apache-2.0
"""Checks of the connection between trainers and daemon: socket, users, group, signal."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from swansong.protocol import DEFAULT_SOCKET
from swansongd.config.config import Config
from swansongd.observe.status import TrainerStatus
from swansongd.trainers import unconnected
from swansongd.trainers.signals import SignalRefusal, SignalSender
from swansongd.trainers.users import may_be_signalled

from swansong_tools.doctor import fixes
from swansong_tools.doctor.accounts import TRAINER_GROUP, Account, account, has_group, with_trainers
from swansong_tools.doctor.daemon import AskDaemon, DaemonAnswer
from swansong_tools.doctor.findings import Check, Judgement, failure, ok, skipped, warning
from swansong_tools.doctor.sandbox import properties

FAMILY = "trainers"
_SHOWN = 3
"""Processes that one finding names."""

_UNIT_DIRECTORIES = tuple(
    Path(place, "systemd", "system")
    for place in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
)


def needed_checks(config: Config, path: Path) -> Iterator[Check]:
    """The checks that must succeed before the daemon can start.

    Args:
        path: configuration file.
    """
    socket, users = config.trainer.socket, config.trainer.users
    yield Check(
        family=FAMILY,
        name="trainer users",
        judge=lambda: judge_users(
            [user for user in users if _is_missing(user)],
            len(users),
            grouped=has_group(TRAINER_GROUP),
        ),
        needs="users",
    )
    yield Check(
        family=FAMILY, name="socket directory", judge=lambda: _directory(socket.parent, path)
    )


def checks(
    config: Config, path: Path, daemon: Account, ask: AskDaemon, *, by_systemd: bool
) -> Iterator[Check]:
    """Whether trainers reach the daemon's socket, and the daemon's signal reaches its trainer.

    Args:
        path: configuration file.
        daemon: the user that the daemon runs as.
        ask: returns the answer of the daemon on that socket; raises Unreachable.
        by_systemd: whether systemd manages the daemon.
    """
    yield Check(
        family=FAMILY,
        name="socket",
        judge=lambda: _reachable(config, ask, by_systemd=by_systemd),
        needs="daemon",
    )
    yield Check(
        family=FAMILY, name="signal", judge=lambda: _signal(config, daemon), fix=fixes.edit(path)
    )
    yield Check(
        family=FAMILY,
        name="unconnected trainers",
        judge=lambda: _unconnected(config, ask(config.trainer.socket)),
        needs="daemon",
    )


def _directory(directory: Path, config: Path) -> Judgement:
    if directory.is_dir():
        return ok(f"{directory} exists")
    is_of_the_unit = directory == Path(DEFAULT_SOCKET).parent and fixes.restart()
    make = "" if is_of_the_unit else fixes.as_root(f"install -d {fixes.quoted(directory)}")
    return failure(
        f"{directory}, the directory of trainer.socket, does not exist",
        fixes.then(make, fixes.start(config)),
    )


def _is_missing(user: str | int) -> bool:
    return isinstance(user, str) and account(user) is None  # a uid needs no account


def judge_users(missing: list[str | int], count: int, *, grouped: bool) -> Judgement:
    """Whether all ``trainer.users`` exist; the daemon does not start otherwise."""
    if missing:
        names = ", ".join(map(str, missing))
        groups = f"--groups {TRAINER_GROUP} " if grouped else ""
        make = [fixes.as_root(f"useradd {groups}{fixes.quoted(str(user))}") for user in missing]
        return failure(f"trainer.users: no such user: {names}", fixes.then(*make, fixes.restart()))
    if not count:
        return ok("trainer.users is empty: only root and the daemon's user may connect")
    return ok(f"all {count} users of trainer.users exist")


def _reachable(config: Config, ask: AskDaemon, *, by_systemd: bool) -> Judgement:
    socket, users = config.trainer.socket, config.trainer.users
    facts = socket.stat()
    if not stat.S_ISSOCK(facts.st_mode):
        return failure(f"{socket} is not a socket", fixes.restart())
    mode = f"{socket}, mode {stat.S_IMODE(facts.st_mode):o}, group {facts.st_gid}"
    known = [found for user in users if (found := account(user)) is not None]
    if os.geteuid() != 0 and known:
        return skipped(f"{mode}; checking whether trainers reach it requires root")
    if by_systemd and not facts.st_mode & stat.S_IWGRP:
        # A restart of the daemon would not help: systemd keeps the listening socket open.
        group = fixes.as_root(f"chgrp {TRAINER_GROUP} {fixes.quoted(socket)}")
        fix = fixes.then(group, fixes.as_root(f"chmod 0660 {fixes.quoted(socket)}"))
        return failure(f"the trainers' group may not connect to {mode}", fix)
    connected = _users_of(ask(socket).status.trainers)
    granted = _users_granted() if by_systemd else {}
    granted_by, excluded = [], []
    for user in known:
        if user.uid in connected or user.may("rw", socket):
            continue
        if user.name in granted and with_trainers(user).may("rw", socket):
            granted_by.append(f"{user.name} by SupplementaryGroups= of {granted[user.name]}")
        else:
            excluded.append(user.name)
    if excluded:
        # Processes get their groups at their start, sessions at the login.
        add = [
            fixes.as_root(f"usermod --append --groups {TRAINER_GROUP} {fixes.quoted(name)}")
            for name in excluded
        ]
        return failure(
            f"{', '.join(excluded)} of trainer.users may not connect to {mode}; restart running trainers "
            "after the fix",
            fixes.then(*add),
        )
    return ok("; ".join([mode, *granted_by]))


def _users_of(trainers: Iterable[TrainerStatus]) -> set[int]:
    """Uids of the connected trainers."""
    uids = set()
    for trainer in trainers:
        with suppress(OSError):
            if trainer.connected:
                uids.add(os.stat(f"/proc/{trainer.pid}").st_uid)
    return uids


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


def _signal(config: Config, daemon: Account) -> Judgement:
    trainer = config.trainer
    if trainer.signal == "none":
        return skipped("trainer.signal = none: trainers use the hooks")
    if trainer.pid_file is not None and not trainer.pid_file.exists():
        return warning(
            f"{trainer.pid_file} does not exist: no trainer to signal",
            f"ls -l {fixes.quoted(trainer.pid_file)}",
        )
    known = frozenset(found.uid for user in trainer.users if (found := account(user)) is not None)
    numbers = frozenset(user for user in trainer.users if isinstance(user, int))
    sender = SignalSender(
        signal_name=trainer.signal,
        pid_file=trainer.pid_file,
        unit=trainer.unit,
        allowed_uids=may_be_signalled(known | numbers, daemon.uid),
        boot_id="",
        post=lambda _event: None,
    )
    try:
        pid = sender.examine()
    except SignalRefusal as refusal:
        return failure(str(refusal), f"systemctl status {trainer.unit or fixes.unit().stem}")
    return ok(f"process {pid} handles {trainer.signal}")


def _unconnected(config: Config, answer: DaemonAnswer) -> Judgement:
    search = unconnected.search(config.trainer, answer.status, answer.uid)
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
