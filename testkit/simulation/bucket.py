# SPDX-License-Identifier: Apache-2.0
"""The bucket of the simulated worlds, and the daemon's thread that claims and commits in it.

The claims, the commits and their order are production code.  The store is a model that fails within its
contract: it refuses requests, it loses replies, and it carries out a request that failed later.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from swansong_bucket.errors import Exists, FencedError, NotFound, StoreError, Transient
from swansong_bucket.format import manifest
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import catalog, commit
from swansong_bucket.stores.base import (
    Body,
    Folders,
    ObjectInfo,
    ObjectStore,
    Page,
    Sink,
)
from swansongd.core.events import (
    CheckComplete,
    ClaimGeneration,
    CommitDone,
    CommitFailed,
    CommitManifest,
    Event,
    GenerationClaimed,
    PartsCounted,
    RunRead,
)
from swansongd.flush.claim_record import ClaimRecord
from swansongd.flush.claimant import Claimant, fence_of

KEYS = RunKeys("r")
RETRY_S = 2.0
"""Pause between two attempts to claim."""
LATE_S = 30.0
"""A request that failed may be carried out this much later."""


class Broken(AssertionError):
    """An invariant is violated; the message names it."""


def no_fault(fault: str, probability: float) -> bool:
    """The chances of a world without faults."""
    del fault, probability
    return False


class SimStore:
    """The reference model of a store: create-if-absent, faults on request, and a memory of every write.

    Args:
        chance: whether a fault with this name and probability happens now.
        later: carries something out after a delay in seconds; None: no request is carried out late.
    """

    url = "sim://store"

    def __init__(
        self,
        chance: Callable[[str, float], bool] = no_fault,
        later: Callable[[float, Callable[[], None]], None] | None = None,
    ) -> None:
        self.objects: dict[str, bytes] = {}
        self.names: list[str] = []
        """The keys in order."""
        self.new: list[str] = []
        """Keys that are not checked yet."""
        self._chance = chance
        self._later = later

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        if self._chance("refused", 0.2):
            raise Transient(f"{key}: 503")
        if if_absent and self._later is not None and self._chance("late_write", 0.2):
            self._later(LATE_S, lambda: self._write_if_absent(key, bytes(data)))
            raise Transient(f"{key}: timeout")
        if if_absent and key in self.objects:
            raise Exists(key)
        if self.objects.get(key, bytes(data)) != bytes(data):
            raise Broken(f"I2: {key} is written twice with different bytes")
        self.write(key, bytes(data))
        if self._chance("lost_reply", 0.2):
            raise Transient(f"{key}: reset")

    def _write_if_absent(self, key: str, data: bytes) -> None:
        if key not in self.objects:
            self.write(key, data)

    def write(self, key: str, data: bytes) -> None:
        if key not in self.objects:
            bisect.insort(self.names, key)
        self.objects[key] = data
        self.new.append(key)

    def get(self, key: str) -> bytes:
        if self._chance("refused", 0.1):
            raise Transient(f"{key}: 503")
        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key]

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        if self._chance("refused", 0.1):
            raise Transient("list: 503")
        return self._listed(prefix, after)

    def _listed(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        found = []
        first = bisect.bisect_left(self.names, prefix)
        if after:
            first = max(first, bisect.bisect_right(self.names, after))
        for key in self.names[first:]:
            if not key.startswith(prefix):
                break
            found.append(ObjectInfo(key, len(self.objects[key])))
        return iter(found)

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        del token  # the first page contains all
        return Page(list(self.list(prefix, after=after)), None)

    def folders(self, prefix: str, token: str | None) -> Folders:
        del token
        below = [key.removeprefix(prefix) for key in self.names if key.startswith(prefix)]
        return Folders(sorted({key.partition("/")[0] for key in below if "/" in key}), None)

    def head(self, key: str) -> ObjectInfo | None:
        return ObjectInfo(key, len(self.objects[key])) if key in self.objects else None

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        raise NotImplementedError

    def delete(self, key: str, *, if_tag: str = "") -> None:
        del if_tag  # a key is never written twice with different bytes
        if self._chance("refused", 0.1):
            raise Transient(f"{key}: 503")
        if self.objects.pop(key, None) is not None:
            self.names.remove(key)

    def delete_many(self, infos: Sequence[ObjectInfo]) -> Mapping[str, str]:
        for info in infos:  # in order: a run of the simulation can be repeated
            self.delete(info.key, if_tag=info.tag)
        return {}

    def create(self, key: str, body: Body) -> None:
        raise NotImplementedError

    def check(self) -> None:
        return None

    def warm(self) -> None:
        return None


class _View(SimStore):
    """The objects of another store, without its faults."""

    def __init__(self, store: SimStore) -> None:
        super().__init__()
        self.objects, self.names = store.objects, store.names


def restored(store: SimStore) -> Manifest | None:
    """The commit that a fresh reader of the bucket restores now; None if there is none."""
    view = _View(store)
    newest = commit.newest_whole_commit(view, KEYS)
    return None if newest is None else manifest_of(store, newest)


def manifest_of(store: SimStore, ref: CommitRef) -> Manifest | None:
    """The manifest of a commit, of any of its VMs; None if there is none."""
    view = _View(store)
    for found in catalog.list_commits(view, KEYS, ref):
        return manifest.decode(view.get(next(iter(found.manifest_keys.values()))))
    return None


def start_of(store: SimStore, generation: int) -> str:
    """The start that has claimed this generation; empty if no claim says so."""
    claim = catalog.claim_of(_View(store), KEYS, generation)
    return "" if claim is None else claim.start


def commit_event(
    store: ObjectStore, order: CommitManifest, claim: ClaimObject, claimant: Claimant
) -> Event:
    """Create the manifest by the production rules; returns the event for the daemon.

    Args:
        store: the bucket.
        order: of the daemon.
        claim: of the generation of the order.
        claimant: of this VM.
    """
    staged = order.staged
    made = Manifest(
        run="r",
        generation=order.generation,
        step=staged.id.step,
        kind=staged.kind,
        node=staged.node,
        nodes=staged.nodes,
        nonce=staged.id.nonce,
        shards=order.shards,
        parent=order.parent,
        health=staged.health,
        created="2030-01-01T00:00:00Z",
    )
    try:
        commit.commit(store, KEYS, made, claim, owns=claimant.owns)
    except FencedError as error:
        is_over = CommitFailed(order.flush_id, str(error), conflict=True)
        return claimant.fence_by_other(error) or is_over
    except Exists:
        return CommitFailed(order.flush_id, "taken", conflict=True)
    except StoreError as error:
        return CommitFailed(order.flush_id, str(error), conflict=False)
    return CommitDone(order.flush_id, made.ref)


class SimClaimant(Claimant):
    """The production claimant with its record in memory, where it outlives the daemon.

    Args:
        store: the bucket.
        record: of the earlier life of the daemon; None without one.
    """

    def __init__(self, store: ObjectStore, record: ClaimRecord | None, vm: str) -> None:
        nowhere = Path("/nonexistent")
        super().__init__(store, KEYS, nowhere, boot_id="boot", vm=vm, wall=lambda: "2030-01-01")
        self._record = record or self._record

    @property
    def record(self) -> ClaimRecord:
        """The record as the next life of the daemon reads it."""
        return self._record

    def _save(self, record: ClaimRecord) -> None:
        self._record = record


class Committer:
    """The committer's thread in one life of the daemon: it carries out one request after the other.

    Args:
        store: the bucket as this VM reaches it.
        record: see :class:`SimClaimant`.
        post: takes the events.
        after: calls a function after a random time, up to a number of seconds, if the daemon still lives.
        vm: id of the VM.
    """

    def __init__(
        self,
        store: SimStore,
        record: ClaimRecord | None,
        post: Callable[[Event], None],
        after: Callable[[float, Callable[[], None]], None],
        vm: str = "vm",
    ) -> None:
        self._store = store
        self.claimant = SimClaimant(store, record, vm)
        self._post = post
        self._after = after
        self._wanted: ClaimGeneration | None = None
        self._jobs: deque[tuple[float, Callable[[], bool]]] = deque()

    def read_run(self) -> None:
        """Find the newest commit, and then the claim of the recorded start."""

        def read() -> bool:
            try:
                newest, owner, is_sound = self._newest()
                claim = self.claimant.claim_of(self.claimant.boot_generation)
                if claim is not None:
                    self._ensure_found(claim)
            except FencedError as error:
                self._post(fence_of(error))
            except StoreError:
                return False
            self._post(RunRead(newest, owner, is_sound))
            return True

        self._add(read, 1.0)
        self._add(lambda: self._claims(self.claimant.resume), 0.3)

    def claim(self, request: ClaimGeneration) -> None:
        """Claim a generation; a newer request ends its retries."""
        self._wanted = request

        def claim() -> bool:
            if self._wanted is not request:
                return True
            return self._claims(lambda: self.claimant.claim(request), request.start_id)

        self._add(claim, 1.0)

    def withdraw_claim(self) -> None:
        """End the retries of the last claim."""
        self._wanted = None

    def _claims(self, attempt: Callable[[], commit.Claim | None], start_id: str = "") -> bool:
        """Whether the attempt is over: it has a claim, or none is possible."""
        try:
            claim = attempt()
            if claim is not None:
                newest, owner, is_sound = self._newest()
                self._ensure_found(claim.content)
                start_id, number = claim.content.start, claim.generation
                self._post(
                    GenerationClaimed(start_id, number, newest, owner, is_sound, claim.is_found)
                )
        except FencedError as error:
            self._post(fence_of(error, start_id))
        except StoreError:
            return False
        return True

    def commit(self, order: CommitManifest) -> None:
        """Create a manifest."""

        def create() -> bool:
            claim = self.claimant.claim_of(order.generation)
            if claim is None:
                reason = f"no start of this VM holds generation {order.generation}"
                self._post(CommitFailed(order.flush_id, reason, conflict=False))
            else:
                self._post(commit_event(self._store, order, claim, self.claimant))
            return True

        self._add(create, 0.3)

    def check_complete(self, order: CheckComplete) -> None:
        """Count the manifests of all VMs."""

        def count() -> bool:
            self._post(self._counted(order))
            return True

        self._add(count, 0.3)

    def _counted(self, order: CheckComplete) -> PartsCounted:
        claim = self.claimant.claim_of(order.newest.generation)
        try:
            if claim is None:
                return PartsCounted(order.newest, 0, None)
            committed, whole = commit.parts_committed(
                self._store, KEYS, order.newest, order.nodes, claim, after=order.after
            )
            if whole is None:
                return PartsCounted(order.newest, committed, None)
            is_sound = commit.are_all_sound(self._store, KEYS, whole)
        except FencedError as error:
            fence = self.claimant.fence_by_other(error)
            if fence is not None:
                self._post(fence)
            return PartsCounted(order.newest, 0, None)
        except StoreError:
            return PartsCounted(order.newest, 0, None)
        return PartsCounted(order.newest, committed, whole.ref, is_sound)

    def _ensure_found(self, claim: ClaimObject) -> None:
        commit.ensure_found(self._store, KEYS, claim, owns=self.claimant.owns)

    def _newest(self) -> tuple[CommitRef | None, str, bool]:
        near = self.claimant.recorded_generation
        newest = commit.newest_whole(self._store, KEYS, near=near)
        if newest is None:
            return None, "", True
        claim = catalog.claim_of(self._store, KEYS, newest.ref.generation)
        is_sound = commit.are_all_sound(self._store, KEYS, newest)
        return newest.ref, "" if claim is None else claim.start, is_sound

    def _add(self, job: Callable[[], bool], within_s: float) -> None:
        self._jobs.append((within_s, job))
        if len(self._jobs) == 1:
            self._next()

    def _next(self) -> None:
        within_s, job = self._jobs[0]

        def happens() -> None:
            if not job():
                self._after(RETRY_S, happens)
                return
            self._jobs.popleft()
            if self._jobs:
                self._next()

        self._after(within_s, happens)
