# SPDX-License-Identifier: Apache-2.0
"""Requests and time of the commands in buckets of two sizes, and of manifests of two sizes."""

from __future__ import annotations

import time

import pytest
from swansong_bucket.format import manifest
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import Extent, StoredShard

from bench.many_commits import ManyCommits, costs
from testkit.committed import chunk_of, manifest_of, named_shard

MIB = 2**20


def test_only_what_reads_all_commits_costs_more_requests_with_more_of_them() -> None:
    """Four times as many old commits and claims: two commands list all claims, five all commits."""
    small, large = (
        {cost.name: cost for cost in costs(ManyCommits(count, count, count, page_keys=20), count)}
        for count in (60, 240)
    )
    grown = {name for name in small if large[name].lists > small[name].lists}
    assert grown == {
        "choose the newest commit, without a known generation",
        "claim: find the next number",
        "ls: keys of all commits",
        "ls: manifests of all commits",
        "verify --sample 1e-7 %: sizes of all objects",
        "prune --dry-run",
        "prune",
    }
    others = {name for name in small if large[name].others > small[name].others}
    assert others == {
        "ls: manifests of all commits",
        "verify --sample 1e-7 %: sizes of all objects",
        "prune --dry-run",
        "prune",
    }
    claims = "choose the newest commit, without a known generation"
    assert large[claims].lists == 240 // 20 + 1


def of_shards(count: int) -> Manifest:
    """A manifest of small shards in shared chunks."""
    shards = []
    for number in range(count):
        chunk = chunk_of(b"%d" % (number // 400), size_bytes=400 * 65536)
        path = f"rank-{number % 8:05d}/layer-{number:06d}"
        extent = Extent(chunk, number % 400 * 65536, 65536)
        shards.append(StoredShard(path=path, size_bytes=65536, extents=(extent,)))
    return manifest_of(*shards)


def of_one_shard(count: int) -> Manifest:
    """A manifest of one shard with this number of chunks."""
    return manifest_of(named_shard("model", count * 16 * MIB, chunk_bytes=16 * MIB))


@pytest.mark.parametrize(("make", "count"), [(of_shards, 300), (of_one_shard, 1500)])
def test_the_cost_of_a_manifest_is_linear(make: object, count: int) -> None:
    """Five times as many shards, or chunks: five times the bytes, and no more than twelve times the time."""
    assert callable(make)
    sizes_bytes, times_s = [], []
    for number in (count, 5 * count):
        made = make(number)
        best_s = 1e9
        for _ in range(2):
            began_s = time.thread_time()
            data = manifest.encode(made)
            assert manifest.decode(data) == made
            best_s = min(best_s, time.thread_time() - began_s)
        sizes_bytes.append(len(data))
        times_s.append(best_s)
    assert sizes_bytes[1] / sizes_bytes[0] == pytest.approx(5, rel=0.1)
    assert times_s[1] < 12 * times_s[0]
