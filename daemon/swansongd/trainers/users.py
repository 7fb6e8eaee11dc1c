# SPDX-License-Identifier: Apache-2.0
"""The users of ``trainer.users``, by number."""

from __future__ import annotations

import os
import pwd

from swansongd.errors import ConfigError

ROOT = 0


def uids_of(users: tuple[str | int, ...]) -> frozenset[int]:
    """User ids of these names and numbers.

    Raises:
        ConfigError: there is no user of that name.
    """
    uids = set()
    problems = []
    for user in users:
        try:
            uids.add(user if isinstance(user, int) else pwd.getpwnam(user).pw_uid)
        except KeyError:
            problems.append(
                f"trainer.users: there is no user {user!r}; create it, or remove it here"
            )
    if problems:
        raise ConfigError(problems)
    return frozenset(uids)


def may_speak(uids: frozenset[int]) -> frozenset[int]:
    """Users that may connect to the socket and own staged files: trainers, root and the daemon's own."""
    return uids | {ROOT, os.geteuid()}


def may_be_signalled(uids: frozenset[int], daemon_uid: int) -> frozenset[int]:
    """Users whose processes the daemon may signal: those that are named, root only if root is.

    Where no user is named, daemon and trainer have the same user.
    """
    return uids or frozenset({daemon_uid})
