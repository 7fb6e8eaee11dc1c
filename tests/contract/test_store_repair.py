# SPDX-License-Identifier: Apache-2.0
"""Verification and repair with every store: damaged and missing objects come back from a mirror."""

from __future__ import annotations

import random

import pytest
from swansongd.bucket.keys import RunKeys
from swansongd.restore import repair as repairs
from swansongd.restore.reader import ReadOptions
from swansongd.restore.repair import repair
from swansongd.restore.verify import verify
from swansongd.stores.base import ObjectStore

from testkit.committed import commit
from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")
QUICK = ReadOptions(connections=2)
PART_BYTES = 5 << 20
"""The smallest part of S3."""


@pytest.mark.fault("O80")
@pytest.mark.parametrize("size_bytes", [5_000, PART_BYTES + 7], ids=["one-request", "parts"])
def test_a_store_gets_its_objects_back(
    bare_store: ObjectStore, size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object with a flipped byte and one that is gone: both have the bytes of the mirror again."""
    monkeypatch.setattr(repairs, "PUT_BYTES_MAX", PART_BYTES)
    monkeypatch.setattr(repairs, "_PART_BYTES", PART_BYTES)
    files = {name: random.Random(name).randbytes(size_bytes) for name in ("flipped", "gone")}
    mirror = MemoryStore()
    for store in (bare_store, mirror):
        commit(store, files, part_size_bytes=1000 if size_bytes < PART_BYTES else PART_BYTES // 4)
    assert verify(bare_store, KEYS).defects == []
    flipped, gone = (
        next(key for key in mirror.objects if KEYS.is_data(key) and key.endswith(name))
        for name in ("flipped", "gone")
    )
    data = bytearray(mirror.objects[flipped])
    data[4] ^= 1
    bare_store.put(flipped, bytes(data))
    bare_store.delete(gone)

    findings = verify(bare_store, KEYS)
    assert {damaged.key for damaged in findings.damaged} == {flipped, gone}
    outcomes = repair(bare_store, KEYS, findings.damaged, options=QUICK, mirror=mirror)
    assert [outcome.problem for outcome in outcomes] == ["", ""]
    assert verify(bare_store, KEYS).defects == []
    for key in (flipped, gone):
        assert bare_store.get(key) == mirror.objects[key]
