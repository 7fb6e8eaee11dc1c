# SPDX-License-Identifier: Apache-2.0
"""A restore that was cut off: the next one goes on from there, and believes nothing that it finds."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swansongd.bucket.keys import RunKeys
from swansongd.errors import NothingToRestore, StagingError, Stopped, Transient
from swansongd.model import CommitRef
from swansongd.restore import journal, reader
from swansongd.restore.restore import Restored, restore, verify
from swansongd.restore.target import RestoreTarget
from swansongd.stores.base import ObjectStore
from swansongd.stores.file.store import FileStore

from testkit.as_user import GROUP, MEMBER, place_for_all
from testkit.committed import PART_SIZE_BYTES, commit, file_store, flip_bit, part_digest, tree
from testkit.odd_store import OddStore
from testkit.store_backends import retrying
from testkit.waiting import until

KEYS = RunKeys("r")
OLD = {"model.pt": b"old" * 700}
NEW = {
    "model.pt": os.urandom(4 * PART_SIZE_BYTES + 1),
    "deep/optim.pt": os.urandom(3 * PART_SIZE_BYTES),
    "empty": b"",
    "small": b"x",
}
TOTAL_BYTES = sum(map(len, NEW.values()))
REQUESTS = 9
"""Five parts, three and one; the empty file needs none."""


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
    """One part at a time, so that the parts before a cut are those that are done."""
    monkeypatch.setattr(reader, "_SYNCS", 1)


def cut_off(tmp_path: Path, to: Path, after: int, step: int | None = None) -> Path:
    """Let a restore fetch ``after`` parts and be stopped in the next; returns what it left."""
    stop = threading.Event()
    store = OddStore(tmp_path / "store")

    def stop_late(_key: str, _offset: int, _window: memoryview) -> None:
        if len(store.given) > after:
            stop.set()

    store.instead = stop_late
    with pytest.raises(Stopped) as caught:
        restore(store, KEYS, to, step=step, connections=1, stop=stop)
    assert "is kept" in caught.value.hint
    (partial,) = to.parent.glob(f".{to.name}.partial-*")
    return partial


def resumed(tmp_path: Path, to: Path) -> tuple[Restored, OddStore]:
    store = OddStore(tmp_path / "store")
    got = restore(store, KEYS, to, connections=3)
    assert os.listdir(to.parent) == [to.name]
    return got, store


CHILD = """
import os, signal, sys
from pathlib import Path
from testkit.odd_store import OddStore
from swansongd.bucket.keys import RunKeys
from swansongd.restore import reader
from swansongd.restore.restore import restore

reader._SYNCS = 1
store = OddStore(Path(sys.argv[1]))
def kill(key, offset, window):
    if len(store.given) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
store.instead = kill
restore(store, RunKeys("r"), Path(sys.argv[2]), connections=1)
"""


@pytest.mark.fault("G11", "H01")
@pytest.mark.parametrize("request_number", [1, 2, 5, 6, REQUESTS])
def test_after_sigkill_only_what_was_not_there_is_fetched(
    store: FileStore, tmp_path: Path, to: Path, request_number: int
) -> None:
    """Killed in its n-th request: the n-1 parts before are not fetched again, and all bytes are right."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "store"), str(to), str(request_number)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not to.exists()
    got, again = resumed(tmp_path, to)
    assert tree(to) == NEW
    assert len(again.given) == REQUESTS - (request_number - 1)
    assert got.reused_bytes + again.given_bytes == TOTAL_BYTES == got.size_bytes


@pytest.mark.fault("G11")
def test_it_may_be_cut_off_again_and_again(store: FileStore, tmp_path: Path, to: Path) -> None:
    """Each time it gets further."""
    for after in range(1, 4):
        cut_off(tmp_path, to, after)  # by so many more each time
    got, again = resumed(tmp_path, to)
    assert tree(to) == NEW
    assert len(again.given) == REQUESTS - (1 + 2 + 3)
    assert got.ref == CommitRef(1, 200)


@pytest.mark.fault("O01", "G11")
def test_a_store_that_fails_in_the_middle_costs_no_bytes(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """What was fetched before the network went away is kept, and the error says so."""
    bad = OddStore(tmp_path / "store")

    def fail(_key: str, _offset: int, _window: memoryview) -> None:
        if len(bad.given) == 4:
            raise Transient("connection reset")

    bad.instead = fail
    with pytest.raises(Transient, match="connection reset") as caught:
        restore(bad, KEYS, to, connections=1)
    assert "is kept" in caught.value.hint
    got, again = resumed(tmp_path, to)
    assert tree(to) == NEW
    assert len(again.given) == REQUESTS - 3
    assert got.skipped == ()


# ---------------------------------------------------------------- what lies there is not believed


@pytest.mark.fault("D06", "G11")
@pytest.mark.parametrize("part", range(5))
def test_a_part_that_changed_on_the_disk_is_fetched_again(
    store: FileStore, tmp_path: Path, to: Path, part: int
) -> None:
    """A power cut takes bytes that were noted: that part comes from the store, the others do not."""
    partial = cut_off(tmp_path, to, 6)
    flip_bit(partial / "files" / "model.pt", 8 * part * PART_SIZE_BYTES)
    got, again = resumed(tmp_path, to)
    assert tree(to) == NEW
    assert len(again.given) == REQUESTS - 6 + 1
    assert again.given_bytes + got.reused_bytes == TOTAL_BYTES


@pytest.mark.fault("D06")
def test_a_file_that_a_power_cut_emptied_or_took_is_fetched_again(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """The journal is longer-lived than the data; a file longer than its shard is cut."""
    partial = cut_off(tmp_path, to, 7)
    os.truncate(partial / "files" / "model.pt", 0)
    (partial / "files" / "deep" / "optim.pt").unlink()
    (partial / "files" / "empty").write_bytes(b"not empty")
    got, _ = resumed(tmp_path, to)
    assert tree(to) == NEW
    assert got.reused_bytes == 0


@pytest.mark.fault("S24")
def test_a_link_among_the_files_left_is_not_followed(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """Nothing is written through it, whoever put it there."""
    partial = cut_off(tmp_path, to, 7)
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (partial / "files" / "small").unlink()
    (partial / "files" / "small").symlink_to(precious)
    with pytest.raises(StagingError, match="cannot restore to"):
        restore(store, KEYS, to)
    assert precious.read_bytes() == b"precious"
    assert os.listdir(to.parent) == []


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(where=st.floats(0, 1), byte=st.integers(0, 255), cut=st.booleans())
def test_a_journal_that_lies_costs_bytes_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, where: float, byte: int, cut: bool
) -> None:
    """Any byte of it made another, or the rest of it gone: the result is right."""
    base = tmp_path_factory.mktemp("lies")
    commit(file_store(base / "store"), NEW, step=200)
    to = base / "restored" / "here"
    journal = cut_off(base, to, 8) / "journal"
    data = bytearray(journal.read_bytes())
    at = int(where * (len(data) - 1))
    if cut:
        del data[at:]
    else:
        data[at] = byte
    journal.write_bytes(data)
    resumed(base, to)
    assert tree(to) == NEW


def test_a_journal_and_a_file_that_agree_on_wrong_bytes_do_not_pass(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """The digest of the whole shard decides: it is read anew from the store."""
    partial = cut_off(tmp_path, to, 7)
    wrong = b"w" * PART_SIZE_BYTES
    with (partial / "files" / "model.pt").open("r+b") as file:
        file.write(wrong)
    number = list(NEW).index("model.pt")
    with (partial / "journal").open("ab") as file:
        file.write(journal.line(number, 0, part_digest(wrong)))
    resumed(tmp_path, to)
    assert tree(to) == NEW


# ---------------------------------------------------------------- whose it is


@pytest.mark.fault("G11", "D12")
def test_what_is_left_of_another_commit_is_dropped(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """A newer commit has appeared: nothing of the older one gets in, even where names are the same."""
    cut_off(tmp_path, to, 6)
    newer = {**NEW, "model.pt": os.urandom(len(NEW["model.pt"]))}
    commit(store, newer, step=300)
    got, again = resumed(tmp_path, to)
    assert tree(to) == newer
    assert got.reused_bytes == 0
    assert again.given_bytes == TOTAL_BYTES


@pytest.mark.fault("G10", "G11")
def test_what_is_left_of_a_commit_that_was_damaged_since_does_not_mix_with_an_older_one(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """Most of the newest is there, but it can never be whole: the older one comes back, pure."""
    cut_off(tmp_path, to, 6)
    next((tmp_path / "store").rglob("*/small")).unlink()
    got, _ = resumed(tmp_path, to)
    assert got.ref == CommitRef(1, 100)
    assert tree(to) == OLD


def test_when_nothing_is_whole_nothing_is_left(store: FileStore, tmp_path: Path, to: Path) -> None:
    """What can never be finished does not fill the disk."""
    for path in (tmp_path / "store").rglob("*/model.pt"):
        flip_bit(path, 7)
    with pytest.raises(NothingToRestore):
        restore(store, KEYS, to)
    assert os.listdir(to.parent) == []


@pytest.mark.fault("G11", "H10")
def test_two_restores_at_once_do_not_share(store: FileStore, tmp_path: Path, to: Path) -> None:
    """While one lives, with parts fetched, another fetches all for itself; the first finds it done."""
    go_on = threading.Event()
    slow = OddStore(tmp_path / "store")
    outcome: list[BaseException] = []

    def wait(_key: str, _offset: int, _window: memoryview) -> None:
        if len(slow.given) > 4:
            go_on.wait(30)

    slow.instead = wait

    def run() -> None:
        try:
            restore(slow, KEYS, to, connections=1)
        except StagingError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: len(slow.given) > 4, what="the slow restore to have parts")
    (partial,) = to.parent.iterdir()
    before = tree(partial)
    other = OddStore(tmp_path / "store")
    got = restore(other, KEYS, to)
    assert (got.reused_bytes, other.given_bytes) == (0, TOTAL_BYTES)
    assert tree(partial) == before
    go_on.set()
    thread.join(30)
    assert "cannot restore to" in str(outcome[0])
    assert os.listdir(to.parent) == [to.name]
    assert tree(to) == NEW


@pytest.mark.fault("G12")
@pytest.mark.parametrize("short_bytes", [0, 1])
def test_space_is_needed_only_for_what_is_not_there(
    store: FileStore, tmp_path: Path, to: Path, monkeypatch: pytest.MonkeyPatch, short_bytes: int
) -> None:
    """On a file system with room for just the rest it goes on; with a byte less it says so at once."""
    partial = cut_off(tmp_path, to, 6)
    here_bytes = sum(
        min(512 * path.stat().st_blocks, path.stat().st_size)
        for path in (partial / "files").rglob("*")
        if path.is_file()
    )
    assert 5 * PART_SIZE_BYTES < here_bytes < TOTAL_BYTES
    space = SimpleNamespace(f_bavail=TOTAL_BYTES - here_bytes - short_bytes, f_frsize=1)
    monkeypatch.setattr(os, "fstatvfs", lambda _fd: space)
    if not short_bytes:
        resumed(tmp_path, to)
        assert tree(to) == NEW
    else:
        with pytest.raises(StagingError, match=r"needs \d+ bytes"):
            restore(store, KEYS, to)


# ---------------------------------------------------------------- planted by others


@pytest.mark.fault("S24", "G11")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes on another user: needs root")
def test_a_partial_restore_of_another_user_is_neither_used_nor_touched(store: FileStore) -> None:
    """Its owner would keep write access to what is published."""
    with place_for_all(0, mode=0o1777) as shared:
        to = shared / "here"
        partial = cut_off_in(store, to)
        for path in (partial, *partial.rglob("*")):
            os.chown(path, MEMBER, GROUP)
        before = tree(partial)
        got = restore(store, KEYS, to)
        assert got.reused_bytes == 0
        assert {path.stat().st_uid for path in (to, *to.rglob("*"))} == {os.geteuid()}
        assert tree(partial) == before
        assert tree(to) == NEW


@pytest.mark.fault("S24", "S3")
def test_a_hard_link_among_the_files_left_is_not_written(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """The other name of the file keeps its bytes."""
    partial = cut_off(tmp_path, to, 7)
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (partial / "files" / "small").unlink()
    os.link(precious, partial / "files" / "small")
    with pytest.raises(StagingError, match="not a file of an earlier restore"):
        restore(store, KEYS, to)
    assert precious.read_bytes() == b"precious"


@pytest.mark.fault("S24")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_partial_restore_that_others_may_enter_is_not_continued(
    store: FileStore, tmp_path: Path, to: Path, mode: int
) -> None:
    """The daemon makes its own with mode 0700: another mode means another maker."""
    partial = cut_off(tmp_path, to, 7)
    partial.chmod(mode)
    got = restore(store, KEYS, to)
    assert (got.reused_bytes, tree(to)) == (0, NEW)
    assert partial.exists()


@pytest.mark.fault("S7")
def test_a_giant_journal_is_not_read(store: FileStore, tmp_path: Path, to: Path) -> None:
    """2 GiB of holes cost neither memory nor time: the restore begins again."""
    partial = cut_off(tmp_path, to, 7)
    os.truncate(partial / "journal", 2 * 2**30)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got, _ = resumed(tmp_path, to)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert (got.reused_bytes, tree(to)) == (0, NEW)
    assert grown_kib < 64 * 1024


@pytest.mark.parametrize(
    ("umask", "modes"),
    [(0o000, (0o755, 0o644)), (0o027, (0o750, 0o640)), (0o077, (0o700, 0o600))],
)
def test_only_the_owner_can_write_what_was_restored(
    store: FileStore, to: Path, umask: int, modes: tuple[int, int]
) -> None:
    """The umask decides who may read."""
    before = os.umask(umask)
    try:
        restore(store, KEYS, to)
    finally:
        os.umask(before)
    paths = (to, to / "deep", to / "model.pt", to / "deep" / "optim.pt")
    found = [stat.S_IMODE(path.stat().st_mode) for path in paths]
    assert found == [modes[0], modes[0], modes[1], modes[1]]


def test_a_destination_that_cannot_be_used_costs_no_descriptor(to: Path) -> None:
    (to / "in the way").mkdir(parents=True)
    parent_fd = os.open(to.parent, os.O_RDONLY | os.O_DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(StagingError, match="no empty directory"):
            RestoreTarget(to, parent_fd=parent_fd).__enter__()
    assert len(os.listdir("/proc/self/fd")) <= before
    os.close(parent_fd)


def cut_off_in(store: FileStore, to: Path) -> Path:
    """As :func:`cut_off`, for a store that is at hand."""
    stop = threading.Event()

    def enough(done_bytes: int, _total_bytes: int) -> None:
        if done_bytes >= 3 * PART_SIZE_BYTES:
            stop.set()

    with pytest.raises(Stopped):
        restore(store, KEYS, to, connections=1, progress=enough, stop=stop)
    (partial,) = to.parent.glob(f".{to.name}.partial-*")
    return partial


# ---------------------------------------------------------------- every backend


@pytest.mark.fault("G11")
def test_every_backend_restores_and_goes_on(bare_store: ObjectStore, to: Path) -> None:
    """Stopped after some of its parts, then run again: the same bytes, those from before reused."""
    store = retrying(bare_store, budget_s=30)
    commit(store, NEW)
    stop = threading.Event()

    def enough(done_bytes: int, _total_bytes: int) -> None:
        if done_bytes >= 3 * PART_SIZE_BYTES:
            stop.set()

    with pytest.raises(Stopped):
        restore(store, KEYS, to, connections=1, progress=enough, stop=stop)
    got = restore(store, KEYS, to)
    assert tree(to) == NEW
    assert got.reused_bytes >= 2 * PART_SIZE_BYTES
    assert verify(store, KEYS) == []
