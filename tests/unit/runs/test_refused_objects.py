# SPDX-License-Identifier: Apache-2.0
"""An object that the store refuses, while it returns others, affects only its own commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from swansong_bucket.errors import NothingToRestore, Permanent, TooLarge
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef
from swansong_bucket.transfer.restore import restore
from swansong_bucket.transfer.target import RestoreTarget
from swansong_tools.upkeep.verify import verify

from testkit.committed import chunk_of, commit
from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")
OLD, NEW = CommitRef(1, 100), CommitRef(1, 200)
Refuses = Callable[[str, str], bool]
"""Whether this request for this key is refused."""


@pytest.fixture
def store() -> MemoryStore:
    """A run with two commits of one generation."""
    made = MemoryStore()
    made.put(KEYS.generation(1), b"{}")
    for ref in (OLD, NEW):
        commit(made, {"model.pt": b"%d" % ref.step, "x/y": b"y"}, step=ref.step)
    return made


def refuse(store: MemoryStore, refuses: Refuses, error: type[Exception] = Permanent) -> None:
    def before(what: str, key: str) -> None:
        if refuses(what, key):
            raise error(f"{what} {key}: HTTP 403 AccessDenied")

    store.before = before


def manifest_of_new(what: str, key: str) -> bool:
    return what == "get" and key == KEYS.commit(NEW, 0, 1)


def chunk_of_new(what: str, key: str) -> bool:
    return what in ("get", "head") and key == chunk_of(b"200").key


def readable_chunk_of_new(what: str, key: str) -> bool:
    return what == "get" and key == chunk_of(b"200").key


@pytest.mark.fault("G08", "G10")
@pytest.mark.parametrize("refuses", [manifest_of_new, chunk_of_new, readable_chunk_of_new])
@pytest.mark.parametrize("error", [Permanent, TooLarge])
def test_one_refused_object_is_a_damaged_commit(
    store: MemoryStore, tmp_path: Path, refuses: Refuses, error: type[Exception]
) -> None:
    """Restore takes the next older commit and reports the reason; verify reports that commit alone."""
    refuse(store, refuses, error)
    got = restore(store, KEYS, RestoreTarget(tmp_path / "here"))
    assert got.ref == OLD
    ((ref, reason),) = got.skipped
    assert ref == NEW
    assert "403" in reason
    findings = verify(store, KEYS).defects
    assert {finding.ref for finding in findings} == {NEW}
    assert all("403" in finding.problem for finding in findings)


def test_a_refused_manifest_of_a_generation_without_a_claim_is_skipped(
    store: MemoryStore, tmp_path: Path
) -> None:
    """Another bucket user can plant it; the claims of the run show whether the store works."""
    planted = KEYS.commit(CommitRef(7, 1), 0, 1)
    store.put(planted, b"{}")
    refuse(store, lambda what, key: what == "get" and key == planted)
    assert restore(store, KEYS, RestoreTarget(tmp_path / "here")).ref == NEW
    assert [finding.ref for finding in verify(store, KEYS).defects] == [CommitRef(7, 1)]


@pytest.mark.parametrize("what", ["get", "list"])
def test_a_store_that_refuses_everything_is_an_error_of_the_store(
    store: MemoryStore, tmp_path: Path, what: str
) -> None:
    """Missing rights are not damage: nothing is reported as corrupt or missing."""
    refuse(store, lambda each, _: each == what)
    with pytest.raises(Permanent, match="403"):
        restore(store, KEYS, RestoreTarget(tmp_path / "here"))
    with pytest.raises(Permanent, match="403"):
        verify(store, KEYS)


def test_no_commit_is_never_concluded_from_a_refusal(store: MemoryStore, tmp_path: Path) -> None:
    """A refused manifest may be whole: the run is not fresh."""
    refuse(store, lambda what, key: what == "get" and key.startswith(KEYS.commits))
    with pytest.raises(NothingToRestore, match="403") as caught:
        restore(store, KEYS, RestoreTarget(tmp_path / "here"))
    assert not caught.value.is_fresh
