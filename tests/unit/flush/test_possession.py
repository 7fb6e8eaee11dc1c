# SPDX-License-Identifier: Apache-2.0
"""Chunks are read back while their set is sent: a store that drops bytes gets no commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swansong_bucket.errors import Forbidden, StoreError, Transient
from swansong_bucket.model import Chunk
from swansong_bucket.stores.base import Sink
from swansongd.flush import possession
from swansongd.flush.known import KnownChunks
from swansongd.flush.possession import INTERVAL_S, SAMPLE_BYTES, Possession

from testkit.committed import chunk_of
from testkit.memory_store import MemoryStore
from testkit.waiting import until

pytestmark = pytest.mark.fault("O11")


class Rig:
    """The thread that reads back, with a clock that stands still."""

    def __init__(self, directory: Path) -> None:
        self.store = MemoryStore()
        self.known = KnownChunks(
            directory, run="r", store_url=self.store.url, is_data=lambda _key: True
        )
        self.stop = threading.Event()
        self.now = 0.0
        self.possession = Possession(
            self.store,
            self.known,
            is_urgent=lambda: True,
            stop=self.stop,
            monotonic=lambda: self.now,
        )

    def created(self, data: bytes, *, stored: bytes | None = None) -> Chunk:
        """The store acknowledges a chunk, and keeps ``stored`` of it; empty: nothing."""
        chunk = chunk_of(data)
        if stored != b"":
            self.store.put(chunk.key, data if stored is None else stored)
        self.known.created(chunk, {})
        self.possession.offer(chunk, memoryview(data))
        return chunk


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.stop.set()


def reads(rig: Rig) -> int:
    return rig.store.count("get")


@pytest.mark.parametrize("stored", [b"", b"other", b"cut", b"wrong, and longer"])
def test_a_lost_chunk_is_not_named(rig: Rig, stored: bytes) -> None:
    """After the wait of a commit, no manifest may name it: its bytes are sent again."""
    other = rig.created(b"other bytes")
    rig.possession.settle()
    assert rig.known.holds([other])
    chunk = rig.created(b"bytes", stored=stored)
    rig.possession.settle()
    assert not rig.known.holds([chunk])
    assert rig.known.find(chunk.digest) is None
    assert not rig.known.holds([other]), "the store may have lost it as well"


def test_after_a_loss_all_chunks_of_the_next_commit_are_read(rig: Rig) -> None:
    """One of them is not enough: an attempt may begin while the store still drops bytes, and end later."""
    rig.created(b"lost", stored=b"")
    rig.possession.settle()
    for number in range(5):
        again = [
            rig.created(f"{number} {n}".encode(), stored=b"" if n == 0 else None) for n in range(9)
        ]
        rig.possession.settle()
        assert not rig.known.holds(again)
    whole = [rig.created(f"whole {n}".encode()) for n in range(9)]
    before = reads(rig)
    rig.possession.settle()
    assert rig.known.holds(whole)
    until(lambda: reads(rig) >= before)
    for n in range(9):
        rig.created(f"trusted {n}".encode())
    rig.possession.settle()
    assert reads(rig) <= before + 9 + 2, "one chunk is enough again"


def test_after_a_loss_a_commit_that_did_not_wait_for_its_reads_shows_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of each chunk is read until the samples of a whole commit were."""
    rig.created(b"lost", stored=b"")
    rig.possession.settle()
    entered, leave = threading.Event(), threading.Event()
    rig.store.before = _hanging(entered, leave)
    rig.created(b"slow")
    assert entered.wait(60)
    monkeypatch.setattr(possession, "URGENT_WAIT_S", 0.0)
    rig.possession.settle()
    leave.set()
    before = reads(rig)
    for number in range(9):
        rig.created(f"{number}".encode())
    until(lambda: reads(rig) == before + 9)


def test_a_sample_is_small_and_lies_anywhere(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole chunk would delay the commit over a slow link; a store may keep the beginnings only."""
    sizes: list[int] = []
    get_range = rig.store.get_range

    def measured(key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        sizes.append(size_bytes)
        get_range(key, offset, size_bytes, sink)

    monkeypatch.setattr(rig.store, "get_range", measured)
    data = bytes(4 * SAMPLE_BYTES)
    half = data[: 2 * SAMPLE_BYTES] + b"x" * 2 * SAMPLE_BYTES
    lost = 0
    for number in range(40):
        chunk = rig.created(data + bytes([number]), stored=half + bytes([number]))
        rig.possession.settle()
        lost += not rig.known.holds([chunk])
    assert lost >= 8
    assert set(sizes) == {SAMPLE_BYTES}


@pytest.mark.parametrize("error", [Transient("timeout"), Forbidden("403")])
def test_a_failing_store_proves_nothing(rig: Rig, error: StoreError) -> None:
    """A read that fails leaves the chunk known, also without the right to read."""

    def before(call: str, _key: str) -> None:
        if call == "get":
            raise error

    rig.store.before = before
    chunk = rig.created(b"bytes")
    rig.possession.settle()
    assert rig.known.holds([chunk])


def test_the_reads_are_few(rig: Rig) -> None:
    """Between two reads lies a time, and one of the chunks created meanwhile is read then."""
    chunks = [rig.created(f"{number}".encode()) for number in range(50)]
    until(lambda: reads(rig) == 1)
    rig.now += INTERVAL_S
    rig.created(b"one more")
    until(lambda: reads(rig) == 2)
    assert rig.known.holds(chunks)


def test_a_commit_has_at_least_one_of_its_new_chunks_read_back(rig: Rig) -> None:
    """Also right after another read; a commit without new chunks reads nothing."""
    for number in range(3):
        rig.created(f"{number}".encode())
        rig.possession.settle()
        assert reads(rig) >= number + 1
    before = reads(rig)
    rig.possession.settle()
    assert reads(rig) == before


def test_a_commit_waits_for_no_read_that_hangs(rig: Rig) -> None:
    """In an evacuation it waits a second, and the set is committed."""
    entered, leave = threading.Event(), threading.Event()
    rig.store.before = _hanging(entered, leave)
    chunk = rig.created(b"bytes")
    assert entered.wait(60)
    rig.possession.settle()
    assert rig.known.holds([chunk])
    leave.set()


def _hanging(entered: threading.Event, leave: threading.Event) -> Callable[[str, str], None]:
    def before(call: str, _key: str) -> None:
        if call == "get":
            entered.set()
            assert leave.wait(30)

    return before
