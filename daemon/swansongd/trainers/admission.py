# SPDX-License-Identifier: Apache-2.0
"""How much of the trainer channel one user may take up, so that no user keeps the others out.

Pure bookkeeping, for the thread of the channel; a discard from ``User.queries`` may come from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from swansongd.trainers.connection import Connection
from swansongd.util.rates import TokenBucket

CONNECTIONS_MAX = 256
CONNECTIONS_PER_USER = 128
"""More ranks than any VM has GPUs, several times over."""
CONNECTIONS_RESERVED = 16
"""Part of CONNECTIONS_MAX for root and the daemon's own user: ``swansong status`` always gets in."""
HELLO_LIMIT_S = 5.0
"""A connection that sends no message for this time, and has not said hello, is closed."""
STATUS_COST = 20.0
"""Cost of a status query, in other messages."""
QUERIES_MAX = 4
"""Restore queries of one connection that are not answered yet; a rank has one."""
_HELLOS_AT_ONCE, _HELLOS_PER_S = 2 * CONNECTIONS_PER_USER, 20.0
_MESSAGES_AT_ONCE, _MESSAGES_PER_S = 2000.0, 1000.0


class Refusal(Exception):
    """A peer is turned away; ``str()`` is the reason and what to do about it."""


class User:
    """The share of the channel that one user has taken up."""

    def __init__(self) -> None:
        self.hellos = TokenBucket(_HELLOS_AT_ONCE, _HELLOS_PER_S)
        self.messages = TokenBucket(_MESSAGES_AT_ONCE, _MESSAGES_PER_S)
        self.queries: set[tuple[int, str]] = set()
        """Restore queries that are not answered yet: number of the connection, and id."""


class Admission:
    """Decides which peers get a connection.

    Args:
        privileged: root and the daemon's own user.
    """

    def __init__(self, privileged: frozenset[int]) -> None:
        self._privileged = privileged
        self._users: dict[int, User] = {}

    def user(self, uid: int) -> User:
        """The share of this user; ``uid`` is one that may speak, so there are few."""
        return self._users.setdefault(uid, User())

    def seat(self, uid: int, connections: Iterable[Connection]) -> Connection | None:
        """Find room for one more connection; returns the connection that has to make room, if one has to.

        Those that have not said hello make room, the oldest first.

        Raises:
            Refusal: there is no room.
        """
        all_ = list(connections)
        is_privileged = uid in self._privileged
        own = [each for each in all_ if each.peer.uid == uid]
        if not is_privileged and len(own) >= CONNECTIONS_PER_USER:
            return _oldest_silent(own, f"user id {uid} has {len(own)}")
        limit = CONNECTIONS_MAX - (0 if is_privileged else CONNECTIONS_RESERVED)
        if len(all_) < limit:
            return None
        # A privileged connection never makes room for an ordinary one.
        others = [each for each in all_ if each.peer.uid not in self._privileged]
        if is_privileged and all(each.has_joined for each in others):
            others = all_
        return _oldest_silent(others, f"there are {len(all_)}")

    def hello(self, uid: int, connections: Iterable[Connection], now_mono_s: float) -> None:
        """Admit the first hello of a connection.

        Raises:
            Refusal: this user, or all together, have as many ranks as there may be, or come too often.
        """
        joined = [each for each in connections if each.has_joined]
        own = sum(each.peer.uid == uid for each in joined)
        if own >= CONNECTIONS_PER_USER:
            raise Refusal(_too_many(f"user id {uid} has {own}"))
        if len(joined) >= CONNECTIONS_MAX - CONNECTIONS_RESERVED:
            raise Refusal(_too_many(f"there are {len(joined)}"))
        if not self.user(uid).hellos.take(now_mono_s):
            raise Refusal(f"more than {_HELLOS_PER_S:.0f} hellos a second: reconnect less often")


def _oldest_silent(connections: list[Connection], found: str) -> Connection:
    for each in connections:
        if not each.has_joined:
            return each
    raise Refusal(_too_many(found))


def _too_many(found: str) -> str:
    return f"{found} connections already: close some, one per rank is enough"
