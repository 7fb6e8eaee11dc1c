# SPDX-License-Identifier: Apache-2.0
"""User ids of ``trainer.users``."""

from __future__ import annotations

import os
import pwd

from swansong_bucket.errors import ConfigError

ROOT = 0


def uids_of(users: tuple[str | int, ...]) -> frozenset[int]:
    """User ids of these names and numbers.

    Raises:
        ConfigError: a user does not exist.
    """
    uids = set()
    problems = []
    for user in users:
        try:
            uids.add(user if isinstance(user, int) else pwd.getpwnam(user).pw_uid)
        except KeyError:
            problems.append(
                f"trainer.users: user {user!r} does not exist; create the user, or remove it here"
            )
    if problems:
        raise ConfigError(problems)
    return frozenset(uids)


def may_connect(uids: frozenset[int]) -> frozenset[int]:
    """Users that may connect to the socket and own staged files: trainers, root and the daemon's own."""
    return uids | {ROOT, os.geteuid()}


def may_be_signalled(uids: frozenset[int], daemon_uid: int) -> frozenset[int]:
    """Users whose processes the daemon may signal: the configured ones, and root only if configured.

    Without configured users, daemon and trainer have the same user.
    """
    return uids or frozenset({daemon_uid})
