# SPDX-License-Identifier: Apache-2.0
"""The file store beyond the contract: no partial objects, and nothing outside its root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from swansongd.errors import Exists, NotFound, Permanent, StoreError
from swansongd.stores.base import WINDOW_BYTES, OpenUpload, PartReceipt, Upload
from swansongd.stores.checksums import crc32c
from swansongd.stores.file import store as module
from swansongd.stores.file.store import FileStore

from testkit.bodies import CountedBody, CountedSink


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
    """Every call refuses a key that would name a file elsewhere, or an internal one."""
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
    """An id that the store did not issue is unknown."""
    victim = root / "victim"
    victim.write_bytes(b"precious")
    upload = Upload("key", upload_id, 4, 4)
    with pytest.raises(NotFound):
        files.put_part(upload, 1, CountedBody(b"evil"))
    with pytest.raises(NotFound):
        files.parts(upload)
    with pytest.raises(NotFound):
        files.complete(upload, [PartReceipt(1, "", 0)])
    files.abort("key", upload_id)
    assert victim.read_bytes() == b"precious"


def test_links_are_not_objects(files: FileStore, root: Path, tmp_path: Path) -> None:
    """A symbolic link in the directory is neither listed nor followed."""
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "directory").symlink_to(tmp_path)
    assert list(files.list("")) == []
    assert files.head("link") is None
    with pytest.raises(StoreError):
        files.get("link")


def test_nothing_temporary_stays(files: FileStore, root: Path) -> None:
    """After puts, a refused create, a completion and an abort the hidden directory is empty."""
    files.put("key", b"1")
    files.put("other", b"1", if_absent=True)
    with pytest.raises(Exists):
        files.put("key", b"2", if_absent=True)
    files.put_shard("small", CountedBody(b"1"))
    upload = files.begin("shard", 3, 3)
    files.complete(upload, [files.put_part(upload, 1, CountedBody(b"abc"))])
    never = files.begin("never", 3, 3)
    files.put_part(never, 1, CountedBody(b"abc"))
    files.abort(never.key, never.upload_id)
    assert temporary_files(root) == []
    assert (root / "key").stat().st_nlink == (root / "other").stat().st_nlink == 1


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
from testkit.bodies import CountedBody
from swansongd.stores.file import store as module
from swansongd.stores.file.store import FileStore
store = FileStore(sys.argv[1])
upload = store.begin("data/shard", 9, 3)
for number, part in ((1, b"abc"), (2, b"def")):
    receipt = store.put_part(upload, number, CountedBody(part))
    print(upload.upload_id, receipt.etag, receipt.crc32c, flush=True)

class Stuck(CountedBody):
    def read_into(self, window):
        print("reading", flush=True)
        sys.stdin.read()

what, content = sys.argv[2], b"ghi"
if what == "part":
    store.put_part(upload, 3, Stuck(content))
elif what == "again":
    store.put_part(upload, 2, Stuck(content))
else:
    store.put_shard("data/small", Stuck(content))
"""


def killed_writer(url: str, what: str) -> tuple[Upload, list[PartReceipt]]:
    """The upload of a process that was killed during a write, and its receipts."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, url, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline().split() for _ in range(3)]
        assert lines[2] == ["reading"]
        writer.send_signal(signal.SIGKILL)
    receipts = [PartReceipt(n, lines[n - 1][1], int(lines[n - 1][2])) for n in (1, 2)]
    return Upload("data/shard", lines[0][0], 9, 3), receipts


@pytest.mark.fault("O01")
def test_an_upload_outlives_its_writer(files: FileStore) -> None:
    """The writer is killed: no object is visible, the parts are listed, and the upload can be completed."""
    upload, receipts = killed_writer(files.url, "part")
    assert list(files.list("")) == []
    assert files.head("data/shard") is None
    assert [(u.key, u.upload_id) for u in files.uploads("data/")] == [
        (upload.key, upload.upload_id)
    ]
    assert files.parts(upload) == receipts
    assert [part.crc32c for part in files.parts(upload)] == [crc32c(b"abc"), crc32c(b"def")]
    third = files.put_part(upload, 3, CountedBody(b"ghi"))
    files.complete(upload, [*receipts, third])
    assert files.get("data/shard") == b"abcdefghi"
    assert list(files.uploads("")) == []


def test_a_part_that_was_being_sent_again(files: FileStore) -> None:
    """A part that the killed writer had begun to replace counts as missing."""
    upload, receipts = killed_writer(files.url, "again")
    assert files.parts(upload) == receipts[:1]
    third = files.put_part(upload, 3, CountedBody(b"ghi"))
    with pytest.raises(Permanent, match="part 2"):
        files.complete(upload, [*receipts, third])
    assert files.head("data/shard") is None


@pytest.mark.fault("O19")
def test_files_of_a_killed_writer_are_listed_and_removed(files: FileStore, root: Path) -> None:
    """Uploads and an unfinished put are listed with their age, and can be aborted."""
    upload, _ = killed_writer(files.url, "shard")
    found = list(files.uploads("data/"))
    assert {upload.upload_id} < {left.upload_id for left in found}
    assert len(found) == 2
    assert all(0 <= left.age_s < 60 for left in found)
    old_s = root.stat().st_mtime - 7200
    os.utime(root / ".swansong-tmp" / upload.upload_id / "key", (old_s, old_s))
    (aged,) = [left for left in files.uploads("data/sh") if left.upload_id == upload.upload_id]
    assert 7000 < aged.age_s < 7400
    for left in files.uploads("data/"):
        files.abort(left.key, left.upload_id)
        files.abort(left.key, left.upload_id)
    assert list(files.uploads("")) == []
    assert temporary_files(root) == []
    with pytest.raises(NotFound):
        files.parts(upload)
    with pytest.raises(NotFound):
        files.put_part(upload, 3, CountedBody(b"ghi"))


def test_uploads_of_other_prefixes(files: FileStore) -> None:
    """An upload is listed only for prefixes of its key."""
    files.begin("one/shard", 1, 1)
    two = files.begin("two/shard", 1, 1)
    assert [(u.key, u.upload_id) for u in files.uploads("two/")] == [(two.key, two.upload_id)]
    assert isinstance(next(files.uploads("")), OpenUpload)


def test_an_upload_belongs_to_its_key(files: FileStore) -> None:
    """The id of another key's upload is unknown."""
    upload = files.begin("shard", 3, 3)
    other = Upload("other", upload.upload_id, 3, 3)
    with pytest.raises(NotFound):
        files.put_part(other, 1, CountedBody(b"abc"))
    with pytest.raises(NotFound):
        files.parts(other)


@pytest.mark.parametrize("size_bytes", [0, 1, WINDOW_BYTES, 3 * WINDOW_BYTES + 17])
def test_bodies_pass_in_windows(files: FileStore, size_bytes: int) -> None:
    """No window is larger than the limit, and every byte is transferred, in both directions."""
    content = os.urandom(size_bytes)
    windows: list[int] = []

    class Body(CountedBody):
        def read_into(self, window: memoryview) -> None:
            windows.append(window.nbytes)
            super().read_into(window)

    class Sink(CountedSink):
        def write(self, window: memoryview) -> None:
            windows.append(window.nbytes)
            super().write(window)

    assert files.put_shard("shard", Body(content)) == crc32c(content)
    sink = Sink()
    files.get_range("shard", 0, size_bytes, sink)
    assert sink.data == content
    assert max(windows, default=0) <= WINDOW_BYTES


@pytest.mark.fault("S5")
def test_exceptions_of_bodies_and_sinks_pass_unchanged(files: FileStore, root: Path) -> None:
    """Also an OSError; no object becomes visible, and no file remains."""

    class Torn(CountedBody):
        def read_into(self, window: memoryview) -> None:
            raise OSError("torn")

    class Full(CountedSink):
        def write(self, window: memoryview) -> None:
            raise OSError("torn")

    with pytest.raises(OSError, match=r"^torn$"):
        files.put_shard("shard", Torn(b"abc"))
    assert list(files.list("")) == []
    assert temporary_files(root) == []
    upload = files.begin("shard", 3, 3)
    with pytest.raises(OSError, match=r"^torn$"):
        files.put_part(upload, 1, Torn(b"abc"))
    assert files.parts(upload) == []
    files.put("key", b"abc")
    with pytest.raises(OSError, match=r"^torn$"):
        files.get_range("key", 0, 3, Full())


def test_forged_receipts_are_refused(files: FileStore) -> None:
    """Receipts of another store do not complete an upload."""
    upload = files.begin("shard", 6, 3)
    first = files.put_part(upload, 1, CountedBody(b"abc"))
    with pytest.raises(Permanent, match="part 2"):
        files.complete(upload, [first, PartReceipt(2, "invented", 0)])
    assert files.head("shard") is None


@pytest.mark.fault("O07")
def test_check_reports_a_wrong_directory(tmp_path: Path) -> None:
    """A file in place of the directory, or above it, is Permanent with a hint."""
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(Permanent) as caught:
            FileStore(path.as_uri()).check()
        assert "store.url" in caught.value.hint
        assert not isinstance(caught.value, (Exists, NotFound))


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
from swansongd.errors import Permanent
from swansongd.stores.checksums import crc32c
from swansongd.stores.file import store as module
from swansongd.stores.file.store import FileStore
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
