# SPDX-License-Identifier: Apache-2.0
"""Everything between staging and the object store, made ready as one: the part of the composition root
that concerns the store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from swansongd.bucket import signing
from swansongd.bucket.keys import RunKeys
from swansongd.config.config import Config
from swansongd.core import limits
from swansongd.core.events import Event, Flushed, FlushFailed
from swansongd.core.state import State
from swansongd.errors import StoreError, Transient
from swansongd.flush.committer import Committer, expect_recorded_store
from swansongd.flush.engine import FlushEngine
from swansongd.flush.journal import UploadJournal
from swansongd.flush.store_health import StoreHealth
from swansongd.flush.sweeper import Sweeper
from swansongd.observe.health import HealthTracker
from swansongd.observe.report import STORE_HEALTH
from swansongd.staging.prepare import RunDirectory
from swansongd.stores.file.store import FileStore
from swansongd.stores.http import dns
from swansongd.stores.opening import open_store
from swansongd.stores.warm import Warmer
from swansongd.stores.wrappers.retry import Retrying
from swansongd.stores.wrappers.throttle import Throttled

SMALL_CONNECTIONS = 4
"""Beside those of the flush: for the committer, a restore, and keeping warm."""
_CALL_BUDGET_S = 20.0
"""How long one call to the store is tried again in the background before it counts as failed."""
_BLIND_AFTER_S = 60.0

_log = structlog.get_logger(__name__)


class Storage:
    """The store, the flush to it, the committer's small objects in it, and who keeps it warm and clean.

    Args:
        config: of the daemon.
        staging: of the run.
        post: takes the events of all of them.
        state: the state of the decision loop, as it is.
        boot_id: of this boot of the kernel.
        stop: ends all threads that wait.

    Raises:
        ConfigError: the store's URL makes no sense, or ``store.signing_key_file`` cannot be used.
    """

    def __init__(
        self,
        config: Config,
        staging: RunDirectory,
        post: Callable[[Event], None],
        *,
        state: Callable[[], State],
        boot_id: str,
        stop: threading.Event,
    ) -> None:
        self._config = config
        self._state = state
        self._post = post
        self.bytes_referenced = 0
        """Not sent since the daemon started, because an earlier commit has stored the same bytes."""
        key_file = config.store.signing_key_file
        owners = {0, os.geteuid()}
        signer = None if key_file is None else signing.load(key_file, owners=owners)
        self.keys = RunKeys(config.run.name, signer)
        self.backend = open_store(
            config.store, connections=config.flush.connections + SMALL_CONNECTIONS
        )
        expect_recorded_store(self.backend, staging.own, config.run.name)
        dns.remember()
        self._health = StoreHealth(
            HealthTracker(
                STORE_HEALTH, blind_after_s=_BLIND_AFTER_S, monotonic=time.monotonic, post=post
            )
        )
        self.warmer = Warmer(self.backend, stop=stop, report=self._warmed)
        throttled = Throttled(self.backend, lambda: limits.rate_bytes_per_s(state()))
        data_store, small_store = (
            Retrying(
                store,
                give_up_mono_s=give_up,
                budget_s=_CALL_BUDGET_S,
                stop=stop,
                attempted=self._health.attempted,
            )
            for store, give_up in (
                (throttled, lambda: limits.data_give_up_mono_s(state(), time.monotonic())),
                (self.backend, lambda: limits.commit_give_up_mono_s(state(), time.monotonic())),
            )
        )
        journal = UploadJournal(staging.own, run=config.run.name, store_url=config.store.url)
        self.flush = FlushEngine(
            data_store,
            self.keys,
            staging.fd,
            self._post_flush,
            journal=journal,
            connections=config.flush.connections,
            part_size_bytes=config.flush.part_size_bytes,
            is_urgent=self._is_urgent,
        )
        self.committer = Committer(
            small_store,
            self.keys,
            staging.own,
            post,
            journal=journal,
            boot_id=boot_id,
            wall=utc_now,
            health=self._health,
            several_vms=config.run.several_vms,
            store_id=self._store_id,
        )
        self._sweeper = Sweeper(
            small_store,
            self.keys,
            holds=journal.holds_upload,
            is_urgent=self._is_urgent,
            after_s=config.store.abort_uploads_after_s,
            stop=stop,
        )

    def start(self) -> None:
        """Claim a generation, keep warm, sweep; returns at once."""
        self.committer.start()
        self.warmer.start()
        self._sweeper.start()

    def expedite(self) -> None:
        """A notice has come."""
        self.committer.expedite()
        self.warmer.now()

    def _store_id(self) -> str:
        return self.backend.store_id if isinstance(self.backend, FileStore) else ""

    def _is_urgent(self) -> bool:
        return limits.is_urgent(self._state())

    def _warmed(self, began_mono_s: float, error: StoreError | None) -> None:
        if isinstance(error, Transient):
            self._health.attempted(began_mono_s, error)
        elif error is not None:
            self._health.failed("warm", error.line())
        else:
            self._health.ok("warm")

    def _post_flush(self, event: Event) -> None:
        if isinstance(event, FlushFailed) and not event.void:
            self._health.failed("flush", event.reason)
        elif isinstance(event, Flushed):
            self._health.ok("flush")
            if event.bytes_referenced:
                self.bytes_referenced += event.bytes_referenced
                _log.info("shards_referenced", bytes_referenced=event.bytes_referenced)
        self._post(event)


def utc_now() -> str:
    """Wall clock, as text; informational."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
