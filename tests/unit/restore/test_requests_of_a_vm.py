# SPDX-License-Identifier: Apache-2.0
"""The requests of one VM when a job over many VMs starts: a store that counts the reads of manifests."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
from swansong.protocol import RestoreQuery
from swansong_bucket.errors import NothingToRestore, Stopped
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import catalog
from swansong_bucket.runs.commit import MANIFESTS_READ, claim_generation
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import Selection, restore
from swansong_bucket.transfer.target import NoRoom, RestoreTarget
from swansongd.flush.background import Background
from swansongd.flush.claimant import Claimant
from swansongd.flush.committer import Committer
from swansongd.flush.known import KnownChunks
from swansongd.flush.store_health import StoreHealth
from swansongd.observe.facts import NewestDated
from swansongd.restore.wish import Download, Wish

from testkit import committed
from testkit.restore_rig import RestoreRig

KEYS = RunKeys("r")
PER_VM = 2


class Counted(FileStore):
    """Records the manifests that are read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.manifests: list[str] = []

    def get(self, key: str) -> bytes:
        if key.startswith(KEYS.commits):
            self.manifests.append(key)
        return super().get(key)


def files_of(node: int, sizes: dict[int, int] | None = None) -> dict[str, bytes]:
    """The files of the ranks of a VM.

    Args:
        sizes: number of ranks of some VMs; the others have two.
    """
    counts = [(sizes or {}).get(other, PER_VM) for other in range(node + 1)]
    first = sum(counts[:-1])
    return {
        name: data
        for rank in range(first, first + counts[-1])
        for name, data in (
            (f"rank-{rank:05d}/model", b"%05d" % rank * 100),
            (f"rank-{rank:05d}.json", b"%05d" % rank),
        )
    }


def store_of(directory: Path, vms: int, sizes: dict[int, int] | None = None) -> Counted:
    """A store with one checkpoint of an earlier start of a job over this number of VMs."""
    store: Counted = committed.file_store(directory, Counted)
    claim_generation(store, KEYS, start_id="earlier", identity={"vm": "another"})
    for node in range(vms):
        committed.commit(store, files_of(node, sizes), node=node, nodes=vms, nonce=f"a{node}")
    store.manifests.clear()
    return store


def prefixes_of(*ranks: int) -> list[str]:
    return [f"rank-{rank:05d}/" for rank in ranks]


def wish_of(*ranks: int) -> Selection:
    """The shards of these ranks."""
    prefixes = frozenset(prefixes_of(*ranks))
    return Download(wish=Wish(ref=CommitRef(1, 100), prefixes=prefixes)).selection()


def newest(store: Counted) -> catalog.Commit:
    return catalog.list_commits(store, KEYS)[0]


@pytest.mark.parametrize("vms", [4, 16, 64])
def test_the_reads_of_one_vm_do_not_grow_with_the_number_of_vms(tmp_path: Path, vms: int) -> None:
    """Its daemon reads a sample for the health of the GPUs, and one manifest each for dates and history.

    The restore reads two manifests: the one of node 0, and the one of its ranks.
    """
    store = store_of(tmp_path / "bucket", vms)
    own = tmp_path / "own"
    own.mkdir()
    events: queue.Queue[Any] = queue.Queue()
    committer = Committer(
        store,
        Background(store, lambda: False),
        KEYS,
        events.put,
        Claimant(store, KEYS, own, boot_id="boot", vm="vm", wall=lambda: "2030-01-01T00:00:00Z"),
        known=KnownChunks(own, run="r", store_url=store.url, is_data=KEYS.is_data),
        wall=lambda: "2030-01-01T00:00:00Z",
        health=StoreHealth(lambda _event: None),
    )
    committer.start()
    while not isinstance(events.get(timeout=60), NewestDated):
        pass
    committer.close()
    at_start = len(store.manifests)
    assert at_start == min(vms, MANIFESTS_READ) + 2
    seeded: list[tuple[CommitRef, set[str]]] = []
    rig = RestoreRig(
        tmp_path / "staging",
        store,
        fetched=lambda ref, shards: seeded.append((ref, {shard.path for shard in shards})),
    )
    node = vms - 1
    ranks = [vms * PER_VM - 2, vms * PER_VM - 1]
    query = RestoreQuery("q", generation=1, step=100, prefixes=prefixes_of(*ranks))
    answer = rig.ask(query).answer()
    rig.stop.set()
    assert answer.error == ""
    assert committed.tree(Path(answer.path)) == files_of(node)
    assert len(store.manifests) - at_start == 2
    assert seeded == [(CommitRef(1, 100), set(files_of(node)))]


@pytest.mark.parametrize(("size", "ranks"), [(3, (7, 8)), (6, (6, 7))])
def test_ranks_of_uneven_vms_are_found_in_all_manifests(
    tmp_path: Path, size: int, ranks: tuple[int, int]
) -> None:
    """The second VM has more ranks than the others: these are not on the VM where they seem to be."""
    sizes = {1: size}
    store = store_of(tmp_path / "bucket", 4, sizes)
    to = tmp_path / "to"
    restore(store, KEYS, RestoreTarget(to), wish_of(*ranks))
    names = tuple(f"rank-{rank:05d}" for rank in ranks)
    files = {name: data for node in range(4) for name, data in files_of(node, sizes).items()}
    assert committed.tree(to) == {n: data for n, data in files.items() if n.startswith(names)}
    assert {*store.manifests} == {*newest(store).manifest_keys.values()}


def test_a_vm_finds_the_damage_of_the_manifests_that_it_needs(tmp_path: Path) -> None:
    """The VM that needs the damaged manifest reports it to the other ranks, as for a damaged shard."""
    store = store_of(tmp_path / "bucket", 4)
    committed.flip_bit(tmp_path / "bucket" / newest(store).manifest_keys[2], 99)
    restore(store, KEYS, RestoreTarget(tmp_path / "first"), wish_of(2, 3))
    with pytest.raises(NothingToRestore) as caught:
        restore(store, KEYS, RestoreTarget(tmp_path / "third"), wish_of(4, 5))
    assert caught.value.is_damaged
    with pytest.raises(NothingToRestore):
        restore(store, KEYS, RestoreTarget(tmp_path / "all"))


def test_a_missing_manifest_is_found_in_the_listing(tmp_path: Path) -> None:
    """No rank restores a checkpoint without the part of another VM, although it would not read it."""
    store = store_of(tmp_path / "bucket", 4)
    os.unlink(tmp_path / "bucket" / newest(store).manifest_keys[3])
    with pytest.raises(NothingToRestore, match="3 of 4 nodes"):
        restore(store, KEYS, RestoreTarget(tmp_path / "to"), wish_of(0, 1))


def test_files_of_no_rank_come_with_the_files_of_all_ranks(tmp_path: Path) -> None:
    """Also if the first ranks of the VM did not read the manifest that has them."""
    store = store_of(tmp_path / "bucket", 2)
    late = {**files_of(2), "notes": b"of no rank"}
    for node, files in enumerate((files_of(0), files_of(1), late)):
        committed.commit(store, files, step=200, node=node, nodes=3, nonce=f"b{node}")
    rig = RestoreRig(tmp_path / "staging", store)
    named = {"generation": 1, "step": 200}
    first = rig.ask(prefixes=prefixes_of(2, 3), **named).answer()
    assert committed.tree(Path(first.path)) == files_of(1)
    everything = rig.ask(**named).answer()
    rig.stop.set()
    assert everything.path == first.path
    assert committed.tree(Path(first.path)) == files_of(0) | files_of(1) | late


def test_a_restore_of_some_ranks_reuses_the_chunks_of_an_interrupted_restore_of_all(
    tmp_path: Path,
) -> None:
    """It reads other manifests: the chunks count by their names."""
    store = store_of(tmp_path / "bucket", 4)
    to, stop = tmp_path / "to", threading.Event()

    def progress(done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes * 3 // 4:
            stop.set()

    options = ReadOptions(connections=1, progress=progress, stop=stop)
    with pytest.raises(Stopped):
        restore(store, KEYS, RestoreTarget(to), options=options)
    done = restore(store, KEYS, RestoreTarget(to), wish_of(0, 1))
    assert committed.tree(to) == files_of(0)
    assert (done.reused_bytes, done.size_bytes) == (1000, 1010), "the models came first"


def test_a_prefetch_that_can_never_have_room_reads_one_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of all VMs are larger than the file system.  For a trainer only the free space counts."""
    vms = catalog.MANIFEST_READS + 1
    store = store_of(tmp_path / "bucket", vms)
    real = os.fstatvfs

    def small(fd: int) -> os.statvfs_result:
        facts = list(real(fd))
        facts[1:3] = [1, (vms - 1) * 2 * 505]
        return os.statvfs_result(facts)

    monkeypatch.setattr(os, "fstatvfs", small)
    (tmp_path / "restored").mkdir()
    parent_fd = os.open(tmp_path / "restored", os.O_RDONLY)
    try:
        target = RestoreTarget(tmp_path / "restored" / "to", parent_fd=parent_fd, spare_sets=2)
        with pytest.raises(NoRoom) as caught:
            restore(store, KEYS, target)
    finally:
        os.close(parent_fd)
    assert caught.value.has_other_vms
    assert store.manifests == [newest(store).manifest_keys[0]]
    restore(store, KEYS, RestoreTarget(tmp_path / "all"))
