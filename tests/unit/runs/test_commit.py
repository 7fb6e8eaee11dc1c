# SPDX-License-Identifier: Apache-2.0
"""Claims and commits: races, lost replies, conflicts, fences, and stores that break the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs
from swansong.bounds import BoundsError
from swansong_bucket.errors import (
    CorruptError,
    Exists,
    FencedError,
    NotFound,
    Stopped,
    StoreError,
    Transient,
)
from swansong_bucket.format import claim as claims
from swansong_bucket.format import manifest
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import catalog, commit
from swansong_bucket.runs.signing import SigningKey, signed
from swansong_bucket.stores.base import ObjectInfo, ObjectStore, Page

from testkit.committed import manifest_of, named_shard
from testkit.memory_store import MemoryStore
from testkit.store_backends import retrying
from testkit.waiting import in_threads

KEYS = RunKeys("r")


def a_manifest(step: int = 10, **fields: Any) -> Manifest:
    return manifest_of(step=step, **fields)


def held(generation: int = 1, start_id: str = "us") -> ClaimObject:
    return ClaimObject(run="r", generation=generation, start=start_id)


def create(store: ObjectStore, made: Manifest, *, by: str = "us", **options: bool) -> None:
    """Commit for this start."""
    commit.commit(store, KEYS, made, held(made.generation, by), **options)


def lose_a_reply(store: MemoryStore) -> None:
    """The next put takes effect, and its reply is lost."""

    def after(what: str, _key: str) -> None:
        if what == "put":
            store.after = lambda *_: None
            raise Transient("connection reset")

    store.after = after


class Careless(MemoryStore):
    """Ignores create-if-absent."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        super().put(key, data)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def claim(store: ObjectStore, start_id: str, **options: Any) -> commit.Claim:
    return commit.claim_generation(
        store, KEYS, start_id=start_id, identity={"host": "h"}, **options
    )


def among(*start_ids: str) -> commit.Owns:
    """The starts of this VM."""
    return lambda found: found.start in start_ids


@pytest.mark.fault("G04")
def test_eight_racing_claimers_get_eight_numbers(store: MemoryStore) -> None:
    """Distinct generations, without a gap; each claim names the start that won it."""
    won: dict[str, int] = {}

    def race(number: int) -> None:
        won[f"n{number}"] = claim(store, f"n{number}").generation

    in_threads(8, race)
    assert sorted(won.values()) == list(range(1, 9))
    for start_id, generation in won.items():
        assert f'"start":"{start_id}"'.encode() in store.get(KEYS.generation(generation))


@pytest.mark.fault("G04")
@pytest.mark.parametrize("late", ["list", "put"])
def test_a_late_claim_that_is_not_wanted_any_more_is_not_made(
    store: MemoryStore, late: str
) -> None:
    """By the time of the late request, another VM has claimed: a further claim would fence it."""
    wanted = [True]

    def before(what: str, _key: str) -> None:
        if what == late:
            store.before = lambda *_: None
            wanted[0] = False
            assert claim(store, "other").generation == 1

    store.before = before
    with pytest.raises(Stopped):
        claim(store, "late", is_wanted=lambda: wanted[0])
    assert list(store.objects) == [KEYS.generation(1)]


@pytest.mark.fault("G04")
def test_eight_vms_of_one_start_get_one_number(store: MemoryStore) -> None:
    """They claim at the same time, and all hold the one claim that is in the store."""
    won: list[ClaimObject] = []

    def race(number: int) -> None:
        identity = {"host": f"h{number}"}
        won.append(commit.claim_generation(store, KEYS, start_id="s", identity=identity).content)

    in_threads(8, race)
    assert won == [claims.decode(store.get(KEYS.generation(1)))] * 8


@pytest.mark.fault("G05")
def test_a_claim_whose_reply_was_lost_is_ours(store: MemoryStore) -> None:
    """The retry is refused, and the start is read back: there is no second claim."""
    lose_a_reply(store)
    made = claim(retrying(store), "me")
    assert (made.generation, made.content.start, made.honours_if_absent) == (1, "me", True)


@pytest.mark.fault("G05")
def test_a_claim_that_failed_after_it_was_made_is_found_by_its_start(store: MemoryStore) -> None:
    """The reply is lost and the caller gives up: its next attempt, much later, uses up no number."""
    lose_a_reply(store)
    with pytest.raises(Transient):
        claim(store, "me")
    assert claim(store, "me").generation == 1
    assert list(store.objects) == [KEYS.generation(1)]


@pytest.mark.fault("G03")
def test_a_start_whose_generation_was_overtaken_gets_no_other(store: MemoryStore) -> None:
    """By a start of another VM; if a later start of the same VM has claimed, the generation is found."""
    assert [claim(store, "ours").generation, claim(store, "newer").generation] == [1, 2]
    with pytest.raises(FencedError) as caught:
        claim(store, "ours")
    assert (caught.value.own, caught.value.newer) == (1, 2)
    assert claim(store, "ours", owns=among("newer")).generation == 1


@pytest.mark.fault("G02", "O08")
@pytest.mark.fault("O62")
def test_an_earlier_manifest_of_the_set_with_other_chunks_is_not_this_commit(
    store: MemoryStore,
) -> None:
    """Its reply was lost, and then a chunk that it names: the set was stored again, which cures nothing."""
    create(store, replace(a_manifest(), shards=(named_shard("model", 2500),)))
    with pytest.raises(Exists):
        create(store, replace(a_manifest(), shards=(named_shard("model", 2500, "again"),)))


def test_a_commit_whose_reply_was_lost_is_ours(store: MemoryStore) -> None:
    """The retry is refused; the nonce is ours, so the commit succeeds, also a second time."""
    lose_a_reply(store)
    for _ in range(2):
        create(retrying(store), a_manifest())
    assert commit.newest_whole_commit(store, KEYS) == CommitRef(1, 10)


@pytest.mark.fault("G08", "O09")
def test_a_damaged_manifest_under_our_key_is_a_conflict(store: MemoryStore) -> None:
    """A damaged manifest does not count as ours, and is not replaced."""
    store.put(KEYS.commit(CommitRef(1, 10), 0, 1), b"{")
    with pytest.raises(Exists):
        create(store, a_manifest())


@pytest.mark.fault("G03")
@pytest.mark.parametrize("at", ["put", "list"])
def test_a_vm_that_stood_still_during_its_commit_is_fenced(store: MemoryStore, at: str) -> None:
    """Another VM has claimed meanwhile, and may have resumed without the commit: it is not promised."""
    old = claim(store, "old").content
    made = a_manifest()
    key = KEYS.commit(made.ref, 0, 1)

    def stands_still(what: str, where: str) -> None:
        is_now = (
            (what, where) == ("put", key)
            if at == "put"
            else what == "list" and key in store.objects
        )
        if is_now:
            store.before = lambda *_: None
            claim(store, "new")

    store.before = stands_still
    with pytest.raises(FencedError):
        commit.commit(store, KEYS, made, old)


@pytest.mark.fault("G03")
@pytest.mark.parametrize("at", ["list", "put"])
def test_a_vm_that_stood_still_during_its_claim_does_not_take_the_run_back(
    store: MemoryStore, at: str
) -> None:
    """A start that continues from a generation of its VM yields to another VM, however they interleave."""
    claim(store, "ours")

    def stands_still(what: str, _: str) -> None:
        if what == at:
            store.before = lambda *_: None
            claim(store, "elsewhere")

    store.before = stands_still
    with pytest.raises(FencedError) as caught:
        claim(store, "again", owns=among("ours", "again"), held=1)
    assert (caught.value.own, caught.value.newer) == (1, 2)
    assert claim(store, "later", owns=among("later")).generation == 3


def test_a_start_on_one_vm_commits_in_its_place_after_the_next_start_claimed(
    store: MemoryStore,
) -> None:
    """Its sets lie below those of the next start; a later claim of another VM ends that."""
    first, second = claim(store, "first").content, claim(store, "second").content
    commit.commit(store, KEYS, a_manifest(generation=2), second)
    late = a_manifest(step=99)
    commit.commit(store, KEYS, late, first, owns=among("first", "second"))
    refs = [found.ref for found in catalog.list_commits(store, KEYS)]
    assert refs == [CommitRef(2, 10), CommitRef(1, 99)]
    claim(store, "elsewhere")
    with pytest.raises(FencedError):
        commit.commit(store, KEYS, a_manifest(step=100), first, owns=among("first", "second"))


@pytest.mark.fault("G03", "S25")
def test_no_newer_claim_hides_a_claim_of_another_vm(store: MemoryStore) -> None:
    """A bucket writer plants a claim that looks like one of this VM: the VM is fenced all the same."""
    ours = claim(store, "ours").content
    claim(store, "elsewhere")
    claim(store, "planted")
    owns = among("ours", "again", "planted")
    for attempt in (
        lambda: commit.ensure_not_fenced(store, KEYS, ours, owns=owns),
        lambda: commit.commit(store, KEYS, a_manifest(), ours, owns=owns),
        lambda: claim(store, "ours", owns=owns),
        lambda: claim(store, "again", owns=owns, held=1),
    ):
        with pytest.raises(FencedError) as caught:
            attempt()
        assert (caught.value.own, caught.value.newer) == (1, 2)


def test_a_set_is_committed_under_the_generation_of_its_claim_only(store: MemoryStore) -> None:
    claim(store, "us")
    with pytest.raises(FencedError):
        commit.commit(store, KEYS, a_manifest(generation=2), held(1))
    assert catalog.list_commits(store, KEYS) == []


# ---------------------------------------------------------------- claims that were deleted


@pytest.mark.fault("G18")
def test_a_deleted_claim_is_created_again(store: MemoryStore) -> None:
    """The prefix is emptied while a VM trains: its next commit creates the same claim again."""
    ours = claim(store, "us").content
    before = store.get(KEYS.generation(1))
    store.objects.clear()
    with capture_logs() as logs:
        commit.commit(store, KEYS, a_manifest(), ours)
        commit.commit(store, KEYS, a_manifest(step=11), ours)
    assert store.get(KEYS.generation(1)) == before
    assert commit.newest_whole_commit(store, KEYS) == CommitRef(1, 11)
    assert [line["event"] for line in logs] == ["claim_made_again"]
    assert claim(store, "later").generation == 2


@pytest.mark.fault("G18", "G04")
@pytest.mark.parametrize("when", ["before", "at once"])
def test_a_number_that_another_vm_has_claimed_again_is_lost(store: MemoryStore, when: str) -> None:
    """The prefix is emptied, and another VM claims the number: the first VM is fenced, also in a race."""

    def race(what: str, _key: str) -> None:
        if what == "put":
            store.before = lambda *_: None
            claim(store, "them")

    assert claim(store, "us").generation == 1
    store.objects.clear()
    if when == "at once":
        store.before = race
    else:
        assert claim(store, "them").generation == 1
    for attempt in (
        lambda: create(store, a_manifest()),
        lambda: commit.ensure_not_fenced(store, KEYS, held()),
    ):
        with pytest.raises(FencedError, match="another VM has claimed generation 1") as caught:
            attempt()
        assert (caught.value.own, caught.value.newer) == (1, 1)
    assert commit.newest_whole_commit(store, KEYS) is None
    create(store, a_manifest(), by="them")


def test_the_vms_of_one_start_share_a_claim_that_one_creates_again(store: MemoryStore) -> None:
    """The claim in the store was made on another VM; the start is the same."""
    for host in ("one", "two"):
        commit.ensure_not_fenced(store, KEYS, replace(held(), identity={"host": host}))
    with pytest.raises(FencedError):
        commit.ensure_not_fenced(store, KEYS, held(1, "later"))


@pytest.mark.fault("S25")
def test_a_claim_that_was_overwritten_is_an_error(store: MemoryStore) -> None:
    """The error names the object."""
    claim(store, "us")
    store.put(KEYS.generation(1), b"{")
    with pytest.raises(CorruptError, match=KEYS.generation(1)) as caught:
        create(store, a_manifest())
    assert "Delete it" in caught.value.hint


@pytest.mark.fault("O14")
def test_a_store_that_ignores_preconditions_is_detected(store: MemoryStore) -> None:
    """The claim reports whether its second creation was refused."""
    assert not claim(Careless(), "me").honours_if_absent
    assert claim(store, "me").honours_if_absent


@pytest.mark.fault("O15", "G07")
def test_generations_only_grow(store: MemoryStore) -> None:
    """Gaps and foreign names in the listing never cause a second claim of a number."""
    store.put(KEYS.generation(41), b"{}")
    store.put(KEYS.generation(7), b"{}")
    assert claim(store, "me").generation == 42


@pytest.mark.fault("S25", "G16")
def test_beside_an_object_that_no_swansong_writes_nothing_is_claimed_or_committed(
    store: MemoryStore,
) -> None:
    """The object may be a newer generation: the error names it; a commit succeeds after its deletion."""
    create(store, a_manifest())
    foreign = f"{KEYS.generations}100000000.json"
    store.put(foreign, b"{}")
    for attempt in (
        lambda: claim(store, "me"),
        lambda: commit.ensure_not_fenced(store, KEYS, held()),
        lambda: create(store, a_manifest(step=11)),
    ):
        with pytest.raises(CorruptError, match=foreign):
            attempt()
    store.delete(foreign)
    create(store, a_manifest(step=11))


def test_a_claim_that_no_other_vm_could_read_is_not_created(store: MemoryStore) -> None:
    """The id of a start comes from the trainer."""
    for start_id in ("x" * 10_000, "", "ä"):
        with pytest.raises(CorruptError, match="start"):
            claim(store, start_id)
    assert not store.objects


# ---------------------------------------------------------------- what readers find


class Blind(MemoryStore):
    """Accepts manifests, and omits some objects from its listing, or from its other replies."""

    hidden_from_list = hidden_from_get = False

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        is_hidden = self.hidden_from_list and "commits" in prefix
        return Page([], None) if is_hidden else super().page(prefix, token, after=after)

    def get(self, key: str) -> bytes:
        if self.hidden_from_get:
            raise NotFound(key)
        return super().get(key)

    def head(self, key: str) -> ObjectInfo | None:
        return None if self.hidden_from_get else super().head(key)


@pytest.mark.fault("G08")
def test_a_commit_that_the_listing_does_not_show_is_not_reported() -> None:
    """Readers use the listing.  A retry is safe, and succeeds once the listing contains the manifest."""
    store = Blind()
    store.hidden_from_list = True
    for _ in range(2):
        with pytest.raises(StoreError, match="listing of the store does not contain it"):
            create(store, a_manifest())
    store.hidden_from_list = False
    create(store, a_manifest())


def test_a_commit_is_read_back_as_a_reader_reads_it() -> None:
    """A store that returns 404 or other bytes for each GET has no commit."""
    store = Blind()
    store.hidden_from_get = True
    with pytest.raises(CorruptError, match="missing"):
        create(store, a_manifest(), reads_back=True)
    with pytest.raises(NotFound):  # refused, and the existing object cannot be compared
        create(store, a_manifest(), reads_back=True)
    store.hidden_from_get = False
    create(store, a_manifest(), reads_back=True)

    class Changing(MemoryStore):
        def get(self, key: str) -> bytes:
            if "commits" not in key:
                return super().get(key)
            made = manifest.decode(super().get(key))
            return manifest.encode(replace(made, created="later"))

    with pytest.raises(CorruptError, match="another manifest than was written"):
        create(Changing(), a_manifest(step=11), reads_back=True)


def test_a_commit_costs_five_small_requests(store: MemoryStore) -> None:
    """The claims, its own one, the manifest, the listing of that commit, and newer claims, for any size."""
    claim(store, "us")
    store.requests.clear()
    create(store, a_manifest())
    assert store.requests == [
        ("list", KEYS.generations),
        ("get", KEYS.generation(1)),
        ("put", KEYS.commit(CommitRef(1, 10), 0, 1)),
        ("list", KEYS.parts(CommitRef(1, 10))),
        ("list", KEYS.generations),
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
    store: MemoryStore, unusable: dict[str, Any]
) -> None:
    """The declared error, and no request."""
    with pytest.raises(BoundsError):
        create(store, replace(a_manifest(), **unusable))
    assert not store.objects


NODES = commit.MANIFESTS_READ + 1


def commit_of(store: ObjectStore, nodes: int, *, suspect: int | None = None) -> catalog.Commit:
    """A checkpoint of this many VMs, of which one may have had a failed GPU."""
    commit.claim_generation(store, KEYS, start_id="us", identity={})
    for node in range(nodes):
        health = {} if node != suspect else {"gpu_is_sound": 0.0}
        create(store, replace(a_manifest(), node=node, nodes=nodes, health=health))
    (found,) = catalog.list_commits(store, KEYS)
    return found


@pytest.mark.parametrize("suspect", range(NODES))
def test_one_suspect_share_of_a_large_job_is_seen_by_its_mark(
    monkeypatch: pytest.MonkeyPatch, suspect: int
) -> None:
    """Also if the sample of manifests does not contain it."""
    store = MemoryStore()
    found = commit_of(store, NODES, suspect=suspect)
    monkeypatch.setattr(
        "random.sample", lambda nodes, count: [n for n in nodes if n != suspect][:count]
    )
    assert not commit.are_all_sound(store, KEYS, found)


def test_a_damaged_manifest_of_a_large_job_is_found_if_it_is_in_the_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All VMs together read all manifests, with great probability."""
    store = MemoryStore()
    found = commit_of(store, NODES)
    monkeypatch.setattr("random.sample", lambda nodes, count: nodes[-count:])
    assert commit.are_all_sound(store, KEYS, found)
    store.put(found.manifest_keys[NODES - 1], b"{}")
    with pytest.raises(CorruptError):
        commit.are_all_sound(store, KEYS, found)


def test_a_verdict_costs_each_vm_of_a_large_job_the_same_requests() -> None:
    """The requests of all VMs do not grow with the square of their number."""
    costs = []
    for nodes in (NODES, 4 * NODES):
        store = MemoryStore()
        found = commit_of(store, nodes)
        before = len(store.requests)
        assert commit.are_all_sound(store, KEYS, found)
        costs.append(len(store.requests) - before)
    assert costs == [commit.MANIFESTS_READ + 1] * 2


def test_a_planted_mark_counts_only_without_a_signing_key() -> None:
    """A role that may create objects cannot turn SAFE into PARTIAL for those who hold the key."""
    for key in (None, SigningKey(bytes(64))):
        bucket = MemoryStore()
        store: ObjectStore = bucket if key is None else signed(bucket, key)
        found = commit_of(store, NODES)
        bucket.put(KEYS.suspect(found.ref, 0), b"{}")
        assert commit.are_all_sound(store, KEYS, found) == (key is not None)


def test_the_mark_of_a_suspect_share_precedes_its_manifest() -> None:
    """Without the mark there is no manifest, so no VM can find the checkpoint whole and miss the mark."""
    store = MemoryStore()
    commit.claim_generation(store, KEYS, start_id="us", identity={})
    made = replace(a_manifest(), nodes=NODES, health={"gpu_is_sound": 0.0})

    def refuse(what: str, key: str) -> None:
        if what == "put" and key.startswith(KEYS.suspects):
            raise Transient("no")

    store.before = refuse
    with pytest.raises(Transient):
        create(store, made)
    assert not catalog.list_commits(store, KEYS)
    store.before = lambda *_: None
    create(store, made)
    create(store, made)  # after a lost reply: the mark exists
    assert len(catalog.list_commits(store, KEYS)) == 1
