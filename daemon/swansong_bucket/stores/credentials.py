# SPDX-License-Identifier: Apache-2.0
"""A cache of credentials: read once for all threads, and again when they expire or are refused.

Keys are rotated and sessions are revoked while the daemon runs.  After a refusal with this possible cause,
one thread reads all sources of credentials again.  A refusal that persists is Permanent.  The sources are
read at most once in two seconds, which limits the load on the disk, the metadata service and the token
endpoint.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import structlog

from swansong_bucket.errors import Permanent, StoreError, Transient

Value = TypeVar("Value")

_PAUSE_S = 2.0
"""Minimum time between two reads, unless the store has accepted the credentials of the first one."""

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class CredentialCache(Generic[Value]):
    """The credentials of one store.  Every method is safe to call from many threads at the same time.

    An SDK renews credentials minutes before they expire, during a request, and the request fails if the
    metadata service does not respond.  This class uses credentials until they expire; :meth:`renew` renews
    them between requests.

    Args:
        what: name of the store in log lines.
        load: reads all sources in order, and returns the first one that has credentials.
        fetch: returns the credentials of that source, renewed if they expire soon.
        has_expired: whether the credentials of that source have expired.

    The three functions raise StoreError only.
    """

    what: str
    _: KW_ONLY
    load: Callable[[], Any]
    fetch: Callable[[Any], Value]
    has_expired: Callable[[Any], bool]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._source: Any = None
        self._value: Value | None = None
        self._read_mono_s = -math.inf
        self._failure: StoreError | None = None
        """Error of the last read."""
        self._is_unproven = False
        """Whether the store has not yet accepted the credentials of the last read."""

    def get(self) -> Value:
        """The cached credentials; reads their source only if they have expired."""
        value = self._value
        if value is None or self.has_expired(self._source):
            with self._lock:
                value = self._value
                if value is None or self.has_expired(self._source):
                    value = self._renewed()
        return value

    def renew(self) -> None:
        """Renew credentials that expire soon; raises StoreError if there are none."""
        with self._lock:
            self._renewed()

    def replace(self, refused: Value, *, is_certain: bool) -> bool:
        """Look for credentials other than ``refused``, which the store has refused; True if any exist.

        Args:
            is_certain: the store refused the credentials.  False: they may only lack a right.

        Raises:
            Transient: the refusal was certain, and a source of credentials did not respond.
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
                _log.info("credentials_replaced", store=self.what)
                return True
            if is_certain and isinstance(self._failure, Transient):
                raise Transient(str(self._failure))
            return False

    def accept(self, used: Value) -> None:
        """Record that the store accepted ``used``: a later refusal has a new cause."""
        if self._is_unproven and self._value == used:
            self._is_unproven = False

    # ------------------------------------------------------------ under the lock

    def _renewed(self) -> Value:
        if self._source is None:
            source = self.load()
            self._value = value = self.fetch(source)
            self._source = source
            return value
        if isinstance(self._failure, Permanent) and (
            time.monotonic() < self._read_mono_s + _PAUSE_S and self.has_expired(self._source)
        ):
            raise Permanent(str(self._failure), hint=self._failure.hint)
        try:
            self._value = value = self.fetch(self._source)
        except Permanent:
            # The source may have been replaced, as a service account's key file is when keys are rotated.
            return self._read()
        return value

    def _read(self) -> Value:
        """Read all sources again."""
        self._read_mono_s = time.monotonic()
        self._is_unproven = True
        try:
            source = self.load()
            value = self.fetch(source)
        except StoreError as error:
            self._failure = error
            raise
        self._source, self._value, self._failure = source, value, None
        return value
