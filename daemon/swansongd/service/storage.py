# SPDX-License-Identifier: Apache-2.0
"""Builds everything between staging and the object store from the configuration."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.format.wall import utc_now
from swansong_bucket.retention import locks
from swansong_bucket.runs import signing
from swansong_bucket.runs.signing import signed
from swansong_bucket.stores import checksums
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.stores.http import dns
from swansong_bucket.stores.opening import open_mirror, open_store
from swansong_bucket.stores.warm import Warmer
from swansong_bucket.stores.wrappers.retry import Retrying
from swansong_bucket.stores.wrappers.throttle import Throttled

from swansongd.config.config import Config
from swansongd.core.events import Event, Flushed, FlushFailed
from swansongd.core.state import State
from swansongd.flush import limits
from swansongd.flush.background import Background
from swansongd.flush.claim_record import expect_recorded_store
from swansongd.flush.claimant import Claimant
from swansongd.flush.committer import Committer
from swansongd.flush.cutting import ChunkLayout
from swansongd.flush.engine import FlushEngine
from swansongd.flush.known import KnownChunks
from swansongd.flush.ledger import Ledger
from swansongd.flush.locker import Locker
from swansongd.flush.mirroring import Mirroring
from swansongd.flush.possession import Possession
from swansongd.flush.pruner import Pruner
from swansongd.flush.shared_link import SharedLink, lock_run
from swansongd.flush.store_health import StoreHealth
from swansongd.observe.facts import Observed
from swansongd.staging.prepare import RunDirectory

SMALL_CONNECTIONS = 4
"""Connections besides those of the flush: for the committer, a restore and the warmer."""
_CALL_BUDGET_S = 20.0
"""Time for which a request is retried in the background before it counts as failed."""

_log = structlog.get_logger(__name__)


def open_stores(
    config: Config, own_directory: Path
) -> tuple[ObjectStore, ObjectStore, ObjectStore | None]:
    """The store of the run, the same with signatures, and its mirror if one is configured.  Sends no request.

    Args:
        own_directory: of the daemon, with the record of the store that it has used before.

    Raises:
        ConfigError: the URL of a store, or ``store.signing_key_file``, cannot be used.
    """
    key = signing.load(config.store.signing_key_file)
    mirror = open_mirror(config.mirror)
    connections = config.flush.connections + SMALL_CONNECTIONS
    if mirror is not None:
        mirror = signed(mirror, key)
        connections += config.mirror.connections
    store = open_store(config.store, connections=connections, lock=locks.of(config.store))
    expect_recorded_store(store, own_directory, config.run.name)
    return store, signed(store, key), mirror


class Storage:
    """The store of the run, and the threads that write to it: flush, committer and warmer.

    Args:
        config: of the daemon.
        staging: of the run.
        post: receives the events of all parts.
        state: returns the current state of the decision loop.
        boot_id: of this boot of the kernel.
        vm: id of this VM and boot.
        stop: ends the warmer, and the waits between retries.
        shared: runtime directory of all daemons of this VM; None: this daemon coordinates with no other.

    Raises:
        ConfigError: ``store.url`` or ``store.signing_key_file`` cannot be used, or another daemon of this VM
            serves the run.
    """

    def __init__(
        self,
        config: Config,
        staging: RunDirectory,
        post: Callable[[Observed], None],
        *,
        state: Callable[[], State],
        boot_id: str,
        vm: str,
        stop: threading.Event,
        shared: Path | None = None,
    ) -> None:
        def is_urgent() -> bool:
            return limits.is_urgent(state())

        self._post = post
        self._stop = stop
        self.bytes_referenced = 0
        """Bytes that were not sent since the daemon started, because an earlier commit has stored them."""
        self.keys = RunKeys(config.run.name)
        self._link: SharedLink | None = None
        if shared is not None:
            try:
                lock_run(shared, config.run.name, config.store.url)
                self._link = SharedLink(shared, state=state, post=post, stop=stop)
            except OSError as error:
                _log.warning("link_not_shared", reason=f"{shared}: {error.strerror}")
        opened, self.backend, mirror = open_stores(config, staging.own)
        dns.remember()
        checksums.load()
        self.health = StoreHealth(post)
        data_store = self._retrying(
            Throttled(
                self.backend,
                lambda: limits.rate_bytes_per_s(state()),
                is_paused=lambda: state().must_yield,
            ),
            lambda: limits.data_give_up_mono_s(state(), time.monotonic()),
        )
        small_store = self._retrying(
            self.backend, lambda: limits.commit_give_up_mono_s(state(), time.monotonic())
        )
        # Without retries after a notice: the manifest of the evacuation must not wait behind them.
        background = Background(
            self._retrying(self.backend, lambda: -math.inf if is_urgent() else None), is_urgent
        )
        self.known = known = KnownChunks(
            staging.own,
            run=config.run.name,
            store_url=config.store.url,
            is_data=self.keys.is_data,
            orphans_after_s=config.retention.orphans_after_s,
        )
        possession = Possession(self.backend, known, is_urgent=is_urgent, stop=stop)
        self.flush = FlushEngine(
            data_store,
            self.keys,
            staging.fd,
            self._post_flush,
            known=known,
            layout=ChunkLayout(config.flush.chunk_bytes, config.flush.connections),
            created=possession.offer,
        )
        self.mirror = mirror
        """The backend of the mirror; None without one."""
        self.mirroring: Mirroring | None = None
        if mirror is not None:
            self.mirroring = Mirroring(
                self.backend,
                mirror,
                self.keys,
                state=state,
                post=post,
                stop=stop,
                connections=config.mirror.connections,
                limit_bytes_per_s=config.mirror.background_bytes_per_s,
            )
        claimant = Claimant(
            small_store,
            self.keys,
            staging.own,
            boot_id=boot_id,
            vm=vm,
            wall=utc_now,
            store_id=lambda: opened.store_id if isinstance(opened, FileStore) else "",
        )
        locker = Locker(
            background,
            config.store.lock_days,
            health=self.health,
            age_s=known.age_s,
        )
        self.committer = Committer(
            small_store,
            background,
            self.keys,
            post,
            claimant,
            known=known,
            wall=utc_now,
            health=self.health,
            committed=self._committed,
            prepare=locker.extend,
            settle=possession.settle,
        )
        self.ledger = Ledger(
            small_store,
            self.keys,
            is_urgent=lambda: limits.is_undecided(state()),
            is_fenced=lambda: state().starts.fenced_by is not None,
        )
        self._warmer = Warmer(self.backend, stop=stop, report=self.health.warmed)
        self.pruner: Pruner | None = None
        """None: the daemon does not prune."""
        if config.retention.in_daemon:
            self.pruner = Pruner(
                background,
                self.keys,
                config.retention,
                may_prune=lambda: limits.may_prune(state()),
                stop=stop,
            )

    def start(self) -> None:
        """Start the threads: claim a generation, keep the store warm, record resumes, copy, prune.

        Returns immediately.
        """
        self.committer.start()
        self._warmer.start()
        self.ledger.start()
        if self._link is not None:
            self._link.start()
        if self.mirroring is not None:
            self.mirroring.start()
        if self.pruner is not None:
            self.pruner.start()

    def check_fence(self) -> None:
        """Look whether another VM has taken the run over, in the store or in the mirror."""
        self.committer.check_fence()
        if self.mirroring is not None:
            self.mirroring.check_fence()

    def expedite(self) -> None:
        """A notice arrived: claim without backoff, warm the store, and mirror the farewell."""
        self.committer.expedite()
        self._warmer.now()
        if self.mirroring is not None:
            self.mirroring.expedite()

    def _retrying(self, store: ObjectStore, give_up_mono_s: Callable[[], float | None]) -> Retrying:
        return Retrying(
            store,
            give_up_mono_s=give_up_mono_s,
            budget_s=_CALL_BUDGET_S,
            stop=self._stop,
            attempted=self.health.attempted,
        )

    def _committed(self, manifest: Manifest) -> None:
        if self.mirroring is not None:
            self.mirroring.committed(manifest)

    def _post_flush(self, event: Event) -> None:
        if isinstance(event, FlushFailed) and not event.void:
            self.health.failed("flush", event.reason)
        elif isinstance(event, Flushed):
            self.health.ok("flush")
            if event.bytes_referenced:
                self.bytes_referenced += event.bytes_referenced
                _log.info("shards_referenced", bytes_referenced=event.bytes_referenced)
        self._post(event)
