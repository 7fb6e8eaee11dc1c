# SPDX-License-Identifier: Apache-2.0
"""The committer: one thread that writes claims, manifests and farewells, in order.

The flush has other threads, so a manifest never waits behind data.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
from swansong.bounds import BoundsError
from swansong_bucket.errors import (
    CorruptError,
    Exists,
    FencedError,
    Stopped,
    StoreError,
    SwansongError,
)
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format import wall
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.farewell import Farewell
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.loss_records import EvacuationRecord, History, LastReport
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import catalog, commit
from swansong_bucket.runs.commit import Claim
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.util.threads import lasting_thread

from swansongd.core.events import (
    CheckComplete,
    ClaimGeneration,
    CommitDone,
    CommitFailed,
    CommitManifest,
    Conclude,
    FenceFound,
    GenerationClaimed,
    HistoryRead,
    PaceRead,
    PartsCounted,
    RunRead,
)
from swansongd.flush.background import Background
from swansongd.flush.claimant import Claimant, fence_of
from swansongd.flush.known import KnownChunks
from swansongd.flush.store_health import StoreHealth
from swansongd.observe.facts import NewestDated, Observed

_CLAIM_RETRY_S = 2.0
_CLAIM_RETRY_S_MAX = 10.0
_CLAIM_RETRY_URGENT_S = 0.5
_READ_RETRY_S = 2.0
"""Time between two looks whether work that waits for the end of an evacuation may be done."""
FAREWELLS_MAX = 64
"""Farewells that wait for their turn, which may be weeks while each claim fails: the oldest one gives way."""
_CLAIM, _COMMIT, _COUNT = "claim", "commit", "count"
"""The operations that are reported to the health of the store.  Each is repeated until it succeeds."""
_OBSOLETE = (
    "chunks that only an earlier commit names, or that no commit has named for too long, are sent"
)

_log = structlog.get_logger(__name__)


class Committer:
    """Claims a generation, commits sets, and writes farewells.

    The methods return immediately; the committer's thread carries the requests out in order.

    Args:
        store: retries failed requests until the deadline.
        background: the same store, for work on earlier commits.
        keys: of the run.
        post: receives the outcomes.
        claimant: claims generations for this boot.
        known: is informed of commits.
        wall: wall clock in UTC, as text; for people.
        health: is informed of every success and failure.
        committed: takes each manifest that was committed.
        prepare: called with each manifest before it is created; raises nothing.
        settle: called before a set is committed; afterwards the known chunks are those that the store has.
    """

    def __init__(
        self,
        store: ObjectStore,
        background: Background,
        keys: RunKeys,
        post: Callable[[Observed], None],
        claimant: Claimant,
        *,
        known: KnownChunks,
        wall: Callable[[], str],
        health: StoreHealth,
        committed: Callable[[Manifest], None] = lambda _manifest: None,
        prepare: Callable[[Manifest], object] = lambda _manifest: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._background = background
        self._keys = keys
        self._post = post
        self._claimant = claimant
        self._known = known
        self._wall = wall
        self._health = health
        self._committed = committed
        self._prepare = prepare
        self._settle = settle
        self.owns = claimant.owns
        self.starts = claimant.starts
        """The starts of the training that earlier lives of the daemon have recorded."""
        self._wanted: ClaimGeneration | None = None
        """The last claim that was requested, unless it was withdrawn."""
        self._has_read_back = False
        """Whether this daemon has read a manifest back and found the bytes that it had written."""
        self._farewells = 0
        """Number of farewells that were requested."""
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], object]] = deque(maxlen=FAREWELLS_MAX)
        """The farewells that wait, each with one job."""
        self._checks_fence = False
        """Whether a check of the fence waits for its turn."""
        self.refusal = ""
        """Why no generation can be claimed before an operator acts; empty: the next attempt may succeed."""
        self._jobs: queue.Queue[Callable[[], object]] = queue.Queue()
        self._reads: deque[Callable[[], object]] = deque()
        """Work on earlier commits, done while there is no request and no evacuation is open."""
        self._read: CommitRef | None = None
        """The commit that was read last."""
        self._stop = threading.Event()
        self._wake = threading.Event()
        """Ends the wait before the next attempt at a claim."""
        self._thread = lasting_thread("committer", self._run)

    def start(self) -> None:
        """Read the run as soon as the store permits it, then carry out requests."""
        self._thread.start()

    def expedite(self) -> None:
        """A notice arrived: cut the claim's backoff short."""
        self._wake.set()

    def commit(self, request: CommitManifest) -> None:
        """Create the manifest; posts CommitDone, CommitFailed or FenceFound."""
        self._jobs.put(lambda: self._commit(request))

    def farewell(
        self,
        generation: int,
        conclusion: Conclude,
        evacuation: EvacuationRecord,
        *,
        training: LastReport | None = None,
        digests: Mapping[int, tuple[str, ...]] | None = None,
    ) -> None:
        """Create the farewell of an evacuation.

        One that announces no verdict is dropped if a newer one is requested before its turn: during an outage
        of the store, a manifest would wait behind all of them.  One before any verdict has a thread of its
        own: the manifest that the verdict needs does not wait for it.

        Args:
            evacuation: read before this returns.
            training: the last step; None if no trainer reported one.
            digests: of the newest steps, by rank.
        """
        farewell = Farewell(
            run=self._keys.run,
            generation=generation,
            conclusion=conclusion,
            evacuation=evacuation,
            training=training,
            digests=digests or {},
            written=self._wall(),
        )
        data = farewells.encode(farewell)
        self._farewells += 1
        number = self._farewells

        def run() -> None:
            if conclusion.is_final or number == self._farewells:
                self._farewell(generation, data)

        if conclusion.is_foretold:
            threading.Thread(target=run, name="farewell", daemon=True).start()
            return
        with self._lock:
            if len(self._waiting) < FAREWELLS_MAX:
                self._jobs.put(self._next_farewell)
            self._waiting.append(run)

    def check_fence(self) -> None:
        """Check whether another VM has taken the run over; posts FenceFound if so."""
        if not self._checks_fence:
            self._checks_fence = True
            self._jobs.put(self._check_fence)

    def claim(self, request: ClaimGeneration) -> None:
        """Claim a generation for this start; posts GenerationClaimed or FenceFound.

        A newer request ends its retries.
        """
        self._wanted = request
        self.refusal = ""  # of an earlier claim: an operator may have acted since
        self._jobs.put(lambda: self._claim_for(request))

    def withdraw_claim(self) -> None:
        """End the last claim that was requested, unless its create is under way."""
        self._wanted = None
        self._wake.set()

    def check_complete(self, request: CheckComplete) -> None:
        """Count the manifests of all VMs; always posts PartsCounted."""
        self._jobs.put(lambda: self._check_complete(request))

    def drain(self, timeout_s: float) -> bool:
        """Wait until all earlier requests are carried out; False on timeout."""
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(timeout_s)

    def close(self) -> None:
        """Stop after the current request."""
        self._stop.set()
        self._wake.set()

    def _run(self) -> None:
        self._read_run()
        while not self._stop.is_set():
            try:
                self._next_job()()
            except Exception:
                _log.exception("committer_fault")

    def _next_job(self) -> Callable[[], object]:
        while True:
            may_read = bool(self._reads) and not self._background.is_urgent()
            wait_s = 0.0 if may_read else _READ_RETRY_S if self._reads else None
            try:
                return self._jobs.get(timeout=wait_s)
            except queue.Empty:
                if may_read:
                    return self._reads.popleft()

    # ------------------------------------------------------------------ claims

    def _read_run(self) -> None:
        """Find the newest commit, and the claim of the recorded start, without which nothing is claimed."""
        fences: list[FenceFound] = []

        def read() -> None:
            newest, owner, is_sound = self._newest()
            claim = self._claimant.claim_of(self._claimant.boot_generation)
            try:
                if claim is not None:
                    self._ensure_found(claim)
            except FencedError as error:
                fences.append(fence_of(error))
                self._post(fences[0])
            self._post(RunRead(newest, owner, is_sound))
            self._reads.append(self._read_history)
            self._learn_from(newest)

        def resume() -> None:
            claim = self._claimant.resume()
            if claim is not None:
                self._post_claimed(claim)

        if self._retried(read, lambda: False) and not fences:
            self._retried(resume, lambda: False)

    def _claim_for(self, request: ClaimGeneration) -> None:
        def is_wanted() -> bool:
            return self._wanted is request

        def claim() -> None:
            with suppress(Stopped):
                self._post_claimed(self._claimant.claim(request, is_wanted))

        self._retried(claim, lambda: not is_wanted(), request.start_id)

    def _post_claimed(self, claim: Claim) -> None:
        # After the claim: with all commits of earlier starts.
        newest, owner, is_sound = self._newest()
        self._ensure_found(claim.content)
        self._post(
            GenerationClaimed(
                claim.content.start,
                claim.generation,
                newest,
                owner,
                is_sound=is_sound,
                is_found=claim.is_found,
            )
        )
        self._learn_from(newest)

    def _ensure_found(self, claim: ClaimObject) -> None:
        """Check that the commits that were just listed are not from after the claim of another VM."""
        commit.ensure_found(self._store, self._keys, claim, owns=self._claimant.owns)

    def _newest(self) -> tuple[CommitRef | None, str, bool]:
        """The newest whole commit, the start that owns its generation, and whether all GPUs were sound."""
        near = self._claimant.recorded_generation
        newest = commit.newest_whole(self._store, self._keys, near=near)
        if newest is None:
            return None, "", True
        claim = catalog.claim_of(self._store, self._keys, newest.ref.generation)
        owner = "" if claim is None else claim.start
        try:
            return newest.ref, owner, commit.are_all_sound(self._store, self._keys, newest)
        except CorruptError:
            return newest.ref, owner, False

    def _retried(
        self, attempt: Callable[[], None], is_over: Callable[[], bool], start_id: str = ""
    ) -> bool:
        """Retry until the attempt succeeds; False if fenced, closed, or no longer wanted."""
        wait_s = _CLAIM_RETRY_S
        while True:
            self._wake.clear()  # before the look: close() sets the stop first
            if self._stop.is_set() or is_over():
                if not self.refusal:
                    self._health.given_up(_CLAIM)
                return False
            try:
                self._store.check()
                self._claimant.record_store()
                attempt()
            except FencedError as error:
                self._post(fence_of(error, start_id))
                return False
            except CorruptError as error:
                if error.line() != self.refusal:
                    self.refusal = error.line()
                    _log.error("claim_refused", reason=str(error), hint=error.hint)
                self._health.failed(_CLAIM, error.line())
            except SwansongError as error:
                self._health.failed(_CLAIM, error.line())
            except Exception as error:
                _log.exception("claim_fault")
                self._health.failed(_CLAIM, f"{type(error).__name__}: {error}")
            else:
                self.refusal = ""
                self._health.ok(_CLAIM)
                return True
            self._wake.wait(_CLAIM_RETRY_URGENT_S if self._background.is_urgent() else wait_s)
            wait_s = min(2 * wait_s, _CLAIM_RETRY_S_MAX)

    def _learn_from(self, newest: CommitRef | None) -> None:
        if newest is not None and newest != self._read:
            self._read = newest
            self._known.superseded(newest)
            self._reads.append(partial(self._read_newest_commit, newest))

    def _check_fence(self) -> None:
        self._checks_fence = False
        claim = self._claimant.newest
        if claim is None:
            return
        try:
            commit.ensure_not_fenced(self._store, self._keys, claim, owns=self._claimant.owns)
        except FencedError as error:
            self._post(fence_of(error))
        except SwansongError as error:  # the next commit checks again
            _log.warning("fence_not_checked", kind=error.kind, error=error.line())

    # ------------------------------------------------------------------ earlier commits

    def _read_newest_commit(self, newest: CommitRef) -> None:
        """Post the age and the pace of the newest commit.

        Reads one manifest: if each VM read all of them, the requests would grow with the square of the VMs.
        A manifest does not make its chunks known: another writer may have planted it together with an object
        that has other bytes than its name says.  Only a download checks the bytes.
        """
        try:
            for found in catalog.list_commits(self._background, self._keys, newest):
                if found.is_complete:
                    first = catalog.load_node(self._background, self._keys, found, 0)
                    self._date(newest, first.created)
                    if first.pace:
                        self._post(PaceRead(first.pace))
        except Stopped:
            self._reads.append(partial(self._read_newest_commit, newest))
        except SwansongError as error:
            _log.warning(
                "newest_commit_not_read", commit=str(newest), kind=error.kind, error=error.line()
            )

    def _date(self, newest: CommitRef, created: str) -> None:
        then_s, now_s = wall.instant_s(created), wall.instant_s(self._wall())
        if then_s is not None and now_s is not None:
            self._post(NewestDated(newest, max(0.0, now_s - then_s)))

    def _read_history(self) -> None:
        """Post how often VMs of this run were lost."""
        try:
            generation = self._claimant.boot_generation or (
                catalog.newest_generation(self._background, self._keys) + 1
            )
            own_id = self._claimant.vm
            history = catalog.history(self._background, self._keys, generation, own_id)
        except Stopped:
            self._reads.append(self._read_history)
        except SwansongError as error:
            _log.warning("history_not_read", kind=error.kind, error=error.line())
        else:
            if history != History():
                self._post(HistoryRead(history.observed_s, history.uncovered))

    # ------------------------------------------------------------------ commits and farewells

    def _commit(self, request: CommitManifest) -> None:
        def failed(reason: str, **facts: Any) -> None:
            self._post(CommitFailed(request.flush_id, reason, **facts))

        staged = request.staged
        self._settle()
        self._known.forget_prunable()
        if not self._known.holds(e.chunk for shard in request.shards for e in shard.extents):
            failed(_OBSOLETE, conflict=False, is_obsolete=True)
            return
        claim = self._claimant.claim_of(request.generation)
        if claim is None:  # the bucket was emptied: the start claims another generation
            reason = f"no start of this VM holds generation {request.generation}"
            failed(reason, conflict=False, kind=FencedError.kind)
            return
        manifest = Manifest(
            run=self._keys.run,
            generation=request.generation,
            step=staged.id.step,
            kind=staged.kind,
            node=staged.node,
            nodes=staged.nodes,
            nonce=staged.id.nonce,
            shards=request.shards,
            parent=request.parent,
            framework=staged.framework,
            health=staged.health,
            trainer=staged.trainer,
            pace=request.pace,
            created=self._wall(),
        )
        try:
            self._prepare(manifest)
            commit.commit(
                self._store,
                self._keys,
                manifest,
                claim,
                owns=self._claimant.owns,
                reads_back=not self._has_read_back,
            )
        except FencedError as error:
            fence = self._claimant.fence_by_other(error)
            if fence is not None:
                self._post(fence)
            else:  # only the start of this set is over
                failed(str(error), conflict=True, kind=error.kind)
        except Exists as error:
            reason = f"another checkpoint is committed as {manifest.ref}"
            failed(reason, conflict=True, kind=error.kind)
        except BoundsError as error:  # a retry would fail too: the set is void
            failed(str(error), conflict=True, kind="bounds")
        except SwansongError as error:
            self._health.failed(_COMMIT, error.line())
            failed(error.line(), conflict=False, kind=error.kind)
        except Exception as error:
            _log.exception("commit_fault")
            failed(f"{type(error).__name__}: {error}", conflict=False)
        else:
            self._has_read_back = True
            self._health.ok(_COMMIT)
            self._known.committed(request.shards, manifest.ref)
            self._post(CommitDone(request.flush_id, manifest.ref))
            self._committed(manifest)

    def _check_complete(self, request: CheckComplete) -> None:
        counted = PartsCounted(request.newest, 0, None)
        claim = self._claimant.claim_of(request.newest.generation)
        try:
            if claim is None:
                return  # the bucket was emptied: the start claims another generation
            committed, whole = commit.parts_committed(
                self._store, self._keys, request.newest, request.nodes, claim, after=request.after
            )
            counted = PartsCounted(request.newest, committed, None)
            if whole is not None:
                is_sound = commit.are_all_sound(self._store, self._keys, whole)
                counted = replace(counted, whole=whole.ref, is_sound=is_sound)
        except FencedError as error:
            fence = self._claimant.fence_by_other(error)
            if fence is not None:
                self._post(fence)
        except SwansongError as error:  # the core requests the check again
            self._health.failed(_COUNT, error.line())
        else:
            self._health.ok(_COUNT)
        finally:
            self._post(counted)

    def _next_farewell(self) -> None:
        with self._lock:
            write = self._waiting.popleft()
        write()

    def _farewell(self, generation: int, data: bytes) -> None:
        stamp = self._wall().replace(":", "").replace("-", "")
        # With a nonce: a verdict can improve within the same second.
        key = self._keys.farewell(generation, f"{stamp}-{secrets.token_hex(4)}")
        try:
            self._store.put(key, data, if_absent=True)
        except StoreError as error:
            _log.warning("farewell_not_stored", kind=error.kind, error=str(error))
