# SPDX-License-Identifier: Apache-2.0
"""A cache of resolved names, for the last minutes of a VM, when the resolver may not respond any more.

On Compute Engine the resolver is the metadata server, which may stop responding once preemption has begun.
boto3, requests and the wire all call ``socket.getaddrinfo``, so the cache replaces that function.  Every call
still resolves the name; the cached addresses are used only if that fails.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import structlog

_log = structlog.get_logger(__name__)
_NAMES_MAX = 256


class AddressMemory:
    """A replacement of ``socket.getaddrinfo`` that caches the last result of each name.

    Args:
        resolve: the function that resolves names.
    """

    def __init__(self, resolve: Any) -> None:
        self._resolve = resolve
        self._lock = threading.Lock()
        self._known: dict[Any, Any] = {}
        self._stale: set[Any] = set()

    def __call__(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``socket.getaddrinfo``; raises its error only for names that were never resolved."""
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
                    "name_does_not_resolve",
                    host=str(host),
                    error=str(error),
                    used="cached addresses",
                )
            return known
        with self._lock:
            if question in self._known or len(self._known) < _NAMES_MAX:
                self._known[question] = addresses
            self._stale.discard(question)
        return addresses


def remember() -> None:
    """Install the cache in this process; idempotent."""
    if not isinstance(socket.getaddrinfo, AddressMemory):
        socket.getaddrinfo = AddressMemory(socket.getaddrinfo)
