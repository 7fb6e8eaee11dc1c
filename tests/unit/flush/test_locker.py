# SPDX-License-Identifier: Apache-2.0
"""The retention of older chunks is extended before a manifest names them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs
from swansong_bucket.errors import Permanent
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import Chunk
from swansong_bucket.retention import locks
from swansongd.flush.background import Background
from swansongd.flush.locker import Locker
from swansongd.flush.store_health import StoreHealth

from testkit.committed import chunk_of, manifest_of, whole_shard
from testkit.memory_store import MemoryStore

DAYS = 8
DAY_S = 86400.0
OLD, NEW = chunk_of(b"old").key, chunk_of(b"new").key
COMMIT = "r/commits/00000001/000000000020/00000-of-00001.json"


@dataclass
class Rig:
    """A locker on a store whose clock the test sets."""

    store: MemoryStore = field(default_factory=MemoryStore)
    now_s: float = 1000.0
    is_urgent: bool = False

    def __post_init__(self) -> None:
        self.store.clock = lambda: self.now_s
        self.store.lock_period_s = locks.period_s(DAYS)
        self.store.put(OLD, b"old")
        self.created_s: dict[str, float] = {}
        self.events: list[object] = []
        self.locker = Locker(
            Background(self.store, lambda: self.is_urgent),
            DAYS,
            health=StoreHealth(self.events.append, monotonic=lambda: self.now_s),
            age_s=self.age_s,
            boottime=lambda: self.now_s,
        )

    def create(self, key: str) -> None:
        """Store a chunk that no commit names yet."""
        self.store.put(key, b"new")
        self.created_s[key] = self.now_s

    def age_s(self, chunk: Chunk) -> float | None:
        return self.now_s - self.created_s[chunk.key] if chunk.key in self.created_s else None

    def extend(self, *keys: str) -> None:
        self.locker.extend(naming(*keys))

    def left_s(self, key: str) -> float:
        return self.store.locked_until_unix_s.get(key, 0.0) - self.now_s


def naming(*keys: str) -> Manifest:
    """A manifest with these chunks."""
    return manifest_of(*(whole_shard(key, Chunk(key, 4)) for key in keys), step=20)


@pytest.mark.fault("K03")
def test_an_older_chunk_is_locked_at_least_as_long_as_the_manifest() -> None:
    """It is extended once; the chunks that no commit names yet have their retention already."""
    rig = Rig()
    rig.now_s += 5 * DAY_S
    rig.create(NEW)
    rig.extend(OLD, NEW)
    rig.store.put(COMMIT, b"{}")
    assert rig.left_s(OLD) == rig.left_s(NEW) == 10 * DAY_S
    assert rig.left_s(COMMIT) == 8 * DAY_S
    rig.created_s.clear()  # now a commit names it
    rig.extend(OLD, NEW)
    assert rig.store.count("lock") == 1


@pytest.mark.fault("K03")
def test_a_chunk_that_waited_long_for_its_commit_is_extended() -> None:
    """Its set was interrupted."""
    rig = Rig()
    rig.create(NEW)
    rig.now_s += 1.5 * DAY_S
    rig.extend(NEW)
    assert rig.left_s(NEW) == 10 * DAY_S


def test_a_chunk_is_extended_again_at_half_of_its_spare() -> None:
    """So the requests are few, and a commit within the other half needs none."""
    rig = Rig()
    rig.extend(OLD)
    rig.now_s += 0.9 * DAY_S
    rig.extend(OLD)
    assert rig.store.count("lock") == 1
    rig.now_s += 0.2 * DAY_S
    rig.extend(OLD)
    assert rig.store.count("lock") == 2


@pytest.mark.fault("K07")
def test_an_evacuation_sends_no_request() -> None:
    """The chunks of the commit before it stay locked longer than the new manifest."""
    rig = Rig()
    rig.extend(OLD)
    rig.now_s += 0.9 * DAY_S
    rig.is_urgent = True
    rig.extend(OLD)
    assert rig.store.count("lock") == 1
    assert rig.left_s(OLD) >= DAYS * DAY_S


@pytest.mark.fault("K07")
def test_a_notice_ends_an_extension() -> None:
    """Chunks that are not extended yet stay due."""
    rig = Rig()
    keys = [chunk_of(b"%d" % number).key for number in range(40)]
    for key in keys:
        rig.store.put(key, b"data")

    def notice(what: str, _key: str) -> None:
        rig.is_urgent = what == "lock" or rig.is_urgent

    rig.store.after = notice
    rig.extend(*keys)
    sent = rig.store.count("lock")
    assert 0 < sent <= 8
    rig.store.after = lambda *_: None
    rig.is_urgent = False
    rig.extend(*keys)
    assert rig.store.count("lock") == len(keys)


@pytest.mark.fault("K07")
def test_a_failed_extension_prevents_no_commit() -> None:
    """It is logged with its fix and reported as a failure; the next commit tries again."""
    rig = Rig()

    def refuse(what: str, key: str) -> None:
        if what == "lock":
            raise Permanent(f"lock {key}: 403 AccessDenied", hint="Allow s3:PutObjectRetention")

    rig.store.before = refuse
    with capture_logs() as logs:
        rig.extend(OLD)
    [entry] = [each for each in logs if each["event"] == "retention_not_extended"]
    assert OLD in entry["error"]
    assert entry["kind"] == "refused"
    assert entry["hint"] == "Allow s3:PutObjectRetention"
    assert rig.events
    rig.store.before = lambda *_: None
    rig.extend(OLD)
    assert rig.left_s(OLD) == 10 * DAY_S


def test_without_retention_nothing_is_asked() -> None:
    """The default costs no request and no time."""
    rig = Rig()
    store = Background(rig.store, lambda: False)
    Locker(store, 0, health=StoreHealth(rig.events.append)).extend(naming(OLD))
    assert rig.store.count("lock") == 0


def test_what_is_locked() -> None:
    """Manifests and data are; claims, pins, farewells and rehearsals are not."""
    period_s = locks.period_s(DAYS)
    assert period_s(COMMIT) == 8 * DAY_S
    assert period_s(NEW) == 10 * DAY_S
    assert locks.period_s(1)(NEW) == 2 * DAY_S
    free = ("generations/00000001.json", "pins/x.json", "farewells/x", "probes/p/data/1/2/3")
    assert [period_s(f"r/{key}") for key in free] == [0.0] * len(free)
