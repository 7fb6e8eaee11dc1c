# SPDX-License-Identifier: Apache-2.0
"""What the file store promises beyond the contract: nothing half-written, nothing outside its root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from swansongd.errors import Exists, NotFound, Permanent, StoreError
from swansongd.stores.base import PartReceipt, Upload
from swansongd.stores.files import FileStore


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
    "key", ["", "/etc/x", "../x", "a/../b", "a/./b", "a//b", "a/", "..", ".swansong-tmp/x", "a\0b"]
)
def test_no_key_leaves_the_directory(files: FileStore, root: Path, key: str) -> None:
    """What could name a file elsewhere, or one of ours, is refused by every call."""
    for call in (
        lambda: files.put(key, b"x"),
        lambda: files.put(key, b"x", if_absent=True),
        lambda: files.get(key),
        lambda: files.head(key),
        lambda: files.delete(key),
        lambda: files.begin(key, 1, 1),
    ):
        with pytest.raises(Permanent):
            call()
    assert os.listdir(root.parent) == ["store"]
    assert temporary_files(root) == []


@pytest.mark.parametrize("upload_id", ["../victim", "/etc/passwd", "", ".", "x" * 32])
def test_no_upload_id_leaves_the_directory(files: FileStore, root: Path, upload_id: str) -> None:
    """An id that we did not give is unknown, whatever it would point to."""
    victim = root / "victim"
    victim.write_bytes(b"precious")
    upload = Upload("key", upload_id, 4, 4)
    with pytest.raises(NotFound):
        files.put_part(upload, 1, memoryview(b"evil"))
    with pytest.raises(NotFound):
        files.complete(upload, [PartReceipt(1, "")])
    with pytest.raises(NotFound):
        files.abort(upload)
    assert victim.read_bytes() == b"precious"


def test_links_are_no_objects(files: FileStore, root: Path, tmp_path: Path) -> None:
    """A symbolic link in the directory is neither listed nor followed."""
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "directory").symlink_to(tmp_path)
    assert list(files.list("")) == []
    assert files.head("link") is None
    with pytest.raises(StoreError):
        files.get("link")


def test_nothing_temporary_stays(files: FileStore, root: Path) -> None:
    """After a put, a refused create, a completion and an abort the hidden directory is empty."""
    files.put("key", b"1")
    files.put("other", b"1", if_absent=True)
    with pytest.raises(Exists):
        files.put("key", b"2", if_absent=True)
    upload = files.begin("shard", 3, 3)
    files.complete(upload, [files.put_part(upload, 1, memoryview(b"abc"))])
    files.abort(files.begin("never", 3, 3))
    assert temporary_files(root) == []
    assert (root / "key").stat().st_nlink == (root / "other").stat().st_nlink == 1


def test_deleting_leaves_no_empty_directories(files: FileStore, root: Path) -> None:
    """Directories exist for the keys in them only; the root stays."""
    files.put("a/b/c/one", b"1")
    files.put("a/two", b"2")
    files.delete("a/b/c/one")
    assert sorted(path.name for path in (root / "a").iterdir()) == ["two"]
    files.delete("a/two")
    assert not (root / "a").exists()
    files.check()


def test_a_key_below_an_object(files: FileStore) -> None:
    """A file system cannot have both: Permanent, and never "somebody else has that name"."""
    files.put("a", b"1")
    for key in ("a/b", "a/b/c"):
        for if_absent in (False, True):
            with pytest.raises(Permanent) as caught:
                files.put(key, b"2", if_absent=if_absent)
            assert not isinstance(caught.value, (Exists, NotFound))
    assert files.get("a") == b"1"


def test_a_directory_that_vanishes_under_a_put(files: FileStore) -> None:
    """Writers and deleters of neighbours, at once: no call fails, no object is lost."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(40):
                files.put(f"shared/deep/{number}", b"x", if_absent=True)
                assert files.get(f"shared/deep/{number}") == b"x"
                files.delete(f"shared/deep/{number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == []
    assert list(files.list("")) == []


WRITER = """
import sys
from swansongd.stores.files import FileStore
store = FileStore(sys.argv[1])
upload = store.begin("shard", 6, 3)
receipt = store.put_part(upload, 1, memoryview(b"abc"))
print(upload.upload_id, receipt.etag, flush=True)
sys.stdin.read()
"""


@pytest.mark.fault("O01")
def test_an_upload_outlives_its_writer(files: FileStore) -> None:
    """The writer is killed: nothing is visible, and whoever has its journal can finish."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, files.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        upload_id, etag = writer.stdout.readline().split()
        writer.send_signal(signal.SIGKILL)
    assert list(files.list("")) == []
    assert files.head("shard") is None
    upload = Upload("shard", upload_id, 6, 3)
    second = files.put_part(upload, 2, memoryview(b"def"))
    files.complete(upload, [PartReceipt(1, etag), second])
    assert files.get("shard") == b"abcdef"


def test_a_part_that_never_came(files: FileStore) -> None:
    """Receipts that are not the store's do not make an object of a file that is too short."""
    upload = files.begin("shard", 6, 3)
    first = files.put_part(upload, 1, memoryview(b"abc"))
    with pytest.raises(Permanent, match="3 bytes came of 6"):
        files.complete(upload, [first, PartReceipt(2, "invented")])
    assert files.head("shard") is None


@pytest.mark.fault("O07")
def test_check_says_what_is_wrong(tmp_path: Path) -> None:
    """A file in the place of the directory, or above it, is Permanent with the way out."""
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(Permanent) as caught:
            FileStore(path.as_uri()).check()
        assert "store.url" in caught.value.hint
        assert not isinstance(caught.value, (Exists, NotFound))


@pytest.mark.fault("O07")
def test_a_full_file_system(tmp_path: Path) -> None:
    """ENOSPC is Permanent and says so; what was there before is whole, nothing half is visible."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    small = tmp_path / "small"
    small.mkdir()
    script = """
import sys, subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", sys.argv[1]], check=True)
from swansongd.errors import Permanent
from swansongd.stores.files import FileStore
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
