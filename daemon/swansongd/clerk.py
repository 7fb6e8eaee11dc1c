# SPDX-License-Identifier: Apache-2.0
"""One thread for the small objects, in order: the claim first, then manifests and farewells.

Kept apart from the flush, so that a manifest never waits behind data.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from swansong import bounds, openat
from swansong.bounds import BoundsError

from swansongd import catalog, commit
from swansongd.claim import ClaimObject
from swansongd.core.cadence import History
from swansongd.core.events import (
    CheckComplete,
    CommitDone,
    CommitFailed,
    CommitManifest,
    Event,
    FenceFound,
    GenerationClaimed,
    HistoryRead,
    PartsCounted,
)
from swansongd.errors import CorruptError, Exists, FencedError, StoreError, SwansongError
from swansongd.journal import Journal
from swansongd.keys import RunKeys
from swansongd.manifest import Manifest
from swansongd.model import CommitRef
from swansongd.sources.base import HealthTracker
from swansongd.stores.base import ObjectStore

_CLAIM_RETRY_S = 2.0
_CLAIM_RETRY_S_MAX = 30.0
_CLAIM_FILE = "claim.json"
_RECORD_BYTES_MAX = 64 * 2**10
_LEFT_BEHIND_MAX = 500
"""Names of sets in the record; those of the greatest steps."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """The generation that this boot has claimed; lies in staging, and dies with it.

    The record alone proves nothing: it counts only if the claim object in the store carries its nonce, or
    the incarnation that it names.
    """

    run: str
    store_url: str
    boot_id: str
    generation: int
    nonce: str
    incarnation: str = ""
    """Of a job over several VMs, see :mod:`swansongd.core.nodes`."""
    left_behind: tuple[str, ...] = ()
    """Sets in staging that were of earlier incarnations when this one was joined."""

    def save(self, own_directory: Path) -> None:
        """Replace the record.

        Raises:
            OSError: it could not be written; the old one stands.
        """
        body = {name: getattr(self, name) for name in self.__slots__}
        own_fd = openat.open_directory(own_directory, owners={os.geteuid()})
        try:
            openat.replace_file(_CLAIM_FILE, json.dumps(body).encode(), dir_fd=own_fd)
        finally:
            os.close(own_fd)

    @classmethod
    def load(cls, own_directory: Path) -> ClaimRecord | None:
        """None when this user wrote no record, or a field of the record is out of bounds."""
        owners = {os.geteuid()}
        try:
            own_fd = openat.open_directory(own_directory, owners=owners)
            try:
                data = openat.read_file(
                    _CLAIM_FILE, dir_fd=own_fd, max_bytes=_RECORD_BYTES_MAX, owners=owners
                )
            finally:
                os.close(own_fd)
            body = bounds.json_object(data, "the claim record", _RECORD_BYTES_MAX)
            return cls(
                run=bounds.text(body.get("run"), "run", bounds.ID_CHARS_MAX),
                store_url=bounds.text(body.get("store_url"), "store_url"),
                boot_id=bounds.text(body.get("boot_id"), "boot_id", bounds.ID_CHARS_MAX),
                generation=bounds.integer(
                    body.get("generation"), "generation", 1, bounds.GENERATION_MAX
                ),
                nonce=bounds.identifier(body.get("nonce"), "nonce"),
                incarnation=bounds.text(
                    body.get("incarnation"), "incarnation", bounds.ID_CHARS_MAX
                ),
                left_behind=tuple(
                    bounds.text(name, "left_behind", bounds.ID_CHARS_MAX)
                    for name in bounds.items(
                        body.get("left_behind", []), "left_behind", _LEFT_BEHIND_MAX
                    )
                ),
            )
        except (OSError, BoundsError):
            return None

    def is_of(self, run: str, store_url: str, boot_id: str) -> bool:
        """Whether it was made on this boot for this run and this store."""
        return (self.run, self.store_url, self.boot_id) == (run, store_url, boot_id)

    def is_of_claim(self, claim: ClaimObject | None) -> bool:
        """Whether this claim, of the generation in question, is the one that the record is of."""
        if claim is None:
            return False
        is_shared = bool(self.incarnation) and claim.incarnation == self.incarnation
        return claim.nonce == self.nonce or is_shared


class Clerk:
    """Claims, commits and says farewell.

    Args:
        store: wrapped so that it retries, and gives up at the deadline.
        keys: of the run.
        own_directory: the daemon's own, in staging; holds the claim over restarts.
        journal: told what is committed, and what the newest commit of an earlier VM has stored.
        boot_id: of this boot of the kernel.
        post: takes what came of it.
        wall: wall clock in UTC, as text; informational.
        health: told of what worked and what failed.
        several_vms: whether the generation is that of an incarnation of the job, see :meth:`join`.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        own_directory: Path,
        post: Callable[[Event], None],
        *,
        journal: Journal,
        boot_id: str,
        wall: Callable[[], str],
        health: HealthTracker,
        several_vms: bool = False,
    ) -> None:
        self._store = store
        self._keys = keys
        self._own_directory = own_directory
        self._post = post
        self._journal = journal
        self._boot_id = boot_id
        self._wall = wall
        self._health = health
        self._several_vms = several_vms
        record = ClaimRecord.load(own_directory)
        is_ours = (
            record is not None
            and record.is_of(keys.run, store.url, boot_id)
            and bool(record.incarnation) == several_vms
        )
        self._record = record if is_ours else None
        self.incarnation = self._record.incarnation if self._record else ""
        """The one that this boot has joined last; empty before it has."""
        self.left_behind = self._record.left_behind if self._record else ()
        """Sets in staging of earlier ones."""
        self._has_read_back = False
        """Whether a manifest of this life was read back, and was the one that was written."""
        self._jobs: queue.Queue[Callable[[], object]] = queue.Queue()
        self._stop = threading.Event()
        self._idle = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clerk", daemon=True)

    def start(self) -> None:
        """Claim a generation as soon as the store lets us, then take orders."""
        self._thread.start()

    def hurry(self) -> None:
        """There is a notice: do not sleep over the claim."""
        self._hurry.set()

    def commit(self, order: CommitManifest) -> None:
        """Create the manifest; posts CommitDone, CommitFailed or FenceFound."""
        self._jobs.put(lambda: self._commit(order))

    def farewell(self, generation: int, data: bytes) -> None:
        """Leave the farewell object of an evacuation."""
        self._jobs.put(lambda: self._farewell(generation, data))

    def check_fence(self, generation: int) -> None:
        """Look whether a newer generation is claimed; posts FenceFound if so."""
        self._jobs.put(lambda: self._check_fence(generation))

    def claim_next(self, generation: int) -> None:
        """Claim another generation after our own; posts GenerationClaimed or FenceFound."""

        overtaken: int | None = generation

        def claim() -> int:
            nonlocal overtaken
            if overtaken is not None:
                commit.ensure_not_fenced(self._store, self._keys, overtaken)
                overtaken = None  # from here on, a newer one may be our own
            return self._claim_new()

        self._jobs.put(lambda: self._claim(claim, is_first=False))

    def join(self, incarnation: str, left_behind: Sequence[str] = ()) -> None:
        """Share the generation of this incarnation; posts GenerationClaimed or FenceFound.

        Args:
            left_behind: sets in staging that are of earlier incarnations.
        """
        self.incarnation = incarnation
        self.left_behind = tuple(sorted(left_behind)[-_LEFT_BEHIND_MAX:])
        self._jobs.put(lambda: self._join(incarnation))

    def check_complete(self, order: CheckComplete) -> None:
        """Look for the manifests of all VMs; posts PartsCounted, whatever happens."""
        self._jobs.put(lambda: self._check_complete(order))

    def drain(self, timeout_s: float) -> bool:
        """Wait until what was ordered so far is done; False when it was not in time."""
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(timeout_s)

    def close(self) -> None:
        """Take no more orders."""
        self._stop.set()
        self._hurry.set()

    def _run(self) -> None:
        may_claim = not self._several_vms or self._record is not None
        if may_claim and not self._claim(self._claimed) and not self._several_vms:
            return
        while not self._stop.is_set():
            job = self._jobs.get()
            try:
                job()
            except Exception:
                _log.exception("clerk_fault")

    # ------------------------------------------------------------------ the claim

    def _claim(self, find: Callable[[], int], *, is_first: bool = True) -> bool:
        wait_s = _CLAIM_RETRY_S
        refused = ""
        incarnation = self.incarnation
        while not self._stop.is_set() and incarnation == self.incarnation:
            try:
                self._store.check()
                # Before the claim: a failure after the claim would take another number at each retry.
                newest = commit.newest_whole_commit(self._store, self._keys)
                generation = find()
            except FencedError as error:
                self._post(FenceFound(error.newer))
                return False
            except CorruptError as error:
                if error.line() != refused:
                    refused = error.line()
                    _log.error("claim_refused", reason=str(error), hint=error.hint)
                self._health.failed(error.line())
            except SwansongError as error:
                self._health.failed(error.line())
            except Exception as error:
                _log.exception("claim_fault")
                self._health.failed(f"{type(error).__name__}: {error}")
            else:
                self._health.ok()
                self._post(GenerationClaimed(generation, newest, is_rollback=not is_first))
                if is_first:
                    self._jobs.put(partial(self._read_history, generation))
                if newest is not None:
                    self._jobs.put(partial(self._seed, newest))
                return True
            self._hurry.wait(wait_s)
            wait_s = min(2 * wait_s, _CLAIM_RETRY_S_MAX)
            if self._hurry.is_set():
                self._stop.wait(0.5)
        return False

    def _join(self, incarnation: str) -> None:
        if incarnation != self.incarnation:
            return  # yet another one has begun meanwhile
        self._claim(lambda: self._claim_new(incarnation), is_first=False)

    def _claimed(self) -> int:
        record = self._record
        if record is None:
            return self._claim_new()
        claim = catalog.claim_of(self._store, self._keys, record.generation)
        if not record.is_of_claim(claim):
            _log.warning(
                "claim_record_refused",
                generation=record.generation,
                claim=f"{self._store.url}/{self._keys.generation(record.generation)}",
                hint="The claim is gone, or is not the one that this VM made; another one is made",
            )
            return self._claim_new(record.incarnation)
        # A daemon that was restarted continues under its number, unless it was overtaken.
        commit.ensure_not_fenced(self._store, self._keys, record.generation)
        return record.generation

    def _claim_new(self, incarnation: str = "") -> int:
        url, run = self._store.url, self._keys.run
        nonce = secrets.token_hex(16)
        identity = {"boot_id": self._boot_id, "host": platform.node(), "claimed": self._wall()}
        claim = commit.claim_generation(
            self._store, self._keys, identity=identity, nonce=nonce, incarnation=incarnation
        )
        if not claim.honours_if_absent:
            _log.error(
                "store_ignores_create_if_absent",
                url=url,
                hint="Two VMs with this run could overwrite each other's commits; use another store",
            )
        try:
            left_behind = self.left_behind if incarnation else ()
            record = ClaimRecord(
                run, url, self._boot_id, claim.generation, nonce, incarnation, left_behind
            )
            record.save(self._own_directory)
        except OSError as error:
            _log.warning(
                "claim_not_recorded",
                error=str(error),
                hint="After a restart the daemon will claim another generation, which is harmless",
            )
        return claim.generation

    # ------------------------------------------------------------------ orders

    def _commit(self, order: CommitManifest) -> None:
        staged = order.staged
        manifest = Manifest(
            run=self._keys.run,
            generation=order.generation,
            step=staged.id.step,
            kind=staged.kind,
            node=staged.node,
            nodes=staged.nodes,
            nonce=staged.id.nonce,
            shards=order.shards,
            parent=order.parent,
            framework=staged.framework,
            health=staged.health,
            trainer=staged.trainer,
            created=self._wall(),
        )
        reads_back = not self._has_read_back
        try:
            commit.commit(self._store, self._keys, manifest, reads_back=reads_back)
        except FencedError as error:
            self._post(FenceFound(error.newer))
        except Exists:
            reason = f"another checkpoint is committed as {manifest.ref}"
            self._post(CommitFailed(order.flush_id, reason, conflict=True))
        except BoundsError as error:  # and never can be: the set is void
            self._post(CommitFailed(order.flush_id, str(error), conflict=True))
        except SwansongError as error:
            self._health.failed(error.line())
            self._post(CommitFailed(order.flush_id, error.line(), conflict=False))
        except Exception as error:
            _log.exception("commit_fault")
            reason = f"{type(error).__name__}: {error}"
            self._post(CommitFailed(order.flush_id, reason, conflict=False))
        else:
            self._has_read_back = True
            self._health.ok()
            self._journal.committed(str(staged.id), order.shards)
            self._post(CommitDone(order.flush_id, manifest.ref))

    def _seed(self, newest: CommitRef) -> None:
        """What an earlier VM has committed need not be sent again; an evacuation does not wait for it."""
        if self._hurry.is_set():
            return
        try:
            for found in catalog.list_commits(self._store, self._keys, newest):
                if found.is_complete:
                    manifests = catalog.load(self._store, self._keys, found)
                    self._journal.seed([shard for made in manifests for shard in made.shards])
        except SwansongError as error:
            _log.warning("newest_commit_not_read", commit=str(newest), error=error.line())

    def _read_history(self, generation: int) -> None:
        """How often VMs of this run were lost; an evacuation does not wait for it."""
        if self._hurry.is_set():
            return
        try:
            history = catalog.history(
                self._store, self._keys, generation, gives_up=self._hurry.is_set
            )
        except SwansongError as error:
            _log.warning("history_not_read", error=error.line())
        else:
            if history != History():
                self._post(HistoryRead(history.observed_s, history.uncovered))

    def _check_fence(self, generation: int) -> None:
        try:
            commit.ensure_not_fenced(self._store, self._keys, generation)
        except FencedError as error:
            self._post(FenceFound(error.newer))
        except SwansongError as error:  # the next commit looks again
            self._health.failed(error.line())

    def _check_complete(self, order: CheckComplete) -> None:
        committed, whole = 0, None
        try:
            for ref in order.refs:
                found = commit.parts_committed(self._store, self._keys, ref, order.nodes)
                committed = found if ref == order.refs[0] else committed
                if found == order.nodes:
                    whole = ref
                    break
        except SwansongError as error:  # it is looked for again
            self._health.failed(error.line())
        finally:
            self._post(PartsCounted(order.refs[0], committed, whole))

    def _farewell(self, generation: int, data: bytes) -> None:
        stamp = self._wall().replace(":", "").replace("-", "")
        # Nonced: a verdict that got better within the same second is news.
        key = self._keys.farewell(generation, f"{stamp}-{secrets.token_hex(2)}")
        try:
            self._store.put(key, data, if_absent=True)
        except StoreError as error:
            _log.warning("farewell_not_stored", error=str(error))
