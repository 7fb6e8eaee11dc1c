# SPDX-License-Identifier: Apache-2.0
"""Credentials in use: fetched once for all threads, and read again when they expire or are refused.

Keys are rotated and sessions are revoked while the daemon runs.  After a refusal that may come from that, one
thread reads all sources of credentials again.  A refusal that stays is Permanent.  It causes one reading in
two seconds at the most, so that it does not hammer the disk, the metadata service or the token endpoint.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import structlog

from swansongd.errors import Permanent, StoreError, Transient

Value = TypeVar("Value")

_PAUSE_S = 2.0
"""Between two readings, unless the store has accepted what the first one found."""

_log = structlog.get_logger(__name__)


class CredentialCache(Generic[Value]):
    """What authorises the requests to one store.  Every method may be called from many threads at once.

    The SDKs ask the metadata service minutes before credentials expire, during a request, and fail with
    it.  This class uses credentials until they expire.  :meth:`renew` renews them between requests.

    Args:
        what: names them in log lines.
        load: reads all sources from the beginning, and returns the first one that has credentials.
        fetch: returns what authorises requests, renewed by that source if it does not last.
        has_expired: whether what was fetched from that source has expired.

    The three functions raise StoreError only.
    """

    def __init__(
        self,
        what: str,
        *,
        load: Callable[[], Any],
        fetch: Callable[[Any], Value],
        has_expired: Callable[[Any], bool],
    ) -> None:
        self._what = what
        self._load = load
        self._fetch = fetch
        self._has_expired = has_expired
        self._lock = threading.Lock()
        self._source: Any = None
        self._value: Value | None = None
        self._read_mono_s = -math.inf
        self._failure: StoreError | None = None
        """Of the last reading."""
        self._is_unproven = False
        """Whether the store has accepted nothing since the last reading."""

    def get(self) -> Value:
        """The known credentials; asks no source of them unless they have expired."""
        value = self._value
        if value is None or self._has_expired(self._source):
            with self._lock:
                value = self._value
                if value is None or self._has_expired(self._source):
                    value = self._renewed()
        return value

    def renew(self) -> None:
        """Have credentials that last for a while; raises StoreError where there are none."""
        with self._lock:
            self._renewed()

    def replace(self, refused: Value, *, is_certain: bool) -> bool:
        """Whether there are credentials other than ``refused``, which the store has just refused.

        Args:
            is_certain: the refusal was about the credentials, not perhaps about a right that they lack.

        Raises:
            Transient: the refusal was certain, and a source of credentials did not answer.
        """
        with self._lock:
            if self._value != refused:
                return True
            is_too_soon = time.monotonic() < self._read_mono_s + _PAUSE_S
            if not is_too_soon or (is_certain and not self._is_unproven):
                try:
                    self._read()
                except StoreError:
                    pass  # see _failure
            if self._value != refused:
                _log.info("credentials_replaced", store=self._what)
                return True
            if is_certain and isinstance(self._failure, Transient):
                raise Transient(str(self._failure))
            return False

    def accept(self, used: Value) -> None:
        """The store accepted ``used``: the next refusal of them is news."""
        if self._is_unproven and self._value == used:
            self._is_unproven = False

    # ------------------------------------------------------------ under the lock

    def _renewed(self) -> Value:
        if self._source is None:
            source = self._load()
            self._value = value = self._fetch(source)
            self._source = source
            return value
        if isinstance(self._failure, Permanent) and (
            time.monotonic() < self._read_mono_s + _PAUSE_S and self._has_expired(self._source)
        ):
            raise Permanent(str(self._failure), hint=self._failure.hint)
        try:
            self._value = value = self._fetch(self._source)
        except Permanent:
            # It may have been replaced, as the file with the key of a service account is.
            return self._read()
        return value

    def _read(self) -> Value:
        """Read all sources again."""
        self._read_mono_s = time.monotonic()
        self._is_unproven = True
        try:
            source = self._load()
            value = self._fetch(source)
        except StoreError as error:
            self._failure = error
            raise
        self._source, self._value, self._failure = source, value, None
        return value
