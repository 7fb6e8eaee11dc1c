# SPDX-License-Identifier: Apache-2.0
"""Histories of a run on each server: all that was committed and protected comes back, byte for byte.

``make test-stores`` runs them on other projects' servers; ``SWANSONG_HISTORY_COMMITS=300`` makes them longer.
"""

from __future__ import annotations

import os
import queue
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from swansong_bucket.errors import NothingToRestore, Permanent, SwansongError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CheckpointId, CheckpointKind, CommitRef, Staged
from swansong_bucket.retention.prune import prune
from swansong_bucket.runs import catalog, pins
from swansong_bucket.runs import commit as commits
from swansong_bucket.runs.pins import Pin
from swansong_bucket.runs.signing import signed
from swansong_bucket.stores.base import Body, ObjectStore, Page
from swansong_bucket.stores.wrappers.forwarding import Forwarding
from swansong_bucket.transfer.restore import Selection, restore
from swansong_bucket.transfer.target import RestoreTarget
from swansong_tools.upkeep.verify import verify
from swansongd.core.events import Event, Flushed, FlushFailed
from swansongd.flush.cutting import ChunkLayout
from swansongd.flush.engine import FlushEngine
from swansongd.flush.known import KnownChunks
from swansongd.staging import scan

from testkit.committed import manifest_of, tree
from testkit.records import KEY, NO_RULE
from testkit.staged import ME
from testkit.store_backends import OURS, SERVERS, retrying

KEYS = RunKeys("r")
COMMITS = int(os.environ.get("SWANSONG_HISTORY_COMMITS", "16"))
DAMAGES = max(4, COMMITS // 5)
CHUNK_BYTES = 2**14
NAMES = [
    "memory",
    "gcs",
    *(name for name in SERVERS if os.environ.get("SWANSONG_STORES") and name not in OURS),
]
"""The contract shows each call on each server, so ``make test`` has two of them."""
RULES = replace(NO_RULE, keep_last=4, keep_within_s=0.0, keep_best=2)

Files = dict[str, bytes]


class PowerCut(Forwarding):
    """The same store, which refuses all requests after a number of them."""

    def __init__(self, store: ObjectStore, requests: float) -> None:
        super().__init__(store)
        self._left = requests
        self._lock = threading.Lock()

    def _request(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                raise Permanent("the power is off")

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._request()
        super().put(key, data, if_absent=if_absent)

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        self._request()
        return super().page(prefix, token, after=after)

    def delete(self, key: str, *, if_tag: str = "") -> None:
        self._request()
        super().delete(key, if_tag=if_tag)

    def create(self, key: str, body: Body) -> None:
        self._request()
        super().create(key, body)


class History:
    """A run with many VMs, and what it must contain."""

    def __init__(self, store: ObjectStore, place: Path, seed: str) -> None:
        self.store = store
        self.place = place
        self.random = random.Random(seed)
        self.content: dict[CommitRef, Files] = {}
        self.pinned: set[CommitRef] = set()
        self.step = self.vms = self.cuts = self.prunes = 0
        self.files: Files = {"deep/er/meta": b"1", "empty": b"", "model": self._noise(5)}
        self._begin()

    def _noise(self, chunks: int) -> bytes:
        return self.random.randbytes(chunks * CHUNK_BYTES - 7)

    def _begin(self) -> None:
        """The next VM, which knows the newest commit from its manifests."""
        self.vms += 1
        self.staging = self.place / f"vm-{self.vms}"
        own = self.staging / scan.OWN_DIRECTORY
        own.mkdir(mode=0o700, parents=True)
        start = f"start-{self.vms}"
        self.claim = commits.claim_generation(self.store, KEYS, start_id=start, identity={}).content
        self.known = KnownChunks(own, run="r", store_url=self.store.url, is_data=KEYS.is_data)
        newest = commits.newest_whole_commit(self.store, KEYS)
        if newest is not None:
            (found,) = catalog.list_commits(self.store, KEYS, newest)
            (manifest,) = catalog.load(self.store, KEYS, found)
            self.known.seed(newest, manifest.shards)

    def _cut(self) -> ObjectStore:
        """The store, whose power is cut soon, or is not."""
        is_cut = self.random.random() < 0.15
        return PowerCut(self.store, self.random.randrange(12) if is_cut else float("inf"))

    def commit(self) -> None:
        """Flush and commit the next set, with some of the bytes of the one before."""
        self.step += self.random.randint(1, 3)
        model = bytearray(self.files["model"])
        for _ in range(self.random.randint(0, 2)):
            model[self.random.randrange(len(model))] ^= 1
        self.files = {**self.files, "model": bytes(model), "deep/er/meta": b"%d" % self.step}
        directory = f"step-{self.step:012d}.aa"
        for path, data in self.files.items():
            file = self.staging / directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        staged = Staged(
            id=CheckpointId(self.step, "aa"),
            directory=directory,
            kind=CheckpointKind.PERIODIC,
            files=scan.listing(self.staging, directory, ME),
        )
        store = self._cut()
        ref = CommitRef(self.claim.generation, self.step)
        try:
            flushed = self._flushed(store, staged)
            health = {"loss": self.random.random()}
            made = manifest_of(
                *flushed.shards, generation=ref.generation, step=ref.step, nonce="aa", health=health
            )
            commits.commit(store, KEYS, made, self.claim)
        except SwansongError:
            self.cuts += 1
            if any(found.ref == ref for found in catalog.list_commits(self.store, KEYS)):
                self.content[ref] = self.files
            self._begin()
        else:
            self.known.committed(flushed.shards, ref)
            self.content[ref] = self.files

    def _flushed(self, store: ObjectStore, staged: Staged) -> Flushed:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        engine = FlushEngine(
            store,
            KEYS,
            self.staging,
            events.put,
            known=self.known,
            layout=ChunkLayout(CHUNK_BYTES, 4),
        )
        engine.start(str(self.step), staged, self.claim.generation)
        while not isinstance(event := events.get(timeout=60), Flushed):
            if isinstance(event, FlushFailed):
                raise Permanent(event.reason)
        return event

    def pin(self) -> None:
        ref = self.random.choice(sorted(self.content))
        name = f"p{ref.step}"
        pins.create(self.store, KEYS, Pin(run="r", name=name, ref=ref))
        self.pinned.add(ref)

    def prune(self) -> None:
        """Delete by the rules, perhaps until the power is cut; the newest and the pinned commits stay."""
        self.prunes += 1
        foretold = prune(self.store, KEYS, RULES, now_wall_s=0.0, is_dry_run=True)
        kept = {decision.ref for decision in foretold.decisions if decision.reasons}
        try:
            prune(self._cut(), KEYS, RULES, now_wall_s=0.0)
        except SwansongError:
            self.cuts += 1
        left = {found.ref for found in catalog.list_commits(self.store, KEYS)}
        assert {max(self.content), *self.pinned} <= kept <= left <= set(self.content)
        self.content = {ref: files for ref, files in self.content.items() if ref in left}

    def restored(self, to: Path, step: int | None = None) -> CommitRef:
        """Restore, and compare; returns the commit."""
        found = restore(self.store, KEYS, RestoreTarget(to), Selection(step=step))
        assert tree(to) == self.content[found.ref]
        return found.ref


@pytest.mark.fault("G40", "O20")
@pytest.mark.parametrize("server_name", NAMES, indirect=True)
def test_all_that_is_protected_comes_back(
    store: ObjectStore, server_name: str, tmp_path: Path
) -> None:
    """Power cuts at any request, starts, prunes, pins; each damage is found, and costs only its commits."""
    store = retrying(store, budget_s=30.0)  # as in the daemon and its commands
    is_signed = server_name != "memory"
    view = signed(store, KEY) if is_signed else store
    run = History(view, tmp_path, server_name)
    for _ in range(COMMITS):
        run.commit()
        chance = run.random.random()
        if chance < 0.08 and run.content:
            run.pin()
        elif chance < 0.2 and run.content:
            run.prune()
    assert verify(view, KEYS).defects == []
    for ref in run.content:
        assert run.restored(tmp_path / f"at-{ref.step}", ref.step) == ref
    objects = [
        info.key for info in store.list("r/") if "/commits/" in info.key or "/data/" in info.key
    ]
    users: dict[str, set[CommitRef]] = {}
    for found in catalog.list_commits(view, KEYS):
        (manifest,) = catalog.load(view, KEYS, found)
        for chunk in manifest.chunks:
            users.setdefault(chunk.key, set()).add(found.ref)
    folders = {f"/{ref.generation:08d}/{ref.step:012d}/": ref for ref in run.content}
    for number in range(DAMAGES):
        key = run.random.choice(objects)
        is_manifest = "/commits/" in key
        hit = users.get(key, set())
        if is_manifest:
            hit = {ref for folder, ref in folders.items() if folder in key}
        data = store.get(key)
        how = run.random.choice(("flip", "cut", "delete"))
        place = run.random.randrange(len(data))
        if how == "flip":
            store.put(key, data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        elif how == "cut":
            store.put(key, data[:place])
        else:
            store.delete(key)
        is_gone = how == "delete" and is_manifest
        whole = set(run.content) - hit
        assert {each.ref for each in verify(view, KEYS).defects} == (set() if is_gone else hit), how
        to = tmp_path / f"damaged-{number}"
        if whole:
            assert run.restored(to) == max(whole)
        else:
            with pytest.raises(NothingToRestore):
                run.restored(to)
        store.put(key, data)
    assert verify(view, KEYS).defects == []
    print(
        f"{server_name}: {len(run.content)} commits left, {run.vms} starts, {run.prunes} prunes, "
        f"{run.cuts} power cuts, {len(run.pinned)} pins, {DAMAGES} damages"
    )
