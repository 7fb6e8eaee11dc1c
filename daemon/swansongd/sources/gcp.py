# SPDX-License-Identifier: Apache-2.0
"""Notices of Google Compute Engine, from its metadata server, by hanging GET.

The server holds a request until the value differs from the one whose ETag the request names, so that
word arrives within milliseconds.  ``last_etag=0`` names no value and is answered at once: each watch
begins with it, or it would wait in vain for a change that has happened already.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from swansongd.core.events import NoticeRaised, NoticeWithdrawn
from swansongd.model import DeadlineQuality, Notice, Severity
from swansongd.sources.base import Clock, HealthTracker, Post
from swansongd.sources.metadata import (
    DEFAULT_URL,
    Backoff,
    MetadataClient,
    MetadataUnavailable,
    shortened,
    watch,
)

BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
_NO_ETAG = "0"
_BASE = "/computeMetadata/v1/"
_FLAVOR = {"Metadata-Flavor": "Google"}


class KeyWatch:
    """The value of one metadata key: as it is, then each time that it changes.

    Args:
        client: the connection; its time limit must exceed ``hang_s``.
        key: for example ``instance/preempted``.
        hang_s: the server is asked to answer after this many seconds even without a change.
    """

    def __init__(self, client: MetadataClient, key: str, *, hang_s: int) -> None:
        self._client = client
        self._key = key
        self._hang_s = hang_s
        self._etag = _NO_ETAG

    def next(self) -> str:
        """Wait for the next word.  The value may be the same as before: that is how waiting ends.

        Raises:
            MetadataUnavailable: no answer, or not from the metadata server.  The next call asks for
                the value as it is.
        """
        etag, self._etag = self._etag, _NO_ETAG
        answer = self._client.request(
            "GET",
            _BASE + self._key,
            headers=_FLAVOR,
            params={"wait_for_change": "true", "last_etag": etag, "timeout_sec": str(self._hang_s)},
        )
        if answer.status != 200:
            raise MetadataUnavailable(f"the metadata server answers HTTP {answer.status}")
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise MetadataUnavailable("who answers is not the metadata server: no Metadata-Flavor")
        self._etag = answer.headers.get("ETag") or _NO_ETAG
        return answer.body.decode("utf-8", "replace").strip()


def read_boot_id(path: str = BOOT_ID_PATH) -> str:
    """Identity of this boot of the VM; ``unknown`` where the kernel does not tell."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip() or "unknown"
    except OSError:
        return "unknown"


class GcpPreemptedSource:
    """``gcp.preempted``: this Spot VM is being taken.

    The key says that, not when: the deadline is the first sight and the configured grace period.

    Args:
        metadata_url: address of the metadata server.
        assumed_grace_s: from the first sight of the notice to the end.
        monotonic: the clock, in seconds.
        boot_id: makes the identity of the notice; of this boot if not given.
        hang_s: how long the server is asked to hold a request, in whole seconds.
        timeout_s: limit of each HTTP exchange, more than ``hang_s``.  So long may a connection that
            broke without a sign hide a notice.
        retry_cap_s: most to wait before asking again after a failure.
        blind_after_s: without an answer for this long the source calls itself blind.
        uniform: where jitter comes from.
    """

    name = "gcp.preempted"

    def __init__(
        self,
        *,
        assumed_grace_s: float,
        monotonic: Clock,
        metadata_url: str = DEFAULT_URL,
        boot_id: str | None = None,
        hang_s: int = 10,
        timeout_s: float = 12.0,
        retry_cap_s: float = 2.0,
        blind_after_s: float = 30.0,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._metadata_url = metadata_url
        self._assumed_grace_s = assumed_grace_s
        self._monotonic = monotonic
        self._identity = f"{self.name}:{read_boot_id() if boot_id is None else boot_id}"
        self._hang_s = hang_s
        self._timeout_s = timeout_s
        self._retry_cap_s = retry_cap_s
        self._blind_after_s = blind_after_s
        self._uniform = uniform
        self._preempted = False

    def run(self, post: Post, stop: threading.Event) -> None:
        """See :class:`~swansongd.sources.base.Source`."""
        client = MetadataClient(self._metadata_url, timeout_s=self._timeout_s)
        key = KeyWatch(client, "instance/preempted", hang_s=self._hang_s)
        health = HealthTracker(
            self.name, blind_after_s=self._blind_after_s, monotonic=self._monotonic, post=post
        )
        first_s = min(0.2, self._retry_cap_s)

        def look() -> float:
            asked_mono_s = self._monotonic()
            changed = self._judge(key.next(), post)
            health.ok()
            # A server that wakes us for nothing again and again is asked at a pace, not in a spin.
            return 0.0 if changed else max(0.0, asked_mono_s + first_s - self._monotonic())

        backoff = Backoff(first_s, self._retry_cap_s, self._uniform)
        watch(look, client=client, health=health, backoff=backoff, stop=stop)

    def _judge(self, value: str, post: Post) -> bool:
        """Post what is new; whether anything was."""
        if value.upper() not in ("TRUE", "FALSE"):
            raise MetadataUnavailable(
                f"preempted is neither TRUE nor FALSE: {shortened(value, 60)}"
            )
        preempted = value.upper() == "TRUE"
        if preempted == self._preempted:
            return False
        self._preempted = preempted
        if preempted:
            post(NoticeRaised(self._notice(value)))
        else:
            post(NoticeWithdrawn(self.name, "preempted went back to FALSE"))
        return True

    def _notice(self, value: str) -> Notice:
        return Notice(
            source=self.name,
            kind="reclaim",
            identity=self._identity,
            severity=Severity.IMMINENT,
            deadline_mono_s=self._monotonic() + self._assumed_grace_s,
            deadline_quality=DeadlineQuality.ASSUMED,
            detail=f"preempted is {value}",
        )
