# SPDX-License-Identifier: Apache-2.0
"""Interrupted restores: the next one reuses the fetched chunks, after it verified them."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from swansong_bucket.errors import StagingError, Stopped
from swansong_bucket.format import manifest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.transfer import reader
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import RestoreResult, restore
from swansong_bucket.transfer.target import RestoreTarget

from testkit import descriptors
from testkit.as_user import GROUP, MEMBER, place_for_all
from testkit.committed import CHUNK_BYTES, chunk_of, commit, file_store, flip_bit, tree
from testkit.forked import peak_bytes
from testkit.odd_store import OddStore
from testkit.other_users import needs_root
from testkit.waiting import until

KEYS = RunKeys("r")
OLD = {"model.pt": b"old" * 700}
NEW = {
    "model.pt": os.urandom(4 * CHUNK_BYTES + 1),
    "deep/optim.pt": os.urandom(3 * CHUNK_BYTES),
    "empty": b"",
    "small": b"x",
}
TOTAL_BYTES = sum(map(len, NEW.values()))
REQUESTS = 9
"""The files have five chunks, three and one; the empty file has none."""


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    made = file_store(tmp_path / "store")
    commit(made, OLD, step=100)
    commit(made, NEW, step=200)
    return made


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "restored" / "here"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch one chunk at a time, so that exactly the chunks before the interruption are done."""
    monkeypatch.setattr(reader, "_SYNCS", 1)


def cut_off(tmp_path: Path, to: Path, after: int) -> Path:
    """Stop a restore after ``after`` chunks; returns its partial directory."""
    stop = threading.Event()
    store = OddStore(tmp_path / "store")

    def stop_late(_key: str, _offset: int, _window: memoryview) -> None:
        if len(store.given) > after:
            stop.set()

    store.instead = stop_late
    options = ReadOptions(connections=1, stop=stop)
    with pytest.raises(Stopped) as caught:
        restore(store, KEYS, RestoreTarget(to), options=options)
    assert "The fetched chunks stay" in caught.value.hint
    (partial,) = to.parent.glob(f".{to.name}.partial-*")
    return partial


def resumed(tmp_path: Path, to: Path) -> tuple[RestoreResult, OddStore]:
    store = OddStore(tmp_path / "store")
    got = restore(store, KEYS, RestoreTarget(to), options=ReadOptions(connections=3))
    assert os.listdir(to.parent) == [to.name]
    return got, store


def killed_at(tmp_path: Path, to: Path, request_number: int) -> None:
    """Run a restore in a fork, which is killed in this request."""
    pid = os.fork()
    if pid == 0:
        store = OddStore(tmp_path / "store")

        def kill(_key: str, _offset: int, _window: memoryview) -> None:
            if len(store.given) == request_number:
                os.kill(os.getpid(), signal.SIGKILL)

        store.instead = kill
        try:
            restore(store, KEYS, RestoreTarget(to), options=ReadOptions(connections=1))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


@pytest.mark.fault("G11", "H01")
@pytest.mark.parametrize("request_number", [1, 2, 5, 6, REQUESTS])
def test_after_sigkill_only_missing_chunks_are_fetched(
    store: FileStore, tmp_path: Path, to: Path, request_number: int
) -> None:
    """Killed in request n: the n-1 chunks before are not fetched again, and all bytes are right."""
    killed_at(tmp_path, to, request_number)
    assert not to.exists()
    got, again = resumed(tmp_path, to)
    assert tree(to) == NEW
    assert len(again.given) == REQUESTS - (request_number - 1)
    assert got.reused_bytes + again.given_bytes == TOTAL_BYTES == got.size_bytes


@pytest.mark.fault("G11")
def test_a_restore_may_be_interrupted_several_times(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """Each attempt adds chunks."""
    for after in range(1, 4):
        cut_off(tmp_path, to, after)  # each restore fetches ``after`` more
    got, again = resumed(tmp_path, to)
    assert tree(to) == NEW
    assert len(again.given) == REQUESTS - (1 + 2 + 3)
    assert got.ref == CommitRef(1, 200)


# ---------------------------------------------------------------- chunks are verified


@pytest.mark.fault("D06", "G11")
@pytest.mark.parametrize("chunk", range(5))
def test_a_chunk_that_changed_on_the_disk_is_fetched_again(
    store: FileStore, tmp_path: Path, to: Path, chunk: int
) -> None:
    """A power cut loses bytes of a chunk that the journal names: only this chunk is fetched."""
    partial = cut_off(tmp_path, to, 6)
    flip_bit(partial / "files" / "model.pt", 8 * chunk * CHUNK_BYTES)
    got, again = resumed(tmp_path, to)
    assert tree(to) == NEW
    assert len(again.given) == REQUESTS - 6 + 1
    assert again.given_bytes + got.reused_bytes == TOTAL_BYTES


@pytest.mark.fault("D06")
def test_a_file_that_a_power_cut_emptied_or_removed_is_fetched_again(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """The journal survived, the data did not; a file longer than its shard is truncated."""
    partial = cut_off(tmp_path, to, 7)
    os.truncate(partial / "files" / "model.pt", 0)
    (partial / "files" / "deep" / "optim.pt").unlink()
    (partial / "files" / "empty").write_bytes(b"not empty")
    got, _ = resumed(tmp_path, to)
    assert tree(to) == NEW
    assert got.reused_bytes == 0


@pytest.mark.fault("D06", "G11")
def test_a_chunk_of_several_files_is_reused_only_with_all_of_them(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """Small files share a chunk, and a file that changed on the disk costs the whole chunk."""
    files = {f"f{number}": os.urandom(70 + number) for number in range(9)}
    large = {"large": os.urandom(1 + (1 << 20))}
    packed = commit(store, files, step=300, is_packed=True)
    whole = commit(store, large, step=300, chunk_bytes=1 << 20)
    made = replace(packed, shards=packed.shards + whole.shards)
    store.put(KEYS.commit(made.ref, 0, 1), manifest.encode(made))
    partial = cut_off(tmp_path, to, 1)
    got, again = resumed(tmp_path, to)
    assert got.reused_bytes == sum(map(len, files.values()))
    assert len(again.given) == 2
    shutil.rmtree(to)
    partial = cut_off(tmp_path, to, 1)
    flip_bit(partial / "files" / "f5", 3)
    got, again = resumed(tmp_path, to)
    assert (got.reused_bytes, len(again.given)) == (0, 3)
    assert tree(to) == files | large


@pytest.mark.fault("G11")
def test_equal_files_share_a_chunk_and_are_both_whole_after_an_interruption(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """One request serves two places; a journal that names the chunk proves nothing about the second place."""
    files = {"a": os.urandom(900), "b": os.urandom(1000), "c": b"", "d": b"last"}
    files["c"] = files["a"]
    commit(store, files, step=300)
    partial = cut_off(tmp_path, to, 2)
    flip_bit(partial / "files" / "c", 3)
    _, again = resumed(tmp_path, to)
    assert tree(to) == files
    assert len(again.given) == 2


# ---------------------------------------------------------------- chunks of other restores


@pytest.mark.fault("G11", "D12")
def test_chunks_of_another_commit_are_removed(store: FileStore, tmp_path: Path, to: Path) -> None:
    """A newer commit appeared: no file of the older one is used."""
    cut_off(tmp_path, to, 6)
    newer = {**NEW, "model.pt": os.urandom(len(NEW["model.pt"]))}
    commit(store, newer, step=300)
    got, again = resumed(tmp_path, to)
    assert tree(to) == newer
    assert got.reused_bytes == 0
    assert again.given_bytes == TOTAL_BYTES


@pytest.mark.fault("G10", "G11")
def test_chunks_of_a_commit_that_was_damaged_since_do_not_mix_with_an_older_one(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """Most chunks of the newest commit are on the disk, but it is damaged: the older one is restored."""
    cut_off(tmp_path, to, 6)
    store.delete(chunk_of(NEW["deep/optim.pt"][-CHUNK_BYTES:]).key)
    got, _ = resumed(tmp_path, to)
    assert got.ref == CommitRef(1, 100)
    assert tree(to) == OLD


@pytest.mark.fault("G11", "H10")
def test_two_concurrent_restores_do_not_share_chunks(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """The second fetches all chunks itself; the first then finds the destination taken."""
    resume = threading.Event()
    slow = OddStore(tmp_path / "store")
    outcome: list[BaseException] = []

    def wait(_key: str, _offset: int, _window: memoryview) -> None:
        if len(slow.given) > 4:
            resume.wait(30)

    slow.instead = wait

    def run() -> None:
        try:
            restore(slow, KEYS, RestoreTarget(to), options=ReadOptions(connections=1))
        except StagingError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: len(slow.given) > 4, what="the slow restore to have chunks")
    (partial,) = to.parent.iterdir()
    before = tree(partial)
    other = OddStore(tmp_path / "store")
    got = restore(other, KEYS, RestoreTarget(to))
    assert (got.reused_bytes, other.given_bytes) == (0, TOTAL_BYTES)
    assert tree(partial) == before
    resume.set()
    thread.join(30)
    assert "writing to" in str(outcome[0])
    assert os.listdir(to.parent) == [to.name]
    assert tree(to) == NEW


@pytest.mark.fault("G12")
@pytest.mark.parametrize("short_bytes", [0, 1])
def test_space_is_needed_only_for_missing_chunks(
    store: FileStore, tmp_path: Path, to: Path, monkeypatch: pytest.MonkeyPatch, short_bytes: int
) -> None:
    """With room for exactly the missing chunks the restore resumes; with a byte less it fails first."""
    partial = cut_off(tmp_path, to, 6)
    here_bytes = sum(
        min(512 * path.stat().st_blocks, path.stat().st_size)
        for path in (partial / "files").rglob("*")
        if path.is_file()
    )
    assert 5 * CHUNK_BYTES < here_bytes < TOTAL_BYTES
    space = SimpleNamespace(f_bavail=TOTAL_BYTES - here_bytes - short_bytes, f_frsize=1)
    monkeypatch.setattr(os, "fstatvfs", lambda _fd: space)
    if not short_bytes:
        resumed(tmp_path, to)
        assert tree(to) == NEW
    else:
        with pytest.raises(StagingError, match=r"needs \d+ bytes"):
            restore(store, KEYS, RestoreTarget(to))


# ---------------------------------------------------------------- planted by other users


@pytest.mark.fault("S24", "G11")
@needs_root
def test_a_partial_restore_of_another_user_is_neither_used_nor_touched(
    store: FileStore, tmp_path: Path
) -> None:
    """Its owner would keep write access to the published files."""
    with place_for_all(0, mode=0o1777) as shared:
        to = shared / "here"
        partial = cut_off(tmp_path, to, 3)
        for path in (partial, *partial.rglob("*")):
            os.chown(path, MEMBER, GROUP)
        before = tree(partial)
        got = restore(store, KEYS, RestoreTarget(to))
        assert got.reused_bytes == 0
        assert {path.stat().st_uid for path in (to, *to.rglob("*"))} == {os.geteuid()}
        assert tree(partial) == before
        assert tree(to) == NEW


@pytest.mark.fault("S24", "S3")
@pytest.mark.parametrize(
    ("link", "reason"), [(os.symlink, "writing to"), (os.link, "not a file of an earlier")]
)
def test_a_link_in_a_partial_directory_is_not_followed(
    store: FileStore, tmp_path: Path, to: Path, link: Callable[[Path, Path], None], reason: str
) -> None:
    """The restore fails, and the file with the other name is unchanged."""
    partial = cut_off(tmp_path, to, 7)
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (partial / "files" / "small").unlink(missing_ok=True)
    link(precious, partial / "files" / "small")
    with pytest.raises(StagingError, match=reason):
        restore(store, KEYS, RestoreTarget(to))
    assert precious.read_bytes() == b"precious"
    assert os.listdir(to.parent) == []


@pytest.mark.fault("S24")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_partial_directory_that_others_may_enter_is_not_reused(
    store: FileStore, tmp_path: Path, to: Path, mode: int
) -> None:
    """Swansong creates it with mode 0700; any other mode means that another program changed it."""
    partial = cut_off(tmp_path, to, 7)
    partial.chmod(mode)
    got = restore(store, KEYS, RestoreTarget(to))
    assert (got.reused_bytes, tree(to)) == (0, NEW)
    assert partial.exists()


@pytest.mark.fault("S7")
def test_a_giant_journal_is_not_read(store: FileStore, tmp_path: Path, to: Path) -> None:
    """A sparse file of 2 GiB costs neither memory nor time: the restore starts from the beginning."""
    partial = cut_off(tmp_path, to, 7)
    os.truncate(partial / "journal", 2 * 2**30)

    def restored() -> None:
        got, _ = resumed(tmp_path, to)
        assert (got.reused_bytes, tree(to)) == (0, NEW)

    assert peak_bytes(restored) < 64 * 2**20


@pytest.mark.parametrize(
    ("umask", "modes"),
    [(0o000, (0o755, 0o644)), (0o027, (0o750, 0o640)), (0o077, (0o700, 0o600))],
)
def test_only_the_owner_can_write_restored_files(
    store: FileStore, to: Path, umask: int, modes: tuple[int, int]
) -> None:
    """The umask sets the permission to read."""
    before = os.umask(umask)
    try:
        restore(store, KEYS, RestoreTarget(to))
    finally:
        os.umask(before)
    paths = (to, to / "deep", to / "model.pt", to / "deep" / "optim.pt")
    found = [stat.S_IMODE(path.stat().st_mode) for path in paths]
    assert found == [modes[0], modes[0], modes[1], modes[1]]


def test_an_unusable_destination_leaks_no_descriptor(to: Path) -> None:
    (to / "in the way").mkdir(parents=True)
    parent_fd = os.open(to.parent, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(10):
        with pytest.raises(StagingError, match="not an empty directory"):
            RestoreTarget(to, parent_fd=parent_fd).__enter__()
    assert descriptors.on(to, to.parent) == 1
    os.close(parent_fd)


# ---------------------------------------------------------------- every backend
