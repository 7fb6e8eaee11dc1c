# SPDX-License-Identifier: Apache-2.0
"""Claiming and committing: races, lost replies, conflicts, fences, and stores that lie."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from committed import file_store
from swansongd import commit, manifest
from swansongd.errors import Exists, FencedError, Permanent, Transient
from swansongd.keys import RunKeys
from swansongd.manifest import Manifest
from swansongd.model import CheckpointKind, CommitRef
from swansongd.stores.files import FileStore
from swansongd.stores.retry import Retrying

KEYS = RunKeys("r")


def a_manifest(step: int = 10, nonce: str = "abc", generation: int = 1) -> Manifest:
    return Manifest(
        run="r",
        generation=generation,
        step=step,
        kind=CheckpointKind.PERIODIC,
        node=0,
        nodes=1,
        nonce=nonce,
        shards=(),
        created="2030-01-01T00:00:00Z",
    )


class Lossy(FileStore):
    """Carries out a put, and loses the reply of the first ones."""

    lose = 0

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        super().put(key, data, if_absent=if_absent)
        if self.lose:
            self.lose -= 1
            raise Transient("connection reset")


class Careless(FileStore):
    """Ignores create-if-absent."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        super().put(key, data)


def retrying(store: FileStore) -> Retrying:
    return Retrying(store, give_up_mono_s=lambda: None, stop=threading.Event())


def lossy(tmp_path: Path, *, lose: int) -> Retrying:
    store = Lossy(f"file://{tmp_path}/store")
    store.check()
    store.lose = lose
    return retrying(store)


def claim(store: FileStore | Retrying, nonce: str) -> commit.Claim:
    return commit.claim_generation(store, KEYS, identity={"host": nonce}, nonce=nonce)


@pytest.mark.fault("G04")
def test_of_eight_claimers_each_gets_a_number_of_its_own(tmp_path: Path) -> None:
    """However they race: distinct generations, without a gap, each claim object of its winner."""
    store = file_store(tmp_path / "store")
    start = threading.Barrier(8)
    won: dict[str, int] = {}

    def race(nonce: str) -> None:
        start.wait(20)
        won[nonce] = claim(store, nonce).generation

    threads = [threading.Thread(target=race, args=(f"n{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(won.values()) == list(range(1, 9))
    for nonce, generation in won.items():
        assert f'"nonce": "{nonce}"'.encode() in store.get(KEYS.generation(generation))


@pytest.mark.fault("G05")
def test_a_claim_whose_reply_was_lost_is_ours(tmp_path: Path) -> None:
    """The retry is refused, the nonce read back: number 1, not a second one."""
    assert claim(lossy(tmp_path, lose=1), "me") == commit.Claim(1, honours_if_absent=True)


@pytest.mark.fault("G02", "O08")
def test_a_commit_whose_reply_was_lost_is_ours(tmp_path: Path) -> None:
    """Refused on the retry, and still a success: the nonce is ours; a second time as well."""
    store = lossy(tmp_path, lose=1)
    commit.commit(store, KEYS, a_manifest())
    commit.commit(store, KEYS, a_manifest())
    assert commit.newest_whole_commit(store, KEYS) == CommitRef(1, 10)


@pytest.mark.fault("O09")
def test_another_set_under_our_name_is_a_conflict(tmp_path: Path) -> None:
    """What stands is never replaced."""
    store = file_store(tmp_path / "store")
    commit.commit(store, KEYS, a_manifest(nonce="first"))
    with pytest.raises(Exists):
        commit.commit(store, KEYS, a_manifest(nonce="second"))
    key = KEYS.commit(CommitRef(1, 10), 0, 1)
    assert manifest.decode(store.get(key)).nonce == "first"


@pytest.mark.fault("G08", "O09")
def test_a_damaged_manifest_under_our_name_is_a_conflict(tmp_path: Path) -> None:
    """It is not taken for ours, and not written over."""
    store = file_store(tmp_path / "store")
    store.put(KEYS.commit(CommitRef(1, 10), 0, 1), b"{")
    with pytest.raises(Exists):
        commit.commit(store, KEYS, a_manifest())


@pytest.mark.fault("G03")
def test_a_newer_generation_fences(tmp_path: Path) -> None:
    """The zombie learns who took over, and writes no manifest."""
    store = file_store(tmp_path / "store")
    old, new = claim(store, "old").generation, claim(store, "new").generation
    with pytest.raises(FencedError) as caught:
        commit.commit(store, KEYS, a_manifest(generation=old))
    assert (caught.value.own, caught.value.newer) == (old, new)
    assert commit.newest_whole_commit(store, KEYS) is None
    commit.commit(store, KEYS, a_manifest(generation=new))


@pytest.mark.fault("O14")
def test_a_store_that_ignores_preconditions_is_recognised(tmp_path: Path) -> None:
    """The claim says whether its second creation was refused, as it must be."""
    careless = Careless(f"file://{tmp_path}/store")
    careless.check()
    assert not claim(careless, "me").honours_if_absent
    assert claim(file_store(tmp_path / "good"), "me").honours_if_absent


@pytest.mark.fault("O15", "G07")
def test_generations_only_grow(tmp_path: Path) -> None:
    """Gaps and foreign names in the listing do not make a number come twice."""
    store = file_store(tmp_path / "store")
    store.put(KEYS.generation(41), b"{}")
    store.put(f"{KEYS.generations}99999999.json.bak", b"")
    store.put(f"{KEYS.generations}notes.txt", b"")
    assert claim(store, "me").generation == 42


def test_a_store_that_fails_is_no_answer(tmp_path: Path) -> None:
    """Neither fenced nor claimed: the error comes through."""

    class Down(FileStore):
        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
            raise Permanent("403")

    store = Down(f"file://{tmp_path}/store")
    store.check()
    with pytest.raises(Permanent):
        claim(store, "me")
    with pytest.raises(Permanent):
        commit.commit(store, KEYS, a_manifest())
