# SPDX-License-Identifier: Apache-2.0
"""A file store identifies its file system: an unmounted or another one is never an empty store."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from swansong_bucket.errors import Permanent, Transient
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.file import mount_points
from swansong_bucket.stores.file.io import classified
from swansong_bucket.stores.file.mount_points import Mount
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.stores.file.tree import MARKER
from swansong_tools.commands.bucket_command import opened
from swansong_tools.commands.main import parser
from swansong_tools.doctor import store as of_store
from swansong_tools.doctor.findings import Judgement, Level
from swansong_tools.doctor.installation import Installation, daemon_account
from swansongd.config.config import load
from swansongd.flush.claim_record import ClaimRecord

from testkit.committed import configuration, file_store, tree
from testkit.other_users import needs_root
from testkit.store_backends import every_call
from testkit.waiting import in_threads


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def files(root: Path) -> FileStore:
    """A store with one object."""
    store = file_store(root)
    store.put("run/one", b"1")
    return store


def refused(store: FileStore, root: Path, problem: str) -> str:
    """Every call fails with this problem and touches nothing; returns the hint."""
    before = tree(root)
    for call in every_call(store, "run/one").values():
        with pytest.raises(Permanent, match=problem) as caught:
            call()
    assert tree(root) == before
    return caught.value.hint


def fstab(monkeypatch: pytest.MonkeyPatch, directory: Path, *lines: str) -> None:
    path = directory / "fstab"
    path.write_text("# <file system> <mount point> <type>\n" + "\n".join(lines) + "\n")
    monkeypatch.setattr(mount_points, "FSTAB", path)
    monkeypatch.setattr(mount_points, "UNITS", (directory / "units",))


@pytest.mark.fault("O25")
def test_a_file_system_that_is_unmounted_and_mounted_again(files: FileStore, root: Path) -> None:
    """One store object works, refuses all calls on the bare directory, and works again."""
    away = root.with_name("away")
    os.rename(root, away)
    hint = refused(files, away, "does not exist")
    assert not root.exists()
    root.mkdir()
    hint = refused(files, root, "not mounted")
    assert os.listdir(root) == []
    root.rmdir()
    os.rename(away, root)
    assert files.get("run/one") == b"1"
    files.put("run/two", b"2", if_absent=True)
    # The hint restores a directory that was emptied on purpose.
    content = (root / MARKER).read_text()
    (root / MARKER).unlink()
    refused(files, root, "not mounted")
    assert re.search(r"echo '(.*)' >", hint)[1] == content  # type: ignore[index]
    (root / MARKER).write_text(content)
    assert files.get("run/two") == b"2"


@pytest.mark.fault("O25")
def test_another_file_system_in_its_place(files: FileStore, root: Path, tmp_path: Path) -> None:
    """It contains another store: this one neither reads nor writes there."""
    other = file_store(tmp_path / "other")
    os.rename(root, tmp_path / "away")
    os.rename(tmp_path / "other", root)
    hint = refused(files, root, f"the id of its store is {other.store_id}")
    assert "claim.json" in hint
    assert FileStore(root.as_uri()).head("run/one") is None


SWAPPED = """
import os, subprocess, sys
from swansong_bucket.errors import Permanent
from swansong_bucket.stores.file.store import FileStore
def mount():
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", sys.argv[1]], check=True)
    return os.stat(sys.argv[1])
first, store = mount(), FileStore("file://" + sys.argv[1])
store.put("key", b"1")
subprocess.run(["umount", sys.argv[1]], check=True)
second = mount()
FileStore("file://" + sys.argv[1]).put("key", b"other")
try:
    print(store.get("key"))
except Permanent as error:
    print((first.st_dev, first.st_ino) == (second.st_dev, second.st_ino), error)
"""


@pytest.mark.fault("O07", "O25")
def test_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    """A path through a file is refused with its name: no call takes the objects for missing."""
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "store"):
        hint = refused(FileStore(f"file://{root}"), tmp_path, f"^{root}, or a name in")
        assert hint == "Set store.url to a directory"


@needs_root
@pytest.mark.fault("O25")
def test_the_kernel_gives_the_numbers_of_a_file_system_to_the_next_one(tmp_path: Path) -> None:
    """Two file systems, mounted one after the other, have the same device number and root inode."""
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", SWAPPED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine allows no mounts")
    assert done.returncode == 0, done.stderr
    assert "another file system than before" in done.stdout


def test_the_marker_is_not_an_object(files: FileStore, root: Path) -> None:
    """It is not listed and has no key; it contains the format, its version and a random id."""
    assert [info.key for info in files.list("")] == ["run/one"]
    for call in (
        lambda: files.get(MARKER),
        lambda: files.head(MARKER),
        lambda: files.put(MARKER, b"x"),
        lambda: files.delete(MARKER),
        lambda: files.delete(f"{MARKER}/x"),
        lambda: files.create(MARKER, Body(b"x")),
    ):
        with pytest.raises(Permanent, match="not a key"):
            call()
    content = json.loads((root / MARKER).read_bytes())
    assert content == {"format": "swansong-store", "version": 1, "id": files.store_id}
    assert re.fullmatch(r"[0-9a-f]{32}", files.store_id)


@pytest.mark.fault("O25", "G04")
def test_one_id_for_all_first_writers_and_none_by_readers(root: Path) -> None:
    """Readers of an empty directory create nothing.  Eight concurrent writers agree on one id."""
    root.mkdir()
    reader = FileStore(root.as_uri())
    assert list(reader.list("")) == []
    assert reader.head("run/one") is None
    assert os.listdir(root) == []
    stores = [FileStore(root.as_uri()) for _ in range(8)]
    in_threads(8, lambda number: stores[number].put(f"run/{number}", b"x", if_absent=True))
    assert len({store.store_id for store in stores}) == 1
    assert len(list(reader.list(""))) == len(stores)
    assert os.listdir(root / ".swansong-tmp") == []


@pytest.mark.fault("O25")
@pytest.mark.parametrize("where", ["root", "above", "unit", "through a link"])
def test_a_bare_mount_point_is_not_a_new_store(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A VM that does not know the id refuses a bare target of fstab or of a unit.

    A store without a marker is adopted only if its file system is mounted.
    """
    root.mkdir()
    target = {"root": root, "above": tmp_path}.get(where, root)
    at = root
    if where == "through a link":
        at = tmp_path / "link"
        at.symlink_to(root)
    fstab(monkeypatch, tmp_path, "" if where == "unit" else f"nfs:/x {target} nfs4 _netdev 0 0")
    (tmp_path / "units").mkdir()
    (tmp_path / "units" / "masked.mount").symlink_to("/dev/null")
    if where == "unit":
        (tmp_path / "units" / "x.mount").write_text(f"[Mount]\nWhat=nfs:/x\nWhere={root}\n")
    store = FileStore(at.as_uri())
    hint = refused(store, root, "nothing is mounted at")
    assert f"mount {target}" in hint
    (root / "run" / "generations").mkdir(parents=True)
    (root / "run" / "generations" / "00000001.json").write_bytes(b"{}")
    refused(store, root, "nothing is mounted at")

    monkeypatch.setattr(mount_points, "is_mounted", lambda *_: True)
    store.check()
    assert [info.key for info in store.list("")] == ["run/generations/00000001.json"]
    monkeypatch.undo()
    fstab(monkeypatch, tmp_path, f"nfs:/x {target} nfs4 _netdev 0 0")
    FileStore(at.as_uri()).check()  # the marker is sufficient


@pytest.mark.fault("O25")
def test_a_mount_during_a_call(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory was opened before the mount: it gets no marker, and a retry succeeds."""
    root.mkdir()
    bare = tmp_path / "bare"

    def mounted_now(_: str) -> None:
        if not bare.exists():
            os.rename(root, bare)
            root.mkdir()

    monkeypatch.setattr(mount_points, "missing_mount", mounted_now)
    store = FileStore(root.as_uri())
    with pytest.raises(Transient):
        store.put("run/one", b"1")
    assert tree(bare) == tree(root) == {}
    store.put("run/one", b"1")
    assert tree(bare) == {}


def test_targets_that_are_not_above_the_root(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour, a comment, swap and malformed lines do not count."""
    root.mkdir()
    neighbour = f"{root}-2"
    lines = (f"x {neighbour} nfs", f"# x {root} nfs", "y none swap", "z", f"w {root}/below nfs", "")
    fstab(monkeypatch, tmp_path, *lines, "v / ext4")
    FileStore(root.as_uri()).check()
    fstab(monkeypatch, tmp_path, str(tmp_path / "a b").replace(" ", r"\040").join(("x ", " nfs")))
    (tmp_path / "a b").mkdir()
    with pytest.raises(Permanent, match="nothing is mounted"):
        FileStore((tmp_path / "a b").as_uri()).check()


BASE = Mount(20, 1, "8:1", "/", "/", "ext4")


@pytest.mark.parametrize(
    ("there", "is_mounted"),
    [
        ([], False),
        ([Mount(21, 20, "0:40", "/", "/srv/ckpt", "nfs4")], True),
        ([Mount(21, 20, "8:1", "/data", "/srv/ckpt", "ext4")], True),
        ([Mount(21, 20, "8:1", "/srv/ckpt", "/srv/ckpt", "ext4")], False),
        ([Mount(21, 20, "0:41", "/", "/srv/ckpt", "autofs")], False),
        (
            [
                Mount(21, 20, "0:41", "/", "/srv/ckpt", "autofs"),
                Mount(22, 21, "0:40", "/", "/srv/ckpt", "nfs4"),
            ],
            True,
        ),
        (
            [
                Mount(21, 20, "0:40", "/", "/srv/ckpt", "nfs4"),
                Mount(22, 21, "8:1", "/srv/ckpt", "/srv/ckpt", "ext4"),
            ],
            False,
        ),
        ([Mount(21, 20, "0:40", "/", "/srv", "nfs4")], False),
    ],
    ids=[
        "nothing", "server", "bind", "bound to itself", "automount", "automounted", "hidden by the sandbox",
        "only above",
    ],
)  # fmt: skip
def test_what_counts_as_mounted(there: list[Mount], is_mounted: bool) -> None:
    """ReadWritePaths= binds a bare directory to itself, which is not a file system."""
    assert mount_points.is_mounted("/srv/ckpt", [BASE, *there]) is is_mounted


@pytest.mark.fault("S4", "S7")
@pytest.mark.parametrize(
    "plant",
    [
        "pipe", "link", "directory", "large", "empty", "garbage", "[]", '{"format": "swansong-store"}',
        '{"format": "x", "version": 1, "id": "a"}', '{"format": "swansong-store", "version": 2, "id": "a"}',
        '{"format": "swansong-store", "version": 1, "id": ""}',
        '{"format": "swansong-store", "version": 1, "id": ["a"]}',
    ],
)  # fmt: skip
def test_a_malformed_marker(root: Path, tmp_path: Path, plant: str) -> None:
    """An error that names the file; the marker is neither accepted nor replaced."""
    root.mkdir()
    marker = root / MARKER
    if plant == "pipe":
        os.mkfifo(marker)
    elif plant == "link":
        (tmp_path / "elsewhere").write_text('{"format": "swansong-store", "version": 1, "id": "a"}')
        marker.symlink_to(tmp_path / "elsewhere")
    elif plant == "directory":
        marker.mkdir()
    elif plant == "large":
        with open(marker, "wb") as file:
            file.truncate(2**40)
    else:
        marker.write_text("" if plant == "empty" else plant)
    store = FileStore(root.as_uri())
    for call in every_call(store, "run/one").values():
        with pytest.raises(Permanent, match=re.escape(MARKER)) as caught:
            call()
        assert caught.value.hint
    assert os.listdir(root) == [MARKER]


@needs_root
@pytest.mark.fault("O23")
def test_a_marker_of_a_user_who_could_not_write_it(files: FileStore, root: Path) -> None:
    """Refused, unless the group may write to the directory, which daemons with other user ids share."""
    root.chmod(0o755)
    os.chown(root / MARKER, 64002, 64010)
    assert f"chown {os.geteuid()}" in refused(files, root, "belongs to user id 64002")
    root.chmod(0o2770)
    assert files.get("run/one") == b"1"


@pytest.fixture
def config(root: Path, tmp_path: Path) -> Path:
    """The configuration of a VM with this store, whose daemon has recorded the id ``known``."""
    root.mkdir()
    path = configuration(tmp_path, root.as_uri())
    own = tmp_path / "staging" / "r" / ".swansongd"
    own.mkdir(parents=True)
    ClaimRecord("r", root.as_uri(), store_id="known").save(own)
    return path


@pytest.mark.fault("O25")
def test_the_commands_of_a_vm_know_the_store_of_its_daemon(
    config: Path, root: Path, tmp_path: Path
) -> None:
    """Restore, ls and verify compare the recorded id: an empty directory is an error."""
    words = ["--config", str(config), "ls"]
    arguments = parser(words).parse_args(words)
    with pytest.raises(Permanent, match="not mounted"), opened(arguments):
        pass
    (tmp_path / "staging" / "r" / ".swansongd" / "claim.json").unlink()
    with opened(arguments, may_be_new=True) as here:
        assert list(here.store.list("")) == []
    assert os.listdir(root) == []


@pytest.mark.fault("O25")
def test_doctor_leaves_a_bare_mount_point_bare(
    config: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails with the mount command, and creates neither a marker nor a directory."""

    def bucket() -> Judgement:
        vm = Installation(path=config, configured=load(config), user=daemon_account())
        judgement = next(check for check in of_store.CHECKS if check.name == "bucket").probe(vm)
        assert judgement.level is Level.FAILURE
        assert os.listdir(root) == []
        return judgement

    assert "not mounted" in bucket().found
    (tmp_path / "staging" / "r" / ".swansongd" / "claim.json").unlink()
    fstab(monkeypatch, tmp_path, f"nfs:/x {root} nfs4 _netdev 0 0")
    assert bucket().fix.endswith(f"mount {root}")
    config.write_text(config.read_text().replace(root.as_uri(), f"{root.as_uri()}/below"))
    assert bucket().fix.endswith(f"mount {root}")


@pytest.mark.parametrize("name", ["ENOTCONN", "ENODEV", "ESTALE"])
def test_a_server_that_does_not_respond_is_transient(name: str) -> None:
    """A FUSE daemon that died, an automount that failed, a stale file handle."""
    error = classified(OSError(getattr(errno, name), "x"), "get key")
    assert isinstance(error, Transient)
