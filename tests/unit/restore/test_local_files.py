# SPDX-License-Identifier: Apache-2.0
"""Files on this machine in place of bytes from the store: real directories, and a store that counts."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from swansong_bucket.errors import StoreError
from swansong_bucket.model import CommitRef
from swansong_bucket.transfer.restore import RestoreResult
from swansong_bucket.transfer.target import RestoredFile
from swansongd.restore.downloads import Downloads
from swansongd.restore.wish import Wish
from swansongd.staging import scan
from swansongd.staging.seal import Scanner

from testkit import committed
from testkit.odd_store import OddStore
from testkit.restore_rig import RestoreRig
from testkit.staged import ME, seal_files
from testkit.story import Story
from testkit.waiting import until

FILES = {
    "model.bin": random.Random(1).randbytes(5120),
    "optimizer.bin": random.Random(2).randbytes(3000),
}


class Vm(RestoreRig[OddStore]):
    """A staging directory with a sealed set of step 100, which is also committed."""

    def __init__(self, directory: Path) -> None:
        committed.file_store(directory / "bucket")
        store = OddStore(directory / "bucket")
        self.known: list[CommitRef] = []
        """Commits whose chunks the next flush may name."""
        super().__init__(
            directory / "staging",
            store,
            story=Story(claimed=False),
            fetched=lambda ref, _shards: self.known.append(ref),
        )
        self.content = seal_files(self.run.path, 100, FILES)
        self.scan()

    @property
    def set(self) -> Path:
        (found,) = self.run.path.glob("step-*")
        return found

    def scan(self) -> None:
        scanner = Scanner(self.run.path, allowed_uids=ME, settle_s=0, monotonic=lambda: 0.0)
        self.story.staging = list(scanner.scan().staged)
        self.story.scan()

    def commit(self, step: int, files: dict[str, bytes] | None = None) -> CommitRef:
        return committed.commit(self.store, files or self.content, step=step, nonce=f"a{step}").ref

    def fetch(self, ref: CommitRef) -> RestoreResult:
        """Download by a daemon that has just started."""
        result = Downloads(self.context).fetch(Wish(ref=ref)).result
        assert result is not None
        return result


@pytest.fixture
def vm(tmp_path: Path) -> Vm:
    return Vm(tmp_path)


@pytest.mark.parametrize("place", ["staging", "aside", "download"])
def test_a_checkpoint_that_is_on_this_machine_is_not_fetched(vm: Vm, place: str) -> None:
    """All bytes are copied and verified; the restored files belong to the daemon alone."""
    ref = vm.commit(100)
    if place == "aside":
        scan.set_aside(vm.run.fd, vm.set.name)
        vm.scan()
    elif place == "download":
        vm.fetch(ref)
        scan.remove_set(vm.run.fd, vm.set.name)
        vm.scan()
    vm.store.given.clear()
    result = vm.fetch(ref)
    assert result.local_bytes == result.size_bytes
    assert not vm.store.given
    assert committed.tree(result.path) == vm.content
    assert all(path.stat().st_nlink == 1 for path in result.path.rglob("*.bin"))
    assert list(vm.restored.iterdir()) == [result.path]


def test_an_unchanged_file_serves_a_commit_of_another_step(vm: Vm) -> None:
    """Only the model has changed since step 100.

    The copied bytes do not show that the store has them, so no set names the chunks of this commit.
    """
    changed = {**vm.content, "rank-00000/model.bin": random.Random(3).randbytes(5120)}
    ref = vm.commit(200, changed)
    result = vm.fetch(ref)
    assert vm.known == []
    assert vm.store.given_bytes == 5120
    assert result.local_bytes == result.size_bytes - 5120
    assert committed.tree(result.path) == changed


def test_bytes_that_were_copied_before_an_interruption_are_not_those_of_the_store(vm: Vm) -> None:
    """The set is gone when the download continues: what it was copied from shows no more."""
    changed = {**vm.content, "rank-00000/model.bin": random.Random(3).randbytes(5120)}
    ref = vm.commit(200, changed)

    def fail(*_: object) -> None:
        (partial,) = vm.restored.glob(".*.partial-*")
        copy = partial / "files/rank-00000/optimizer.bin"
        until(
            lambda: copy.is_file() and copy.read_bytes() == FILES["optimizer.bin"],
            what="the copy of the unchanged file",
        )
        raise StoreError("the store failed")

    vm.store.instead = fail
    with pytest.raises(StoreError):
        vm.fetch(ref)
    vm.store.instead = lambda *_: None
    scan.remove_set(vm.run.fd, vm.set.name)
    vm.scan()
    assert vm.fetch(ref).reused_bytes
    assert vm.known == []


def test_the_set_of_the_same_step_is_preferred(vm: Vm) -> None:
    """Sets of other steps have files of the same names and sizes."""
    for step in (90, 110):
        other = random.Random(step)
        seal_files(
            vm.run.path, step, {name: other.randbytes(len(data)) for name, data in FILES.items()}
        )
    vm.scan()
    result = vm.fetch(vm.commit(100))
    assert result.local_bytes == result.size_bytes
    assert not vm.store.given


def test_a_trainer_that_changed_a_staged_file_costs_only_a_download(vm: Vm) -> None:
    """The file has the size and the step of the shard, and other bytes."""
    ref = vm.commit(100)
    (vm.set / "rank-00000/model.bin").write_bytes(b"x" * 5120)
    vm.scan()
    result = vm.fetch(ref)
    assert committed.tree(result.path) == vm.content
    assert result.local_bytes == result.size_bytes - 5120


def test_a_file_that_changes_during_the_copy_is_fetched(
    vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copied chunk does not match its name: this chunk, and the rest of the file, are fetched."""
    ref = vm.commit(100)
    model = vm.set / "rank-00000/model.bin"
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        if os.readlink(f"/proc/self/fd/{fd}") == str(model) and offset == 2000:
            buffers[0][:1] = b"!"
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    result = vm.fetch(ref)
    assert committed.tree(result.path) == vm.content
    assert result.local_bytes <= result.size_bytes - 1000
    assert vm.store.given_bytes == result.size_bytes - result.local_bytes


def test_a_clone_is_verified_like_a_copy(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that shares blocks: a clone with a flipped bit is fetched instead."""
    ref = vm.commit(100)

    def clone(file: RestoredFile, fd: int, offset: int, size_bytes: int) -> bool:
        data = bytearray(os.pread(fd, size_bytes, offset))
        if offset == 1000:
            data[0] ^= 1
        file.write(memoryview(data), offset)
        return True

    monkeypatch.setattr(RestoredFile, "clone", clone)
    result = vm.fetch(ref)
    assert committed.tree(result.path) == vm.content
    assert 0 < result.local_bytes <= result.size_bytes - 2000


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_a_name_that_leads_elsewhere_is_not_copied(
    vm: Vm, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    """Links in a set are never followed, and the bytes come from the store."""
    ref = vm.commit(100)
    other = tmp_path / "other"
    other.write_bytes(FILES["model.bin"])
    model = vm.set / "rank-00000/model.bin"
    model.unlink()
    make(other, model)
    result = vm.fetch(ref)
    assert committed.tree(result.path) == vm.content
    assert vm.store.given_bytes == 5120


def test_a_directory_that_cannot_be_read_has_no_candidates() -> None:
    """The sets that were set aside are hints: without them a restore fetches their bytes."""
    with open(os.devnull) as no_directory:
        assert scan.sets_aside(no_directory.fileno()) == {}
