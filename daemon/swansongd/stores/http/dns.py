# SPDX-License-Identifier: Apache-2.0
"""Remembers where names resolved to, for the minutes in which nobody resolves names any more.

On the way down the resolver is often gone before we are; on Compute Engine it is the metadata server
itself, which may stop answering once preemption has begun.  boto3, requests and the wire all
ask ``socket.getaddrinfo``, so that is where the memory sits: the answer is always asked for afresh, and
only when there is none does the last good one stand in.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import structlog

_log = structlog.get_logger(__name__)
_NAMES_MAX = 256


class AddressMemory:
    """A stand-in for ``socket.getaddrinfo`` that never forgets a name that it has seen resolve.

    Args:
        resolve: the function to ask.
    """

    def __init__(self, resolve: Any) -> None:
        self._resolve = resolve
        self._lock = threading.Lock()
        self._known: dict[Any, Any] = {}
        self._stale: set[Any] = set()

    def __call__(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``socket.getaddrinfo``; raises its error only for what has never resolved."""
        question = (host, port, args, tuple(sorted(kwargs.items())))
        try:
            addresses = self._resolve(host, port, *args, **kwargs)
        except OSError as error:
            with self._lock:
                known = self._known.get(question)
                is_news = known is not None and question not in self._stale
                self._stale.add(question)
            if known is None:
                raise
            if is_news:
                _log.warning(
                    "name_does_not_resolve", host=str(host), error=str(error), used="memory"
                )
            return known
        with self._lock:
            if question in self._known or len(self._known) < _NAMES_MAX:
                self._known[question] = addresses
            self._stale.discard(question)
        return addresses


def remember() -> None:
    """From now on this process remembers; more calls change nothing."""
    if not isinstance(socket.getaddrinfo, AddressMemory):
        socket.getaddrinfo = AddressMemory(socket.getaddrinfo)
