# SPDX-License-Identifier: Apache-2.0
"""The file store beyond the contract: no partial objects, and nothing outside its root."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from swansong_bucket.errors import Exists, NotFound, Permanent, StoreError, Transient
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.file import store as module
from swansong_bucket.stores.file.store import FileStore

from testkit.bodies import torn
from testkit.waiting import in_threads


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def files(root: Path) -> FileStore:
    root.mkdir()
    return FileStore(root.as_uri())


def temporary_files(root: Path) -> list[str]:
    hidden = root / ".swansong-tmp"
    return os.listdir(hidden) if hidden.exists() else []


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/x",
        "../x",
        "a/../b",
        "a/./b",
        "a//b",
        "a/",
        "..",
        ".swansong-tmp/x",
        "a/.x",
        "a\0b",
    ],
)
def test_no_key_leaves_the_directory(files: FileStore, root: Path, key: str) -> None:
    """Every call refuses a key that would name a file elsewhere, or an internal one."""
    for call in (
        lambda: files.put(key, b"x"),
        lambda: files.put(key, b"x", if_absent=True),
        lambda: files.get(key),
        lambda: files.head(key),
        lambda: files.delete(key),
        lambda: files.create(key, Body(b"x")),
    ):
        with pytest.raises(Permanent):
            call()
    assert os.listdir(root.parent) == ["store"]
    assert temporary_files(root) == []


def test_links_and_hidden_files_are_not_objects(
    files: FileStore, root: Path, tmp_path: Path
) -> None:
    """A symbolic link in the directory is neither listed nor followed, and files of NFS are not listed."""
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "directory").symlink_to(tmp_path)
    (root / ".nfs0000000000000001").write_bytes(b"a deleted object that a process has open")
    assert list(files.list("")) == []
    assert files.head("link") is None
    with pytest.raises(StoreError):
        files.get("link")


def test_nothing_temporary_stays(files: FileStore, root: Path) -> None:
    """After puts, and creates that succeed, fail or are refused, the hidden directory is empty."""
    files.put("key", b"1")
    files.put("other", b"1", if_absent=True)
    with pytest.raises(Exists):
        files.put("key", b"2", if_absent=True)
    for _ in range(2):
        files.create("chunk", Body(b"1"))
    with pytest.raises(Exists):
        files.create("chunk", Body(b"2"))
    with pytest.raises(OSError, match=r"^torn$"):
        files.create("other-chunk", Body(b"2", torn(OSError("torn"))))
    assert temporary_files(root) == []
    assert {(root / name).stat().st_nlink for name in ("key", "other", "chunk")} == {1}


def test_deleting_leaves_no_empty_directories(files: FileStore, root: Path) -> None:
    """A directory exists only for keys below it; the root remains."""
    files.put("a/b/c/one", b"1")
    files.put("a/two", b"2")
    files.delete("a/b/c/one")
    assert sorted(path.name for path in (root / "a").iterdir()) == ["two"]
    files.delete("a/two")
    assert not (root / "a").exists()
    files.check()


def test_a_key_below_an_object(files: FileStore) -> None:
    """A file system cannot have both: Permanent, and never Exists."""
    files.put("a", b"1")
    for key in ("a/b", "a/b/c"):
        for if_absent in (False, True):
            with pytest.raises(Permanent) as caught:
                files.put(key, b"2", if_absent=if_absent)
            assert not isinstance(caught.value, (Exists, NotFound))
    assert files.get("a") == b"1"


def test_a_directory_that_is_removed_during_a_put(files: FileStore) -> None:
    """Writers and deleters of neighbours: no call fails, no object is lost."""

    def work(number: int) -> None:
        for _ in range(40):
            files.put(f"shared/deep/{number}", b"x", if_absent=True)
            assert files.get(f"shared/deep/{number}") == b"x"
            files.delete(f"shared/deep/{number}")

    in_threads(4, work)
    assert list(files.list("")) == []


WRITER = """
import sys
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.file.store import FileStore

def stuck(size_bytes):
    print("sending", flush=True)
    sys.stdin.read()

FileStore(sys.argv[1]).create("data/chunk", Body(b"ghi", stuck))
"""


@pytest.mark.fault("O01", "O19")
def test_files_of_a_killed_writer_are_removed(files: FileStore, root: Path) -> None:
    """No object is visible.  The first write of a later process removes the hidden file, but no young one."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, files.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "sending\n"
        writer.send_signal(signal.SIGKILL)
    (left,) = temporary_files(root)
    assert list(files.list("")) == []
    files.create("data/chunk", Body(b"ghi"))
    assert temporary_files(root) == [left], "another VM may still write to it"
    old_s = root.stat().st_mtime - 2 * 86_400
    os.utime(root / ".swansong-tmp" / left, (old_s, old_s))
    FileStore(files.url).create("data/other", Body(b"ghi"))
    assert temporary_files(root) == []
    assert files.get("data/chunk") == b"ghi"


@pytest.mark.fault("O11")
def test_a_create_whose_fsync_failed(files: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name exists, and may not be durable: the next attempt calls fsync on all directories again."""
    synced: list[int] = []
    fsync = os.fsync

    def failing(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        if len(synced) == 2:  # the first one is of the file
            raise OSError(errno.EIO, "EIO")
        fsync(fd)

    files.check()
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(Transient):
        files.create("data/chunk", Body(b"ghi"))
    synced[:] = [0, 0]
    files.create("data/chunk", Body(b"ghi"))
    assert {os.stat(path).st_ino for path in (files.url[7:], f"{files.url[7:]}/data")} <= {*synced}


@pytest.mark.fault("O07")
def test_a_full_file_system(tmp_path: Path) -> None:
    """ENOSPC is Permanent; earlier objects are intact, and no partial one is visible."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    small = tmp_path / "small"
    small.mkdir()
    script = """
import sys, subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0755", "tmpfs", sys.argv[1]], check=True)
from swansong_bucket.errors import Permanent
from swansong_bucket.stores.file import store as module
from swansong_bucket.stores.file.store import FileStore
store = FileStore("file://" + sys.argv[1])
store.put("key", b"old")
try:
    store.put("key", bytes(2**20))
except Permanent as error:
    assert "full" in error.hint, error.hint
else:
    raise AssertionError("it fitted")
assert store.get("key") == b"old"
assert [info.key for info in store.list("")] == ["key"]
store.put("key", bytes(1000))
"""
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", script, str(small)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine allows no mounts")
    assert done.returncode == 0, done.stderr


def test_a_listing_has_bounded_pages(
    files: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key is on one page, in the order of keys, also beside directories with similar names."""
    keys = sorted(["a", "a-b", "b/x", "b/y/z", "b-c", "b.d/x", "c/1", "c/2", "c/3", "d"])
    for key in keys:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"1")
    monkeypatch.setattr(module, "PAGE_KEYS", 3)
    found: list[list[str]] = []
    token: str | None = None
    while not found or token is not None:
        page = files.page("", token)
        found.append([info.key for info in page.infos])
        token = page.token
    assert found == [keys[at : at + 3] for at in range(0, 10, 3)]
    assert [info.key for info in files.list("", after="b/x")] == keys[keys.index("b/x") + 1 :]
    assert [info.key for info in files.list("c/")] == ["c/1", "c/2", "c/3"]
