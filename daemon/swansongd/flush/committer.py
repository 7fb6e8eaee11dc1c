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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
from swansong import bounds, openat
from swansong.bounds import BoundsError

from swansongd.bucket import catalog, commit
from swansongd.bucket import farewell as farewells
from swansongd.bucket.claim import ClaimObject
from swansongd.bucket.farewell import Farewell
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import Manifest
from swansongd.core.cadence import History
from swansongd.core.events import (
    CheckComplete,
    ClaimGeneration,
    CommitDone,
    CommitFailed,
    CommitManifest,
    Conclude,
    Event,
    FenceFound,
    GenerationClaimed,
    HistoryRead,
    JoinGeneration,
    NewestDated,
    PartsCounted,
)
from swansongd.errors import CorruptError, Exists, FencedError, StoreError, SwansongError
from swansongd.flush.journal import UploadJournal
from swansongd.flush.store_health import StoreHealth
from swansongd.model import CheckpointId, CommitRef
from swansongd.stores.base import ObjectStore
from swansongd.stores.file.store import FileStore

_CLAIM_RETRY_S = 2.0
_CLAIM_RETRY_S_MAX = 10.0
_CLAIM, _COMMIT = "claim", "commit"
"""The operations whose outcome goes into the health of the store."""
_CLAIM_FILE = "claim.json"
_RECORD_BYTES_MAX = 256 * 2**10
_ABANDONED_MAX = 1000
"""Twice as many sets as a scan reports."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """The generation that this boot has claimed; lies in staging, and dies with it.

    The record alone proves nothing: it counts only if the claim object in the store carries its nonce, or
    the job start that it names.  It is written before each claim and again after it, so a daemon that was
    killed between the two recognises its own claim.
    """

    run: str
    store_url: str
    boot_id: str
    generation: int
    """0 before the first claim."""
    nonce: str
    job_start_id: str = ""
    """Of a job over several VMs, see :mod:`swansongd.core.nodes`."""
    next_nonce: str = ""
    """Of a claim that was ordered, and that may have been made; empty for none."""
    abandoned: tuple[CheckpointId, ...] = ()
    """Sets in staging that are not of the line of states, see :mod:`swansongd.core.lineage`."""
    store_id: str = ""
    """Of a store of files: the id in its marker, see :mod:`swansongd.stores.file.tree`."""

    def save(self, own_directory: Path) -> None:
        """Replace the record.

        Raises:
            OSError: it could not be written; the old one stands.
        """
        body = {name: getattr(self, name) for name in self.__slots__}
        body["abandoned"] = [str(abandoned) for abandoned in self.abandoned]
        own_fd = openat.open_directory(own_directory, owners={os.geteuid()})
        try:
            openat.replace_file(_CLAIM_FILE, json.dumps(body).encode(), dir_fd=own_fd)
        finally:
            os.close(own_fd)

    @classmethod
    def load(cls, own_directory: Path, *, is_of_any: bool = False) -> ClaimRecord | None:
        """None when this user wrote no record, or a field of the record is out of bounds.

        Args:
            is_of_any: the record may be another user's: root reads that of the daemon.
        """
        owners = None if is_of_any else {os.geteuid()}
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
                    body.get("generation"), "generation", 0, bounds.GENERATION_MAX
                ),
                nonce=bounds.text(body.get("nonce"), "nonce", bounds.ID_CHARS_MAX),
                job_start_id=bounds.text(
                    body.get("job_start_id"), "job_start_id", bounds.ID_CHARS_MAX
                ),
                next_nonce=bounds.text(
                    body.get("next_nonce", ""), "next_nonce", bounds.ID_CHARS_MAX
                ),
                abandoned=tuple(
                    _checkpoint_id(each)
                    for each in bounds.items(body.get("abandoned", []), "abandoned", _ABANDONED_MAX)
                ),
                store_id=bounds.identifier(body.get("store_id", ""), "store_id"),
            )
        except (OSError, BoundsError):
            return None

    def is_of(self, run: str, store_url: str) -> bool:
        """Whether it was made for this run and this store."""
        return (self.run, self.store_url) == (run, store_url)

    def is_of_claim(self, claim: ClaimObject) -> bool:
        """Whether this is the claim that the record is of."""
        own = ClaimObject(
            run=self.run,
            generation=self.generation,
            nonce=self.nonce,
            job_start_id=self.job_start_id,
        )
        return bool(self.nonce) and own.is_shared_with(claim)


def read_record(
    own_directory: Path, run: str, store_url: str, *, is_of_any: bool = False
) -> ClaimRecord:
    """The record of this run and store; without one, an empty record."""
    record = ClaimRecord.load(own_directory, is_of_any=is_of_any)
    if record is None or not record.is_of(run, store_url):
        return ClaimRecord(run, store_url, "", 0, "")
    return record


def expect_recorded_store(store: ObjectStore, own_directory: Path, run: str) -> None:
    """Have a store of files compare its id with the one that the daemon of this VM recorded, if any.

    Root reads the record of the daemon; other users can read only their own.
    """
    if isinstance(store, FileStore):
        record = read_record(own_directory, run, store.url, is_of_any=os.geteuid() == 0)
        store.expect(record.store_id)


def _checkpoint_id(value: object) -> CheckpointId:
    """The id that ``str(CheckpointId)`` gave.

    Raises:
        BoundsError: it is not one.
    """
    step, dot, nonce = bounds.text(value, "abandoned", bounds.ID_CHARS_MAX + 20).partition(".")
    if not (dot and step.isascii() and step.isdigit() and len(step) <= len(str(bounds.STEP_MAX))):
        raise BoundsError(f"abandoned contains {bounds.shown(value)}, which is not a set")
    return CheckpointId(int(step), nonce)


class Committer:
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
        several_vms: whether the generation is that of a job start of the job, see :meth:`join`.
        store_id: reads the id of a store of files; recorded with the claim.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        own_directory: Path,
        post: Callable[[Event], None],
        *,
        journal: UploadJournal,
        boot_id: str,
        wall: Callable[[], str],
        health: StoreHealth,
        several_vms: bool = False,
        store_id: Callable[[], str] = lambda: "",
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
        self._store_id = store_id
        record = read_record(own_directory, keys.run, store.url)
        self.sealed_under = record.generation or None
        """Generation of the sets that earlier lives left in staging; None if unknown."""
        self.abandoned = frozenset(record.abandoned)
        """Sets that earlier lives left in staging and that are not of the line of states."""
        if record.boot_id != boot_id or bool(record.job_start_id) != several_vms:
            # Another boot is another VM; what lies in staging is still of that generation.
            record = replace(record, boot_id=boot_id, nonce="", job_start_id="", next_nonce="")
        self._record = record
        self._held: ClaimObject | None = None
        """The claim of the generation that this VM commits under."""
        self.job_start_id = record.job_start_id
        """The one that this boot has joined last; empty before it has."""
        self._has_read_back = False
        """Whether a manifest of this life was read back, and was the one that was written."""
        self._jobs: queue.Queue[Callable[[], object]] = queue.Queue()
        self._stop = threading.Event()
        self._idle = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)

    def start(self) -> None:
        """Claim a generation as soon as the store lets us, then take orders."""
        self._thread.start()

    def expedite(self) -> None:
        """There is a notice: do not sleep over the claim."""
        self._hurry.set()

    def commit(self, order: CommitManifest) -> None:
        """Create the manifest; posts CommitDone, CommitFailed or FenceFound."""
        self._jobs.put(lambda: self._commit(order))

    def farewell(
        self,
        generation: int,
        conclusion: Conclude,
        timeline: Sequence[Mapping[str, object]],
        *,
        left_out: int = 0,
    ) -> None:
        """Create the farewell of an evacuation.

        Args:
            timeline: its entries, oldest first; read before this returns.
            left_out: entries that were removed from it.
        """
        farewell = Farewell(
            run=self._keys.run,
            generation=generation,
            conclusion=conclusion,
            timeline=timeline,
            left_out=left_out,
            written=self._wall(),
        )
        data = farewells.encode(farewell)
        self._jobs.put(lambda: self._farewell(generation, data))

    def check_fence(self) -> None:
        """Look whether another VM has taken the run over; posts FenceFound if so."""
        self._jobs.put(self._check_fence)

    def claim_next(self, order: ClaimGeneration) -> None:
        """Claim another generation after our own; posts GenerationClaimed or FenceFound."""

        overtaken = self._held

        def claim() -> ClaimObject:
            nonlocal overtaken
            if overtaken is not None:
                commit.ensure_not_fenced(self._store, self._keys, overtaken)
                overtaken = None  # from here on, a newer one may be our own
            return self._claim_new()

        def run() -> None:
            # Before the store is asked: were the daemon killed now, the sets would count again.
            self._note_claim(order.abandoned)
            self._claim(claim, is_first=False)

        self._jobs.put(run)

    def join(self, order: JoinGeneration) -> None:
        """Share the generation of this job start; posts GenerationClaimed or FenceFound."""
        self.job_start_id = order.job_start_id
        self._jobs.put(lambda: self._join(order))

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
        may_claim = not self._several_vms or bool(self._record.job_start_id)
        if may_claim and not self._claim(self._claimed) and not self._several_vms:
            return
        while not self._stop.is_set():
            job = self._jobs.get()
            try:
                job()
            except Exception:
                _log.exception("committer_fault")

    # ------------------------------------------------------------------ the claim

    def _claim(self, find: Callable[[], ClaimObject], *, is_first: bool = True) -> bool:
        wait_s = _CLAIM_RETRY_S
        refused = ""
        job_start_id = self.job_start_id
        while not self._stop.is_set() and job_start_id == self.job_start_id:
            try:
                self._store.check()
                self._note_store()
                # Before the claim: a failure after the claim would take another number at each retry.
                newest = commit.newest_whole_commit(self._store, self._keys)
                self._held = find()
            except FencedError as error:
                self._post_fence(error)
                return False
            except CorruptError as error:
                if error.line() != refused:
                    refused = error.line()
                    _log.error("claim_refused", reason=str(error), hint=error.hint)
                self._health.failed(_CLAIM, error.line())
            except SwansongError as error:
                self._health.failed(_CLAIM, error.line())
            except Exception as error:
                _log.exception("claim_fault")
                self._health.failed(_CLAIM, f"{type(error).__name__}: {error}")
            else:
                self._health.ok(_CLAIM)
                generation = self._held.generation
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

    def _join(self, order: JoinGeneration) -> None:
        if order.job_start_id != self.job_start_id:
            return  # yet another one has begun meanwhile
        self._note_claim(order.abandoned, order.job_start_id)
        self._claim(lambda: self._claim_new(order.job_start_id), is_first=False)

    def _claimed(self) -> ClaimObject:
        record = self._record
        if record.next_nonce:
            return self._claim_ordered(record)
        if not record.nonce:
            return self._claim_new(record.job_start_id)
        claim = catalog.claim_of(self._store, self._keys, record.generation)
        if claim is None or not record.is_of_claim(claim):
            _log.warning(
                "claim_record_refused",
                generation=record.generation,
                claim=f"{self._store.url}/{self._keys.generation(record.generation)}",
                hint="The claim is gone, or is not the one that this VM made; another one is made",
            )
            return self._claim_new(record.job_start_id)
        # A daemon that was restarted continues under its number, unless it was overtaken.
        commit.ensure_not_fenced(self._store, self._keys, claim)
        return claim

    def _claim_ordered(self, record: ClaimRecord) -> ClaimObject:
        """The generation that was ordered before a failure or a restart: claimed by then, or claimed now."""
        if not self._several_vms:
            newest = catalog.newest_generation(self._store, self._keys, above=record.generation)
            is_newer = newest > record.generation
            claim = catalog.claim_of(self._store, self._keys, newest) if is_newer else None
            if claim is not None and claim.nonce == record.next_nonce:
                self._save(replace(record, generation=newest, nonce=claim.nonce, next_nonce=""))
                return claim
            if record.nonce and is_newer:
                raise FencedError(record.generation, newest)
        return self._claim_new(record.job_start_id)

    def _note_claim(self, abandoned: tuple[CheckpointId, ...], job_start_id: str = "") -> None:
        """Record, before the claim, that a generation without these sets is to begin."""
        self._save(
            replace(
                self._record,
                job_start_id=job_start_id,
                next_nonce=secrets.token_hex(16),
                abandoned=abandoned[-_ABANDONED_MAX:],
            )
        )

    def _note_store(self) -> None:
        """Record which store this is, before the first claim in it."""
        if self._record.store_id != self._store_id():
            self._save(replace(self._record, store_id=self._store_id()))

    def _save(self, record: ClaimRecord) -> None:
        self._record = record
        try:
            record.save(self._own_directory)
        except OSError as error:
            _log.warning(
                "claim_not_recorded",
                error=str(error),
                hint="After a restart the daemon will claim another generation, which is harmless",
            )

    def _claim_new(self, job_start_id: str = "") -> ClaimObject:
        url = self._store.url
        if not self._record.next_nonce:
            self._save(replace(self._record, next_nonce=secrets.token_hex(16)))
        nonce = self._record.next_nonce
        identity = {"boot_id": self._boot_id, "host": platform.node(), "claimed": self._wall()}
        claim = commit.claim_generation(
            self._store, self._keys, identity=identity, nonce=nonce, job_start_id=job_start_id
        )
        if not claim.honours_if_absent:
            _log.error(
                "store_ignores_create_if_absent",
                url=url,
                hint="Two VMs with this run could overwrite each other's commits; use another store",
            )
        record = replace(
            self._record,
            generation=claim.generation,
            nonce=nonce,
            job_start_id=job_start_id,
            next_nonce="",
        )
        self._save(record)
        return claim.content

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
            held = self._held_claim()
            commit.commit(self._store, self._keys, manifest, held, reads_back=reads_back)
        except FencedError as error:
            self._post_fence(error)
        except Exists:
            reason = f"another checkpoint is committed as {manifest.ref}"
            self._post(CommitFailed(order.flush_id, reason, conflict=True))
        except BoundsError as error:  # and never can be: the set is void
            self._post(CommitFailed(order.flush_id, str(error), conflict=True))
        except SwansongError as error:
            self._health.failed(_COMMIT, error.line())
            self._post(CommitFailed(order.flush_id, error.line(), conflict=False))
        except Exception as error:
            _log.exception("commit_fault")
            reason = f"{type(error).__name__}: {error}"
            self._post(CommitFailed(order.flush_id, reason, conflict=False))
        else:
            self._has_read_back = True
            self._health.ok(_COMMIT)
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
                    self._date(newest, manifests[0].created)
        except SwansongError as error:
            _log.warning("newest_commit_not_read", commit=str(newest), error=error.line())

    def _date(self, newest: CommitRef, created: str) -> None:
        then_s, now_s = catalog.instant_s(created), catalog.instant_s(self._wall())
        if then_s is not None and now_s is not None:
            self._post(NewestDated(newest, max(0.0, now_s - then_s)))

    def _read_history(self, generation: int) -> None:
        """How often VMs of this run were lost; an evacuation does not wait for it."""
        if self._hurry.is_set():
            return
        try:
            history = catalog.history(
                self._store, self._keys, generation, is_cancelled=self._hurry.is_set
            )
        except SwansongError as error:
            _log.warning("history_not_read", error=error.line())
        else:
            if history != History():
                self._post(HistoryRead(history.observed_s, history.uncovered))

    def _held_claim(self) -> ClaimObject:
        assert self._held is not None, "the core orders this after GenerationClaimed"
        return self._held

    def _post_fence(self, error: FencedError) -> None:
        self._post(FenceFound(error.newer, is_same_number=error.newer == error.own))

    def _check_fence(self) -> None:
        try:
            commit.ensure_not_fenced(self._store, self._keys, self._held_claim())
        except FencedError as error:
            self._post_fence(error)
        except SwansongError as error:  # the next commit looks again
            self._health.failed(_COMMIT, error.line())

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
            self._health.failed(_COMMIT, error.line())
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
