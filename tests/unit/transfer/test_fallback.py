# SPDX-License-Identifier: Apache-2.0
"""A restore takes from the mirror what the store has lost or damaged, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs
from swansong_bucket.errors import NothingToRestore, Transient
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef
from swansong_bucket.transfer.restore import RestoreResult, restore
from swansong_bucket.transfer.target import RestoreTarget

from testkit import committed
from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")
OLD = {"weights": b"old" * 700, "index.json": b"{}"}
NEW = {"weights": b"new" * 1000, "index.json": b"{}", "empty": b""}
MANIFEST = KEYS.commit(CommitRef(1, 200), 0, 1)


class Rig:
    """A store with an older and a newer commit, and its mirror."""

    def __init__(self, to: Path) -> None:
        self.to = to
        self.store, self.mirror = MemoryStore(), MemoryStore()
        committed.commit(self.store, OLD, step=100)
        made = committed.commit(self.store, NEW, step=200)
        self.mirror.objects = dict(self.store.objects)
        self.weights = made.shards[0].extents[1].chunk.key

    def restore(self) -> RestoreResult:
        return restore(self.store, KEYS, RestoreTarget(self.to), mirror=self.mirror)

    def damage(self, how: str) -> None:
        """Spoil the newer commit in the store."""
        objects = self.store.objects
        match how:
            case "flipped":
                objects[self.weights] = b"N" + objects[self.weights][1:]
            case "missing":
                del objects[self.weights]
            case "short":
                objects[self.weights] = objects[self.weights][:-1]
            case "manifest":
                objects[MANIFEST] = objects[MANIFEST].replace(b"new", b"old")[:-1]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "restored")


@pytest.mark.fault("M09")
@pytest.mark.parametrize("how", ["flipped", "missing", "short", "manifest"])
def test_the_newest_commit_survives_a_damaged_store(rig: Rig, how: str) -> None:
    """Without the mirror the older commit is restored; with it the newer one, and the log says so."""
    rig.damage(how)
    with capture_logs() as logs:
        restored = rig.restore()
    assert (restored.ref.step, restored.skipped) == (200, ())
    assert committed.tree(rig.to) == NEW
    name = "manifest of generation 1 step 200" if how == "manifest" else "weights"
    assert restored.from_mirror == (name,)
    assert [line["what"] for line in logs if line["event"] == "read_from_mirror"] == [name]


def test_an_intact_store_sends_no_request_to_the_mirror(rig: Rig) -> None:
    """The mirror costs a restore nothing."""
    rig.mirror.requests.clear()
    assert rig.restore().from_mirror == ()
    assert not rig.mirror.requests


@pytest.mark.fault("M01")
@pytest.mark.parametrize("how", ["flipped", "missing", "manifest"])
def test_a_mirror_that_is_away_changes_nothing(rig: Rig, how: str) -> None:
    """The damaged commit is skipped with its own reason, as without a mirror."""

    def away(*_: str) -> None:
        raise Transient("connection refused")

    rig.damage(how)
    rig.mirror.before = away
    restored = rig.restore()
    assert restored.ref.step == 100
    assert "refused" not in restored.skipped[0][1]
    assert committed.tree(rig.to) == OLD


def test_both_damaged_is_damaged(rig: Rig) -> None:
    """Bytes of the mirror are verified like those of the store."""
    rig.damage("flipped")
    rig.mirror.objects[rig.weights] = rig.store.objects[rig.weights]
    assert rig.restore().ref.step == 100


def test_a_deleted_commit_stays_deleted(rig: Rig) -> None:
    """The listing of the store decides: retention, or an operator, has removed the commit."""
    del rig.store.objects[MANIFEST]
    assert rig.restore().ref.step == 100


def test_an_emptied_store_is_not_refilled(rig: Rig) -> None:
    """An operator who emptied the prefix starts the run again, with or without a mirror."""
    rig.store.objects.clear()
    with pytest.raises(NothingToRestore):
        rig.restore()
