# SPDX-License-Identifier: Apache-2.0
"""The installation that doctor checks: configuration, options, users, and what its checks share."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from swansong_bucket.errors import Unreachable
from swansongd.config.config import Config
from swansongd.observe.status import DaemonStatus
from swansongd.sources import aws, azure
from swansongd.sources.detect import detect_cloud
from swansongd.sources.gcp import LONG_NOTICE_S

DAEMON_USER = "swansong"
TRAINER_GROUP = "swansong-trainers"

BOOTED = Path("/run/systemd/system")
"""Exists while systemd runs."""

_TIMEOUT_S = 5.0
_TOOL_S = 15.0

Shared = TypeVar("Shared")


@dataclass(frozen=True, slots=True)
class Account:
    """A user whose access can be checked: any user for root, else only the user of this process."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]

    def may(self, rights: str, path: Path) -> bool:
        """Whether the kernel grants this user all ``rights`` (of ``rwx``) to ``path``."""
        if self.uid == os.geteuid():
            wanted = {"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}
            return all(os.access(path, wanted[right], effective_ids=True) for right in rights)
        # In another process, because a user id changes for all threads.  The mode bits alone would miss
        # access lists and read-only mounts.
        return all(
            subprocess.run(  # noqa: S603 - no shell, the path is one argument
                ["/usr/bin/test", f"-{right}", str(path)],
                user=self.uid,
                group=self.gid,
                extra_groups=self.groups,
                timeout=_TIMEOUT_S,
                check=False,
                capture_output=True,
            ).returncode
            == 0
            for right in rights
        )


def account(name: str | int) -> Account | None:
    """A user by name or uid; None if there is no such user."""
    try:
        user = pwd.getpwnam(name) if isinstance(name, str) else pwd.getpwuid(name)
    except KeyError:
        return None
    groups = tuple(os.getgrouplist(user.pw_name, user.pw_gid))
    return Account(user.pw_name, user.pw_uid, user.pw_gid, groups)


def daemon_account() -> Account:
    """The user that the daemon runs as if this process is root's, else the user of this process."""
    found = account(DAEMON_USER)
    return with_trainers(found) if found is not None and os.geteuid() == 0 else own_account()


def own_account() -> Account:
    """The user of this process, with its groups."""
    own = account(os.geteuid())
    name = own.name if own is not None else f"user id {os.geteuid()}"
    return Account(name, os.geteuid(), os.getegid(), tuple(os.getgroups()))


def with_trainers(user: Account) -> Account:
    """The user with the group of the trainers, as the unit starts the daemon."""
    group = group_id(TRAINER_GROUP)
    return user if group is None else Account(user.name, user.uid, group, user.groups)


def group_id(name: str) -> int | None:
    """The id of a group; None if there is no such group."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def tool(*command: str) -> subprocess.CompletedProcess[str]:
    """The output of a program of this machine, whatever its exit status."""
    return subprocess.run(  # noqa: S603 - names and options of our own
        command, capture_output=True, text=True, errors="replace", timeout=_TOOL_S, check=False
    )


# ---------------------------------------------------------------- the installation


@dataclass(frozen=True, slots=True)
class DaemonAnswer:
    """The answer of the daemon on a socket."""

    status: DaemonStatus
    uid: int
    """The user that listens on the socket."""


AskDaemon = Callable[[Path], DaemonAnswer]


def ask_nothing(socket: Path) -> DaemonAnswer:
    """For checks that do not need the daemon."""
    raise Unreachable(f"the daemon at {socket} was not asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command, and facts that only its first process knows."""

    image: bool = False
    """Check an image during its build."""
    speed: bool = False
    """Measure the bandwidth to the store."""
    trial: bool = False
    """Report a store that is lost with the VM as a warning."""
    send_notification: bool = False
    """Send a test notification, and call the heartbeat address."""
    operator_file: str = ""
    """Credentials in an operator's home, which the daemon does not read."""
    environment_of: str = ""
    """Owner of the environment of this process, for messages."""


@dataclass(kw_only=True)
class Installation:
    """One installation of the daemon.

    Args:
        path: configuration file.
        configured: None if the configuration is not valid.
        user: the user that the daemon runs as.
        ask: returns the answer of the daemon on a socket; raises Unreachable.
        by_systemd: whether systemd manages the daemon.
        root: root directory of the image.
    """

    path: Path
    configured: Config | None
    user: Account
    ask: AskDaemon = ask_nothing
    options: Options = Options()
    by_systemd: bool = False
    root: Path = Path("/")
    _shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        assert self.configured is not None
        return self.configured

    @cached_property
    def detected_cloud(self) -> str:
        """The cloud that the firmware names."""
        return detect_cloud()

    @property
    def cloud(self) -> str:
        """The cloud whose metadata service the daemon polls."""
        configured = self.config.sources.cloud
        return self.detected_cloud if configured == "auto" else configured

    @property
    def staging(self) -> Path:
        return self.config.staging.path

    @property
    def run(self) -> Path:
        """The directory of the run in staging."""
        return self.staging / self.config.run.name

    def answer(self) -> DaemonAnswer:
        """The answer of the daemon now; raises Unreachable."""
        return self.ask(self.config.trainer.socket)

    def status(self) -> DaemonStatus:
        """The status of the daemon now; raises Unreachable."""
        return self.answer().status

    def shared(self, make: Callable[[Installation], Shared]) -> Shared:
        """The one result of ``make`` for this installation, made for the first check that needs it."""
        if make not in self._shared:
            self._shared[make] = make(self)
        made: Shared = self._shared[make]
        return made


NOTICES_S = {"aws": aws.NOTICE_S, "azure": azure.NOTICE_S}


def grace_s(config: Config, cloud: str) -> float:
    """The grace period of a notice of this cloud, in seconds."""
    if cloud in NOTICES_S:
        return NOTICES_S[cloud]
    if cloud == "gcp" and config.sources.gcp_preemption_notice_s:
        return config.sources.gcp_preemption_notice_s
    return config.deadline.assumed_grace_s


def longest_grace_s(config: Config, cloud: str) -> float:
    """The longest grace period that may be in progress when systemd stops the daemon."""
    deadline, sources = config.deadline, config.sources
    may_be_long = cloud == "gcp" and sources.gcp_preemption_notice_s != 0
    return max(
        deadline.sigterm_grace_s,
        deadline.assumed_grace_s,
        grace_s(config, cloud),
        LONG_NOTICE_S if may_be_long else 0.0,
    )
