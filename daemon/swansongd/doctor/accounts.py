# SPDX-License-Identifier: Apache-2.0
"""Users and groups, and what they may: asked of the kernel, as that user."""

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
    """A user whose rights can be asked for: anybody for root, else only ourselves."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]

    def may(self, rights: str, path: Path) -> bool:
        """Whether the kernel lets this user do all of ``rights`` (of ``rwx``) with ``path``."""
        if self.uid == os.geteuid():
            wanted = {"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}
            return all(os.access(path, wanted[right], effective_ids=True) for right in rights)
        # Another process, for a user id changes for all threads; and the mode alone does not tell of
        # access lists and read-only mounts.
        return all(
            subprocess.run(  # noqa: S603 - the path is an argument of its own
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
    """A user by name or number; None where there is none."""
    try:
        user = pwd.getpwnam(name) if isinstance(name, str) else pwd.getpwuid(name)
    except KeyError:
        return None
    groups = tuple(os.getgrouplist(user.pw_name, user.pw_gid))
    return Account(user.pw_name, user.pw_uid, user.pw_gid, groups)


def daemon_account() -> Account:
    """The user that the daemon runs as, where we may ask for it; else ourselves."""
    found = account(DAEMON_USER)
    return with_trainers(found) if found is not None and os.geteuid() == 0 else own_account()


def own_account() -> Account:
    """The user of this process, with the groups that it has."""
    own = account(os.geteuid())
    name = own.name if own is not None else f"user id {os.geteuid()}"
    return Account(name, os.geteuid(), os.getegid(), tuple(os.getgroups()))


def with_trainers(user: Account) -> Account:
    """The same user as the unit starts it: with the group of the trainers."""
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
