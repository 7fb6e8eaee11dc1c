# SPDX-License-Identifier: Apache-2.0
"""Checks of the way between trainers and daemon: socket, users, group, signal."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swansong.protocol import DEFAULT_SOCKET

from swansongd.config.config import Config
from swansongd.doctor import fixes
from swansongd.doctor.accounts import TRAINER_GROUP, Account, account, has_group, with_trainers
from swansongd.doctor.findings import Check, Judgement, failure, ok, skipped, warning
from swansongd.doctor.sandbox import properties
from swansongd.trainers.signals import SignalRefusal, SignalSender
from swansongd.trainers.users import may_be_signalled

AskDaemon = Callable[[Path], dict[str, Any]]

FAMILY = "trainers"

_UNIT_DIRECTORIES = tuple(
    Path(place, "systemd", "system")
    for place in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
)


def needed_checks(config: Config, path: Path) -> Iterator[Check]:
    """What the daemon does not start without.

    Args:
        path: of the configuration.
    """
    socket, users = config.trainer.socket, config.trainer.users
    yield Check(
        family=FAMILY,
        name="trainer users",
        ask=lambda: judge_users(
            [user for user in users if _is_missing(user)],
            len(users),
            grouped=has_group(TRAINER_GROUP),
        ),
        needs="users",
    )
    yield Check(family=FAMILY, name="socket directory", ask=lambda: _directory(socket.parent, path))


def checks(
    config: Config, path: Path, daemon: Account, ask_daemon: AskDaemon, *, by_systemd: bool
) -> Iterator[Check]:
    """Whether trainers and the daemon reach one another.

    Args:
        path: of the configuration.
        daemon: the user that the daemon runs as.
        ask_daemon: the report of the daemon on that socket; raises Unreachable.
        by_systemd: systemd has the daemon's unit.
    """
    yield Check(
        family=FAMILY,
        name="socket",
        ask=lambda: _reachable(config, ask_daemon, by_systemd=by_systemd),
        needs="daemon",
    )
    yield Check(
        family=FAMILY, name="signal", ask=lambda: _signal(config, daemon), fix=fixes.edit(path)
    )


def _directory(directory: Path, config: Path) -> Judgement:
    if directory.is_dir():
        return ok(f"{directory} is there")
    is_of_the_unit = directory == Path(DEFAULT_SOCKET).parent and fixes.restart()
    make = "" if is_of_the_unit else fixes.as_root(f"install -d {fixes.quoted(directory)}")
    return failure(
        f"{directory}, the directory of trainer.socket, does not exist",
        fixes.then(make, fixes.start(config)),
    )


def _is_missing(user: str | int) -> bool:
    return isinstance(user, str) and account(user) is None  # a number needs no name


def judge_users(missing: list[str | int], count: int, *, grouped: bool) -> Judgement:
    """Whether all of ``trainer.users`` exist: the daemon does not start without them."""
    if missing:
        names = ", ".join(map(str, missing))
        groups = f"--groups {TRAINER_GROUP} " if grouped else ""
        make = [fixes.as_root(f"useradd {groups}{fixes.quoted(str(user))}") for user in missing]
        return failure(
            f"trainer.users: there is no user {names}", fixes.then(*make, fixes.restart())
        )
    if not count:
        return ok("trainer.users is empty: only root and the daemon's own user may train")
    return ok(f"all {count} of trainer.users exist")


def _reachable(config: Config, ask_daemon: AskDaemon, *, by_systemd: bool) -> Judgement:
    socket, users = config.trainer.socket, config.trainer.users
    facts = socket.stat()
    if not stat.S_ISSOCK(facts.st_mode):
        return failure(f"{socket} is no socket", fixes.restart())
    mode = f"{socket}, mode {stat.S_IMODE(facts.st_mode):o}, group {facts.st_gid}"
    known = [found for user in users if (found := account(user)) is not None]
    if os.geteuid() != 0 and known:
        return skipped(f"{mode}; only root can tell whether trainers reach it")
    if by_systemd and not facts.st_mode & stat.S_IWGRP:
        # A restart would keep it: systemd holds the listening socket for the daemon.
        group = fixes.as_root(f"chgrp {TRAINER_GROUP} {fixes.quoted(socket)}")
        fix = fixes.then(group, fixes.as_root(f"chmod 0660 {fixes.quoted(socket)}"))
        return failure(f"the group of trainers cannot reach {mode}", fix)
    connected = _users_of(ask_daemon(socket).get("trainers") or [])
    granted = _users_granted() if by_systemd else {}
    how, kept_out = [], []
    for user in known:
        if user.uid in connected or user.may("rw", socket):
            continue
        if user.name in granted and with_trainers(user).may("rw", socket):
            how.append(f"{user.name} by SupplementaryGroups= of {granted[user.name]}")
        else:
            kept_out.append(user.name)
    if kept_out:
        # A process has its groups from its start; a session, from its login.
        add = [
            fixes.as_root(f"usermod --append --groups {TRAINER_GROUP} {fixes.quoted(name)}")
            for name in kept_out
        ]
        return failure(
            f"{', '.join(kept_out)} of trainer.users cannot reach {mode}; trainers that run must be "
            "started again after the fix",
            fixes.then(*add),
        )
    return ok("; ".join([mode, *how]))


def _users_of(trainers: Iterable[Mapping[str, Any]]) -> set[int]:
    """User ids of the connected trainers."""
    uids = set()
    for trainer in trainers:
        with suppress(OSError, ValueError):
            if trainer.get("connected"):
                uids.add(os.stat(f"/proc/{int(trainer.get('pid', 0))}").st_uid)
    return uids


def _users_granted() -> dict[str, str]:
    """Users to whom a unit gives the group of trainers, each with the unit, whether it runs or not."""
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
        return skipped("trainer.signal = none: trainers have our hooks")
    if trainer.pid_file is not None and not trainer.pid_file.exists():
        return warning(
            f"{trainer.pid_file} is not there: no trainer runs that could be signalled",
            f"ls -l {fixes.quoted(trainer.pid_file)}",
        )
    known = frozenset(found.uid for user in trainer.users if (found := account(user)) is not None)
    numbers = frozenset(user for user in trainer.users if isinstance(user, int))
    sender = SignalSender(
        signal_name=trainer.signal,
        pid_file=trainer.pid_file,
        unit=trainer.unit,
        allowed_uids=may_be_signalled(known | numbers, daemon.uid),
        post=lambda _event: None,
    )
    try:
        pid = sender.examine()
    except SignalRefusal as refusal:
        return failure(str(refusal), f"systemctl status {trainer.unit or 'swansongd'}")
    return ok(f"process {pid} catches {trainer.signal}")
