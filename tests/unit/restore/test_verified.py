# SPDX-License-Identifier: Apache-2.0
"""Verified files of a download go to the trainers that wait for it."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from swansong.protocol import Message, Restored, RestoreQuery, ShardsTaken, ShardVerified
from swansong_bucket.transfer.target import RestoreTarget
from swansongd.restore.verified import AHEAD, VerifiedShards

from testkit import committed, descriptors
from testkit.odd_store import OddStore
from testkit.restore_rig import RestoreRig
from testkit.waiting import until


class Trainer:
    """Records the files that it gets, and the answer."""

    def __init__(self) -> None:
        self.files: list[tuple[str, str, bytes]] = []
        """Download, path, content."""
        self.answers: queue.Queue[Restored] = queue.Queue()

    def __call__(self, message: Message, fd: int = -1) -> None:
        if isinstance(message, ShardVerified):
            with open(fd, "rb") as file:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.write(fd, b"x")
                self.files.append((message.download, message.path, file.read()))
        elif isinstance(message, Restored):
            self.answers.put(message)

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.files]

    def take(self, shards: VerifiedShards, count: int) -> None:
        shards.take(ShardsTaken("q", self.files[-1][0], count), self)


class Target(RestoreTarget):
    """A target with an open directory of files."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._files_fd = os.open(directory, os.O_RDONLY)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[RestoreTarget]:
    for number in range(3 * AHEAD):
        (tmp_path / f"f{number}").write_bytes(b"%d" % number)
    made = Target(tmp_path)
    yield made
    os.close(made._files_fd)


def query(*prefixes: str) -> RestoreQuery:
    return RestoreQuery("q", prefixes=list(prefixes), takes_shards=True)


def test_a_trainer_that_confirms_nothing_gets_a_few_files(target: RestoreTarget) -> None:
    """The others follow its confirmations, in order; one that counts too many gets no more for it."""
    shards, slow, late = VerifiedShards(), Trainer(), Trainer()
    shards.join(query(), slow)
    for number in range(3 * AHEAD):
        shards.add(f"f{number}", target)
    shards.join(query(), late)
    names = [f"f{number}" for number in range(3 * AHEAD)]
    assert slow.paths == late.paths == names[:AHEAD]
    slow.take(shards, 3)
    assert slow.paths == names[: AHEAD + 3]
    slow.take(shards, 2**31 - 1)
    assert slow.paths == names[: 2 * AHEAD + 3]
    assert [content for _, _, content in slow.files[:2]] == [b"0", b"1"]
    shards.leave(slow)
    slow.take(shards, 2**31 - 1)
    assert len(slow.files) == 2 * AHEAD + 3


def test_a_rank_gets_the_files_that_it_reads(target: RestoreTarget) -> None:
    """A query without the flag gets none."""
    shards, own, silent = VerifiedShards(), Trainer(), Trainer()
    shards.join(query("f1", "f2"), own)
    shards.join(RestoreQuery("q"), silent)
    for number in (3, 1, 0, 11, 2):
        shards.add(f"f{number}", target)
    assert (own.paths, silent.paths) == (["f1", "f11", "f2"], [])


def test_the_next_download_begins_again(target: RestoreTarget, tmp_path: Path) -> None:
    """It has another id, and confirmations of the last one count nothing."""
    shards, trainer = VerifiedShards(), Trainer()
    shards.join(query(), trainer)
    for number in range(AHEAD):
        shards.add(f"f{number}", target)
    stale = ShardsTaken("q", trainer.files[-1][0], AHEAD)
    assert shards.end() == stale.download
    trainer.files.clear()
    for number in range(AHEAD + 1):
        shards.add(f"f{number}", target)
    shards.take(stale, trainer)
    assert trainer.paths == [f"f{number}" for number in range(AHEAD)]
    assert trainer.files[0][0] != stale.download
    held = descriptors.on(tmp_path)
    shards.end()
    assert descriptors.on(tmp_path) == held - 1


@pytest.mark.fault("G26")
def test_a_trainer_gets_files_before_the_last_one_is_fetched(tmp_path: Path) -> None:
    """The last file turns out damaged: an older commit follows under another id, which the answer names."""
    released = threading.Event()

    def hold(key: str, _offset: int, _window: memoryview) -> None:
        if key == last.key and not released.is_set():
            assert released.wait(60)

    files = {"rank-00000/a": b"a" * 3000, "rank-00000/b": b"", "z": b"z" * 100}
    committed.file_store(tmp_path / "bucket")
    store = OddStore(tmp_path / "bucket", hold)
    store.check()
    committed.commit(store, {**files, "rank-00000/a": b"old"}, step=90, nonce="a90")
    newest = committed.commit(store, files, step=100, nonce="a100")
    last = newest.chunks[-1]
    committed.flip_bit(tmp_path / "bucket" / last.key, 5)
    rig = RestoreRig(tmp_path / "staging", store)
    trainer = Trainer()
    rig.resume.ask(query(), trainer, lambda _: None)
    until(lambda: len(trainer.files) == 2, what="two files")
    assert {(path, content) for _, path, content in trainer.files} == {
        ("rank-00000/a", b"a" * 3000),
        ("rank-00000/b", b""),
    }
    assert trainer.answers.empty()
    released.set()
    answer = trainer.answers.get(timeout=60)
    assert (answer.step, answer.error) == (90, "")
    assert answer.download != trainer.files[0][0]
    own = {
        path: content for download, path, content in trainer.files if download == answer.download
    }
    assert own == {**files, "rank-00000/a": b"old"}
    rig.stop.set()
