# SPDX-License-Identifier: Apache-2.0
"""The limits of each user of the trainer channel, so that no user can lock the others out.

Only the thread of the channel uses it, except that any thread may remove from ``User.queries``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from swansong.protocol import Message

from swansongd.trainers.connection import PeerConnection
from swansongd.util.rates import TokenBucket

CONNECTIONS_MAX = 256
CONNECTIONS_PER_USER = 128
"""Several times the number of GPUs of any VM."""
CONNECTIONS_RESERVED = 16
"""Part of CONNECTIONS_MAX for root and the daemon's own user, so that ``swansong status`` always connects."""
HELLO_LIMIT_S = 5.0
"""A connection without a hello is closed after this time without a message."""
STATUS_COST = 20.0
"""Cost of a status query, in other messages."""
QUERIES_MAX = 4
"""Pending restore queries of one connection; a rank has one."""
_HELLOS_AT_ONCE, _HELLOS_PER_S = 2 * CONNECTIONS_PER_USER, 20.0
_MESSAGES_AT_ONCE, _MESSAGES_PER_S = 2000.0, 1000.0


class Reply(Protocol):
    """Sends a reply to one query, without blocking, from any thread."""

    def __call__(self, message: Message, fd: int = -1) -> None:
        """Send the message, with a descriptor that the callee closes; -1: without one."""


class PeerRefused(Exception):
    """A peer is refused; ``str()`` is the reason and the fix."""


class User:
    """The use of the channel by one user."""

    def __init__(self) -> None:
        self.hellos = TokenBucket(_HELLOS_AT_ONCE, _HELLOS_PER_S)
        self.messages = TokenBucket(_MESSAGES_AT_ONCE, _MESSAGES_PER_S)
        self.queries: dict[tuple[int, str], Reply] = {}
        """Replies to the pending restore queries, by number of the connection and query id."""


class Admission:
    """Decides which peers get a connection.

    Args:
        privileged: root and the daemon's own user.
    """

    def __init__(self, privileged: frozenset[int]) -> None:
        self._privileged = privileged
        self._users: dict[int, User] = {}

    def user(self, uid: int) -> User:
        """The use by this user; only allowed users have one, so there are few."""
        return self._users.setdefault(uid, User())

    def admit(self, uid: int, connections: Iterable[PeerConnection]) -> PeerConnection | None:
        """Admit one more connection; returns the connection to close for it, if any.

        That is the oldest connection without a hello.

        Raises:
            Refusal: all connections are in use.
        """
        all_ = list(connections)
        is_privileged = uid in self._privileged
        own = [each for each in all_ if each.peer.uid == uid]
        if not is_privileged and len(own) >= CONNECTIONS_PER_USER:
            return _oldest_without_hello(own, f"user id {uid} has {len(own)}")
        limit = CONNECTIONS_MAX - (0 if is_privileged else CONNECTIONS_RESERVED)
        if len(all_) < limit:
            return None
        # A privileged connection is never closed for an ordinary one.
        others = [each for each in all_ if each.peer.uid not in self._privileged]
        if is_privileged and all(each.has_joined for each in others):
            others = all_
        return _oldest_without_hello(others, f"there are {len(all_)}")

    def hello(self, uid: int, connections: Iterable[PeerConnection], now_mono_s: float) -> None:
        """Admit the first hello of a connection.

        Raises:
            Refusal: this user, or all users together, have the most ranks, or this user sends too many
                hellos.
        """
        joined = [each for each in connections if each.has_joined]
        own = sum(each.peer.uid == uid for each in joined)
        if own >= CONNECTIONS_PER_USER:
            raise PeerRefused(_too_many(f"user id {uid} has {own}"))
        if len(joined) >= CONNECTIONS_MAX - CONNECTIONS_RESERVED:
            raise PeerRefused(_too_many(f"there are {len(joined)}"))
        if not self.user(uid).hellos.take(now_mono_s):
            raise PeerRefused(
                f"more than {_HELLOS_PER_S:.0f} hellos per second: reconnect less often"
            )


def _oldest_without_hello(connections: list[PeerConnection], found: str) -> PeerConnection:
    for each in connections:
        if not each.has_joined:
            return each
    raise PeerRefused(_too_many(found))


def _too_many(found: str) -> str:
    return f"{found} connections already: close some, one per rank is enough"
