# SPDX-License-Identifier: Apache-2.0
"""Checks of the way between trainers and daemon: socket, users, group, signal."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swansongd import __version__
from swansongd.config import Config
from swansongd.doctor.accounts import TRAINER_GROUP, Account, account, has_group
from swansongd.doctor.findings import Check, Judgement, failure, ok, skipped, warning
from swansongd.errors import Unreachable
from swansongd.trainers.signals import SignalRefusal, SignalSender
from swansongd.trainers.users import may_be_signalled

FAMILY = "trainers"

_START = "systemctl start swansongd"


def checks(
    config: Config,
    edit: str,
    daemon: Account,
    ask_daemon: Callable[[Path], dict[str, Any]],
    *,
    installed: bool,
) -> Iterator[Check]:
    """All of them.

    Args:
        edit: the command that opens the configuration.
        daemon: the user that the daemon runs as.
        ask_daemon: the report of the daemon on that socket; raises Unreachable.
        installed: the unit is there, and with it the group must be.
    """
    socket, users = config.trainer.socket, config.trainer.users
    yield Check(family=FAMILY, name="socket directory", ask=lambda: _directory(socket.parent))
    yield Check(
        family=FAMILY,
        name="daemon",
        ask=lambda: _answers(socket, ask_daemon),
        needs="socket directory",
        mend=_START,
    )
    yield Check(
        family=FAMILY,
        name="version",
        ask=lambda: judge_version(ask_daemon(socket).get("version"), __version__),
        needs="daemon",
    )
    yield Check(
        family=FAMILY,
        name="trainer users",
        ask=lambda: judge_users([user for user in users if _is_missing(user)], len(users), edit),
    )
    if installed:
        yield Check(family=FAMILY, name="trainer group", ask=_group)
    yield Check(family=FAMILY, name="socket", ask=lambda: _reachable(socket, users), needs="daemon")
    yield Check(family=FAMILY, name="signal", ask=lambda: _signal(config, daemon), mend=edit)


def _directory(path: Path) -> Judgement:
    if path.is_dir():
        return ok(f"{path} is there")
    mend = _START if path == Path("/run/swansong") else f"install -d {shlex.quote(str(path))}"
    return failure(f"{path}, the directory of trainer.socket, does not exist", mend)


def _answers(socket: Path, ask_daemon: Callable[[Path], dict[str, Any]]) -> Judgement:
    try:
        report = ask_daemon(socket)
    except Unreachable as error:
        return failure(str(error), _START)
    blind = [
        str(source.get("name"))
        for source in report.get("sources") or []
        if source.get("health") == "blind"
    ]
    words = f"answers: run {report.get('run')}, state {report.get('state')}"
    if blind:
        return warning(f"{words}, but is blind to {', '.join(blind)}", "swansong status")
    return ok(words)


def judge_version(running: object, installed: str) -> Judgement:
    """Whether the daemon runs the program that is installed: an upgrade takes a restart."""
    if running == installed:
        return ok(f"the daemon runs the installed version, {installed}")
    return warning(
        f"the daemon runs version {running!s:.100}, and version {installed} is installed",
        "sudo systemctl restart swansongd",
    )


def _is_missing(user: str | int) -> bool:
    return isinstance(user, str) and account(user) is None  # a number needs no name


def judge_users(missing: list[str | int], count: int, edit: str) -> Judgement:
    """Whether all of ``trainer.users`` exist: the daemon does not start without them."""
    if missing:
        names = ", ".join(map(str, missing))
        return failure(
            f"trainer.users: there is no user {names}",
            f"useradd --groups {TRAINER_GROUP} {missing[0]}  # or: {edit}",
        )
    if not count:
        return ok("trainer.users is empty: only root and the daemon's own user may train")
    return ok(f"all {count} of trainer.users exist")


def _group() -> Judgement:
    if has_group(TRAINER_GROUP):
        return ok(f"group {TRAINER_GROUP} exists")
    return failure(f"group {TRAINER_GROUP} does not exist", "systemd-sysusers swansong.conf")


def _reachable(socket: Path, users: tuple[str | int, ...]) -> Judgement:
    facts = socket.stat()
    if not stat.S_ISSOCK(facts.st_mode):
        return failure(f"{socket} is no socket", "systemctl restart swansongd")
    mode = f"{socket}, mode {stat.S_IMODE(facts.st_mode):o}, group {facts.st_gid}"
    known = [found for user in users if (found := account(user)) is not None]
    if os.geteuid() != 0 and known:
        return skipped(f"{mode}; only root can tell whether trainers reach it")
    kept_out = [user.name for user in known if not user.may("rw", socket)]
    if kept_out:
        return failure(
            f"{', '.join(kept_out)} of trainer.users cannot reach {mode}",
            f"usermod --append --groups {TRAINER_GROUP} {kept_out[0]}",
        )
    return ok(mode)


def _signal(config: Config, daemon: Account) -> Judgement:
    trainer = config.trainer
    if trainer.signal == "none":
        return skipped("trainer.signal = none: trainers have our hooks")
    if trainer.pid_file is not None and not trainer.pid_file.exists():
        return warning(
            f"{trainer.pid_file} is not there: no trainer runs that could be signalled",
            f"ls -l {shlex.quote(str(trainer.pid_file))}",
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
