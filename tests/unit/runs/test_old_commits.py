# SPDX-License-Identifier: Apache-2.0
"""Old commits and old claims cost no requests: the newest ones are listed first."""

from __future__ import annotations

import random

import pytest
from swansong_bucket.errors import CorruptError
from swansong_bucket.format import claim as claims
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import catalog
from swansong_bucket.runs import commit as commits

from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")


def bucket(generations: int, steps: int = 1) -> MemoryStore:
    """A bucket in which each generation has this number of commits."""
    store = MemoryStore()
    for generation in range(1, generations + 1):
        claim = ClaimObject(run="r", generation=generation, start=f"s{generation}")
        store.objects[KEYS.generation(generation)] = claims.encode(claim)
        for step in range(steps):
            store.objects[KEYS.commit(CommitRef(generation, step), 0, 1)] = b"{}"
    return store


def lists(store: MemoryStore, prefix: str) -> int:
    return sum(what == "list" and key.startswith(prefix) for what, key in store.requests)


@pytest.mark.parametrize("near", [0, 1, 30, 60, 61, 99_999_999])
def test_the_newest_commits_are_those_of_the_whole_listing(near: int) -> None:
    """In the same order, whatever generation the search begins at: also above all claims."""
    source = random.Random(7)
    store = bucket(40)
    for _ in range(60):
        ref = CommitRef(source.randrange(1, 60), source.randrange(5), source.random() < 0.2)
        store.objects[KEYS.commit(ref, source.randrange(2), 2)] = b"{}"
    found = list(catalog.newest_commits(store, KEYS, near=near))
    assert found == catalog.list_commits(store, KEYS)
    for since in range(62):
        newer = [each for each in found if each.ref.generation >= since]
        assert catalog.list_commits(store, KEYS, since=since) == newer
        assert catalog.claimed(store, KEYS, since=since) == list(range(max(1, since), 41))


def test_generations_without_a_commit_cost_few_requests() -> None:
    """VMs that die before their first commit: each listing goes back eight times as far."""
    store = bucket(1)
    for generation in range(2, 1000):
        store.objects[KEYS.generation(generation)] = b"{}"
    assert commits.newest_whole_commit(store, KEYS, near=999) == CommitRef(1, 0)
    assert lists(store, KEYS.commits) <= 5


def test_a_foreign_object_among_the_claims_hides_no_commit() -> None:
    """A reader lists all commits then; one below ``commits/`` that the search reaches is an error."""
    store = bucket(20)
    store.objects[f"{KEYS.generations}junk"] = b"x"
    assert commits.newest_whole_commit(store, KEYS) == CommitRef(20, 0)
    store.objects[f"{KEYS.commits}later"] = b"x"
    with pytest.raises(CorruptError, match="later"):
        commits.newest_whole_commit(store, KEYS)
