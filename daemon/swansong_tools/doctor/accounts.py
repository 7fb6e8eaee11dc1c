# SPDX-License-Identifier: Apache-2.0
"""Users and groups, and their access rights as the kernel reports them."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path

DAEMON_USER = "swansong"
TRAINER_GROUP = "swansong-trainers"

_TIMEOUT_S = 5.0


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
    try:
        group = grp.getgrnam(TRAINER_GROUP).gr_gid
    except KeyError:
        return user
    return Account(user.name, user.uid, group, user.groups)


def has_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True
