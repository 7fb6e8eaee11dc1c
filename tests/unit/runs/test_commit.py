# SPDX-License-Identifier: Apache-2.0
"""Claims and commits: races, lost replies, conflicts, fences, and stores that break the contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from swansong import bounds
from swansong.bounds import BoundsError
from swansong_bucket.errors import (
    CorruptError,
    Exists,
    FencedError,
    NotFound,
    StoreError,
    Transient,
)
from swansong_bucket.format import claim as claims
from swansong_bucket.format import manifest
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CheckpointKind, CommitRef
from swansong_bucket.runs import catalog, commit
from swansong_bucket.stores.base import ObjectInfo
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.stores.wrappers.retry import Retrying

from testkit import committed
from testkit.committed import file_store
from testkit.store_backends import in_threads, retrying

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


def held(generation: int = 1, start_id: str = "us") -> ClaimObject:
    return ClaimObject(run="r", generation=generation, start=start_id)


def create(
    store: FileStore | Retrying, keys: RunKeys, made: Manifest, *, by: str = "us", **options: bool
) -> None:
    """Commit for this start."""
    commit.commit(store, keys, made, held(made.generation, by), **options)


class Lossy(FileStore):
    """Executes every put, and loses the replies of the first ones."""

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


def lossy(tmp_path: Path, *, lose: int) -> Retrying:
    store = file_store(tmp_path / "store", Lossy)
    store.lose = lose
    return retrying(store)


def claim(store: FileStore | Retrying, start_id: str, **options: Any) -> commit.Claim:
    return commit.claim_generation(
        store, KEYS, start_id=start_id, identity={"host": "h"}, **options
    )


@pytest.mark.fault("G04")
def test_eight_racing_claimers_get_eight_numbers(tmp_path: Path) -> None:
    """Distinct generations, without a gap; each claim names the start that won it."""
    store = file_store(tmp_path / "store")
    won: dict[str, int] = {}

    def race(number: int) -> None:
        won[f"n{number}"] = claim(store, f"n{number}").generation

    in_threads(8, race)
    assert sorted(won.values()) == list(range(1, 9))
    for start_id, generation in won.items():
        assert f'"start":"{start_id}"'.encode() in store.get(KEYS.generation(generation))


@pytest.mark.fault("G04")
def test_eight_vms_of_one_start_get_one_number(tmp_path: Path) -> None:
    """They claim at the same time, and all hold the one claim that is in the store."""
    store = file_store(tmp_path / "store")
    won: list[ClaimObject] = []

    def race(number: int) -> None:
        identity = {"host": f"h{number}"}
        won.append(commit.claim_generation(store, KEYS, start_id="s", identity=identity).content)

    in_threads(8, race)
    assert won == [claims.decode(store.get(KEYS.generation(1)))] * 8


@pytest.mark.fault("G05")
def test_a_claim_whose_reply_was_lost_is_ours(tmp_path: Path) -> None:
    """The retry is refused, and the start is read back: there is no second claim."""
    made = claim(lossy(tmp_path, lose=1), "me")
    assert (made.generation, made.content.start, made.honours_if_absent) == (1, "me", True)


@pytest.mark.fault("G05")
def test_a_claim_that_failed_after_it_was_made_is_found_by_its_start(tmp_path: Path) -> None:
    """The reply is lost and the caller gives up: its next attempt, much later, uses up no number."""
    store = file_store(tmp_path / "store", Lossy)
    store.lose = 1
    with pytest.raises(Transient):
        claim(store, "me")
    assert claim(store, "me").generation == 1
    assert len(list(store.list(KEYS.generations))) == 1


@pytest.mark.fault("G03")
def test_a_start_whose_generation_was_overtaken_gets_no_other(tmp_path: Path) -> None:
    """By a start of another VM; if a later start of the same VM has claimed, the generation is found."""
    store = file_store(tmp_path / "store")
    assert [claim(store, "ours").generation, claim(store, "newer").generation] == [1, 2]
    with pytest.raises(FencedError) as caught:
        claim(store, "ours")
    assert (caught.value.own, caught.value.newer) == (1, 2)
    assert claim(store, "ours", own=["newer"]).generation == 1


@pytest.mark.fault("G02", "O08")
def test_a_commit_whose_reply_was_lost_is_ours(tmp_path: Path) -> None:
    """The retry is refused; the nonce is ours, so the commit succeeds, also a second time."""
    store = lossy(tmp_path, lose=1)
    create(store, KEYS, a_manifest())
    create(store, KEYS, a_manifest())
    assert commit.newest_whole_commit(store, KEYS) == CommitRef(1, 10)


@pytest.mark.fault("O09")
def test_another_set_under_our_key_is_a_conflict(tmp_path: Path) -> None:
    """An existing manifest is never replaced."""
    store = file_store(tmp_path / "store")
    create(store, KEYS, a_manifest(nonce="first"))
    with pytest.raises(Exists):
        create(store, KEYS, a_manifest(nonce="second"))
    key = KEYS.commit(CommitRef(1, 10), 0, 1)
    assert manifest.decode(store.get(key)).nonce == "first"


@pytest.mark.fault("G08", "O09")
def test_a_damaged_manifest_under_our_key_is_a_conflict(tmp_path: Path) -> None:
    """A damaged manifest does not count as ours, and is not replaced."""
    store = file_store(tmp_path / "store")
    store.put(KEYS.commit(CommitRef(1, 10), 0, 1), b"{")
    with pytest.raises(Exists):
        create(store, KEYS, a_manifest())


@pytest.mark.fault("G03")
def test_a_newer_generation_fences(tmp_path: Path) -> None:
    """A fenced VM gets the number of the newer generation, and writes no manifest."""
    store = file_store(tmp_path / "store")
    old, new = claim(store, "old").generation, claim(store, "new").generation
    with pytest.raises(FencedError) as caught:
        create(store, KEYS, a_manifest(generation=old), by="old")
    assert (caught.value.own, caught.value.newer) == (old, new)
    assert commit.newest_whole_commit(store, KEYS) is None
    create(store, KEYS, a_manifest(generation=new), by="new")


def test_a_start_on_one_vm_commits_in_its_place_after_the_next_start_claimed(
    tmp_path: Path,
) -> None:
    """Its sets lie below those of the next start; a later claim of another VM ends that."""
    store = file_store(tmp_path / "store")
    first, second = claim(store, "first").content, claim(store, "second").content
    commit.commit(store, KEYS, a_manifest(generation=2), second)
    late = a_manifest(step=99)
    commit.commit(store, KEYS, late, first, own=["first", "second"])
    refs = [found.ref for found in catalog.list_commits(store, KEYS)]
    assert refs == [CommitRef(2, 10), CommitRef(1, 99)]
    claim(store, "elsewhere")
    with pytest.raises(FencedError):
        commit.commit(store, KEYS, a_manifest(step=100), first, own=["first", "second"])


def test_over_several_vms_a_start_commits_nothing_after_the_next_start_claimed(
    tmp_path: Path,
) -> None:
    """The next start has chosen where to resume, also if it is a start of the same VM."""
    store = file_store(tmp_path / "store")
    first = claim(store, "first").content
    claim(store, "second")
    part = replace(a_manifest(step=99), nodes=2)
    with pytest.raises(FencedError):
        commit.commit(store, KEYS, part, first, own=["first", "second"])
    assert catalog.list_commits(store, KEYS) == []


def test_a_set_is_committed_under_the_generation_of_its_claim_only(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store")
    claim(store, "us")
    with pytest.raises(FencedError):
        commit.commit(store, KEYS, a_manifest(generation=2), held(1))
    assert catalog.list_commits(store, KEYS) == []


# ---------------------------------------------------------------- claims that were deleted


def wipe(store: FileStore) -> None:
    for info in list(store.list("")):
        store.delete(info.key)


@pytest.mark.fault("G18")
def test_a_deleted_claim_is_created_again(tmp_path: Path) -> None:
    """The prefix is emptied while a VM trains: its next commit creates the same claim again."""
    store = file_store(tmp_path / "store")
    ours = claim(store, "us").content
    before = store.get(KEYS.generation(1))
    wipe(store)
    with capture_logs() as logs:
        commit.commit(store, KEYS, a_manifest(), ours)
        commit.commit(store, KEYS, a_manifest(step=11), ours)
    assert store.get(KEYS.generation(1)) == before
    assert commit.newest_whole_commit(store, KEYS) == CommitRef(1, 11)
    assert [line["event"] for line in logs] == ["claim_made_again"]
    assert claim(store, "later").generation == 2


@pytest.mark.fault("G18", "G04")
@pytest.mark.parametrize("when", ["before", "at once"])
def test_a_number_that_another_vm_has_claimed_again_is_lost(tmp_path: Path, when: str) -> None:
    """The prefix is emptied, and another VM claims the number: the first VM is fenced, also in a race."""

    class Racing(FileStore):
        is_racing = False

        def get(self, key: str) -> bytes:
            try:
                return super().get(key)
            except NotFound:
                if self.is_racing:
                    claim(FileStore(self.url), "them")
                raise

    store = file_store(tmp_path / "store", Racing)
    assert claim(store, "us").generation == 1
    wipe(store)
    store.is_racing = when == "at once"
    if not store.is_racing:
        assert claim(store, "them").generation == 1
    for attempt in (
        lambda: create(store, KEYS, a_manifest()),
        lambda: commit.ensure_not_fenced(store, KEYS, held()),
    ):
        with pytest.raises(FencedError, match="another VM has claimed generation 1") as caught:
            attempt()
        assert (caught.value.own, caught.value.newer) == (1, 1)
    assert commit.newest_whole_commit(store, KEYS) is None
    create(store, KEYS, a_manifest(), by="them")


def test_the_vms_of_one_start_share_a_claim_that_one_creates_again(tmp_path: Path) -> None:
    """The claim in the store was made on another VM; the start is the same."""
    store = file_store(tmp_path / "store")
    for host in ("one", "two"):
        commit.ensure_not_fenced(store, KEYS, replace(held(), identity={"host": host}))
    with pytest.raises(FencedError):
        commit.ensure_not_fenced(store, KEYS, held(1, "later"))


@pytest.mark.fault("S25")
def test_a_claim_that_was_overwritten_is_an_error(tmp_path: Path) -> None:
    """The error names the object."""
    store = file_store(tmp_path / "store")
    claim(store, "us")
    store.put(KEYS.generation(1), b"{")
    with pytest.raises(CorruptError, match=KEYS.generation(1)) as caught:
        create(store, KEYS, a_manifest())
    assert "Delete it" in caught.value.hint


@pytest.mark.fault("O14")
def test_a_store_that_ignores_preconditions_is_detected(tmp_path: Path) -> None:
    """The claim reports whether its second creation was refused."""
    careless = file_store(tmp_path / "store", Careless)
    assert not claim(careless, "me").honours_if_absent
    assert claim(file_store(tmp_path / "good"), "me").honours_if_absent


@pytest.mark.fault("O15", "G07")
def test_generations_only_grow(tmp_path: Path) -> None:
    """Gaps and foreign names in the listing never cause a second claim of a number."""
    store = file_store(tmp_path / "store")
    store.put(KEYS.generation(41), b"{}")
    store.put(KEYS.generation(7), b"{}")
    assert claim(store, "me").generation == 42


@pytest.mark.fault("S25")
def test_no_number_after_the_last_one_is_claimed(tmp_path: Path) -> None:
    """A planted claim must not lead to a generation whose commits no reader finds."""
    store = file_store(tmp_path / "store")
    store.put(KEYS.generation(bounds.GENERATION_MAX), b"{}")
    before = committed.tree(tmp_path)
    with pytest.raises(CorruptError, match="99999999, is taken") as caught:
        claim(store, "me")
    assert f"{store.url}/{KEYS.generation(bounds.GENERATION_MAX)}" in caught.value.hint
    assert committed.tree(tmp_path) == before
    store.delete(KEYS.generation(bounds.GENERATION_MAX))
    assert claim(store, "me").generation == 1


@pytest.mark.fault("S25", "G16")
def test_beside_an_object_that_no_swansong_writes_nothing_is_claimed_or_committed(
    tmp_path: Path,
) -> None:
    """The object may be a newer generation: the error names it; a commit succeeds after its deletion."""
    store = file_store(tmp_path / "store")
    create(store, KEYS, a_manifest())
    foreign = f"{KEYS.generations}100000000.json"
    store.put(foreign, b"{}")
    for attempt in (
        lambda: claim(store, "me"),
        lambda: commit.ensure_not_fenced(store, KEYS, held()),
        lambda: create(store, KEYS, a_manifest(step=11)),
    ):
        with pytest.raises(CorruptError, match=foreign):
            attempt()
    store.delete(foreign)
    create(store, KEYS, a_manifest(step=11))


def test_a_claim_that_no_other_vm_could_read_is_not_created(tmp_path: Path) -> None:
    """The id of a start comes from the trainer."""
    store = file_store(tmp_path / "store")
    for start_id in ("x" * 10_000, "", "ä"):
        with pytest.raises(CorruptError, match="start"):
            claim(store, start_id)
    assert list(store.list("")) == []


# ---------------------------------------------------------------- what readers find


class Blind(FileStore):
    """Accepts manifests, and omits some objects from its listing."""

    hidden_from_list = hidden_from_get = False

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return iter(
            []
            if self.hidden_from_list and "commits" in prefix
            else super().list(prefix, after=after)
        )

    def get(self, key: str) -> bytes:
        if self.hidden_from_get:
            raise NotFound(key)
        return super().get(key)

    def head(self, key: str) -> ObjectInfo | None:
        return None if self.hidden_from_get else super().head(key)


@pytest.mark.fault("G08")
def test_a_commit_that_the_listing_does_not_show_is_not_reported(tmp_path: Path) -> None:
    """Readers use the listing.  A retry is safe, and succeeds once the listing contains the manifest."""
    store = file_store(tmp_path / "store", Blind)
    store.hidden_from_list = True
    for _ in range(2):
        with pytest.raises(StoreError, match="listing of the store does not contain it"):
            create(store, KEYS, a_manifest())
    store.hidden_from_list = False
    create(store, KEYS, a_manifest())


def test_a_commit_is_read_back_as_a_reader_reads_it(tmp_path: Path) -> None:
    """A store that returns 404 or other bytes for each GET has no commit."""
    store = file_store(tmp_path / "store", Blind)
    store.hidden_from_get = True
    with pytest.raises(CorruptError, match="missing"):
        create(store, KEYS, a_manifest(), reads_back=True)
    with pytest.raises(NotFound):  # refused, and the existing object cannot be compared
        create(store, KEYS, a_manifest(), reads_back=True)
    store.hidden_from_get = False
    create(store, KEYS, a_manifest(), reads_back=True)

    class Changing(FileStore):
        def get(self, key: str) -> bytes:
            if "commits" not in key:
                return super().get(key)
            made = manifest.decode(super().get(key))
            return manifest.encode(replace(made, created="later"))

    changing = Changing(f"file://{tmp_path}/store")
    with pytest.raises(CorruptError, match="another manifest than was written"):
        create(changing, KEYS, a_manifest(step=11), reads_back=True)


def test_a_commit_costs_four_small_requests(tmp_path: Path) -> None:
    """The claims, its own claim, the manifest, and the listing of that commit, for any size of the run."""
    requests = []

    class Counting(FileStore):
        def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
            requests.append(("list", prefix))
            return super().list(prefix, after=after)

        def get(self, key: str) -> bytes:
            requests.append(("get", key))
            return super().get(key)

        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
            requests.append(("put", key))
            super().put(key, data, if_absent=if_absent)

    store = file_store(tmp_path / "store", Counting)
    claim(store, "us")
    requests.clear()
    create(store, KEYS, a_manifest())
    assert requests == [
        ("list", KEYS.generations),
        ("get", KEYS.generation(1)),
        ("put", KEYS.commit(CommitRef(1, 10), 0, 1)),
        ("list", KEYS.parts(CommitRef(1, 10))),
    ]


@pytest.mark.parametrize(
    "unusable",
    [
        {"health": {"loss": float("inf")}},
        {"health": {"loss": 10**400}},
        {"trainer": {"world": object()}},
        {"trainer": {"mesh": [1, 2]}},
        {"nodes": 10**5},
        {"step": 10**12},
        {"framework": "\ud800"},
    ],
)
def test_a_manifest_that_no_reader_would_accept_is_not_written(
    tmp_path: Path, unusable: dict[str, Any]
) -> None:
    """The declared error, and no request."""
    store = file_store(tmp_path / "store")
    with pytest.raises(BoundsError):
        create(store, KEYS, replace(a_manifest(), **unusable))
    assert list(store.list("")) == []
