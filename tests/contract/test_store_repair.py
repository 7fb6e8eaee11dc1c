# SPDX-License-Identifier: Apache-2.0
"""Verification and repair with every store: damaged and missing chunks come back from a mirror."""

from __future__ import annotations

import random

import pytest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.transfer.reader import ReadOptions
from swansong_tools.upkeep.repair import repair
from swansong_tools.upkeep.verify import verify

from testkit.committed import commit
from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")
QUICK = ReadOptions(connections=2)


@pytest.mark.fault("O80")
@pytest.mark.parametrize("chunk_bytes", [5_000, 5 * 2**20 + 7])
def test_a_store_gets_its_chunks_back(bare_store: ObjectStore, chunk_bytes: int) -> None:
    """One with a flipped byte, a short one and one that is gone: all have the bytes of the mirror again."""
    files = {
        name: random.Random(name).randbytes(chunk_bytes) for name in ("flipped", "short", "gone")
    }
    mirror = MemoryStore()
    for store in (bare_store, mirror):
        made = commit(store, files, chunk_bytes=chunk_bytes)
    assert verify(bare_store, KEYS).defects == []
    flipped, short, gone = made.chunks
    data = bytearray(mirror.objects[flipped.key])
    data[4] ^= 1
    bare_store.put(flipped.key, bytes(data))
    bare_store.put(short.key, mirror.objects[short.key][:-1])
    bare_store.delete(gone.key)

    findings = verify(bare_store, KEYS)
    assert set(findings.damaged) == set(made.chunks)
    assert f"has an object of {chunk_bytes - 1} bytes" in findings.damaged[short]
    outcomes = repair(bare_store, KEYS, findings.damaged, options=QUICK, mirror=mirror)
    assert [outcome.problem for outcome in outcomes] == ["", "", ""]
    assert verify(bare_store, KEYS).defects == []
    for chunk in made.chunks:
        assert bare_store.get(chunk.key) == mirror.objects[chunk.key]
