# SPDX-License-Identifier: Apache-2.0
"""Rights in a file store: for its user, and for the users that the mode of the root admits."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swansong_bucket.errors import Permanent, StoreError
from swansong_bucket.stores.file.store import FileStore

from testkit.waiting import until

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes on other users: needs root")
DAEMON, MEMBER, OUTSIDER, TRAINERS = 64001, 64002, 64003, 64010
"""Users, and the group that the daemon and the member are in."""

WRITER = """
import os, sys
from swansong_bucket.stores.file.store import FileStore
os.umask(int(sys.argv[2], 8))
store = FileStore(sys.argv[1])
store.check()
store.put("run/generations/1.json", b"claim", if_absent=True)
store.put("run/commits/1.json", b"commit")
store.create("run/data/small", memoryview(b"shard"))
store.create("run/data/large", memoryview(b"abcabc"))
"""

ATTACKER = """
import os, sys
root, done = sys.argv[1], []
def tried(what, call):
    try:
        call()
    except OSError:
        return
    done.append(what)
paths = [root]
for path in paths:
    tried(f"list {path}", lambda: paths.extend(os.path.join(path, name) for name in os.listdir(path)))
known = ["run/generations/1.json", "run/commits/1.json", "run/data/small", "run/data/large"]
for path in sorted({*paths, *(os.path.join(root, name) for name in known)}):
    tried(f"read {path}", lambda: os.close(os.open(path, os.O_RDONLY)))
    if os.path.isdir(path):
        tried(f"create below {path}", lambda: os.mkdir(os.path.join(path, "mine")))
    else:
        tried(f"write {path}", lambda: os.close(os.open(path, os.O_WRONLY)))
    tried(f"chmod {path}", lambda: os.chmod(path, 0o777))
    tried(f"rename {path}", lambda: os.rename(path, path + ".away"))
    tried(f"remove {path}", lambda: os.unlink(path))
print(chr(10).join(done))
"""


def run_as(uid: int, gid: int, groups: list[int], code: str, *argv: str) -> str:
    """Run a program as another user, after its imports, for which that user may have no rights."""
    drop = (
        "import os, sys\n"
        "from swansong_bucket.stores import checksums\n"
        "from swansong_bucket.stores.file.store import FileStore\n"
        "checksums.load()\n"
        f"os.setgroups({groups}); os.setgid({gid}); os.setuid({uid})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", drop + code, *argv],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def place() -> Iterator[Path]:
    """Another directory than tmp_path, which other users cannot reach."""
    path = Path(tempfile.mkdtemp(prefix="swansong-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def write(place: Path, umask: str) -> Path:
    """Create a store with objects in an existing directory."""
    root = place / "store"
    run_as(DAEMON, TRAINERS, [], WRITER, root.as_uri(), umask)
    return root


def modes(root: Path) -> tuple[set[int], set[int]]:
    """Permission bits of all directories below the root, and of all files."""
    found = [path for path in root.rglob("*") if not path.is_symlink()]
    assert len(found) > 8
    directories = {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()}
    files = {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()}
    return directories, files


@as_root
@pytest.mark.fault("O23")
@pytest.mark.parametrize("umask", ["0", "002", "077"])
def test_what_the_store_makes_is_for_its_user_alone(place: Path, umask: str) -> None:
    """With any umask, a member of the daemon's group can neither read nor change an object."""
    (place / "store").mkdir(mode=0o700)
    os.chown(place / "store", DAEMON, TRAINERS)
    root = write(place, umask)
    assert modes(root) == ({0o700}, {0o600})
    for uid in (MEMBER, OUTSIDER):
        gid = TRAINERS if uid == MEMBER else OUTSIDER
        assert run_as(uid, gid, [], ATTACKER, str(root)) == ""
    store = FileStore(root.as_uri())
    assert store.get("run/commits/1.json") == b"commit"
    assert store.get("run/data/large") == b"abcabc"


@as_root
@pytest.mark.fault("O23")
def test_the_group_reads_below_a_readable_root(place: Path) -> None:
    """With a root of mode 0750 the group can read everything, and change nothing."""
    (place / "store").mkdir()
    (place / "store").chmod(0o750)
    os.chown(place / "store", DAEMON, TRAINERS)
    root = write(place, "0")
    assert modes(root) == ({0o750}, {0o640})
    done = run_as(MEMBER, MEMBER, [TRAINERS], ATTACKER, str(root)).splitlines()
    assert {line.partition(" ")[0] for line in done} == {"list", "read"}
    assert run_as(OUTSIDER, OUTSIDER, [], ATTACKER, str(root)) == ""


@as_root
@pytest.mark.fault("O23")
@pytest.mark.parametrize(
    ("mode", "directory", "file", "umask"),
    [
        (0o700, 0o700, 0o600, "0"),
        (0o755, 0o755, 0o644, "077"),
        (0o2770, 0o2770, 0o660, "077"),
        (0o3770, 0o3770, 0o660, "0"),
        (0o711, 0o711, 0o600, "0"),
    ],
)
def test_the_root_decides(place: Path, mode: int, directory: int, file: int, umask: str) -> None:
    """Directories get its permission bits, files the same without execute, as in a shared git repository."""
    (place / "store").mkdir()
    os.chown(place / "store", DAEMON, TRAINERS)
    (place / "store").chmod(mode)
    root = write(place, umask)
    assert modes(root) == ({directory}, {file})
    assert {path.stat().st_gid for path in root.rglob("*")} == {TRAINERS}


@as_root
@pytest.mark.fault("O23")
def test_daemons_of_one_group_share_a_store(place: Path) -> None:
    """With mode 2770 one daemon continues from the commit of the other."""
    (place / "store").mkdir()
    os.chown(place / "store", DAEMON, TRAINERS)
    (place / "store").chmod(0o2770)
    root = write(place, "077")
    code = """
store = FileStore(sys.argv[1])
store.put("run/commits/2.json", b"theirs")
store.put("run/commits/1.json", b"newer")
store.delete("run/data/small")
"""
    run_as(MEMBER, MEMBER, [TRAINERS], code, root.as_uri())
    store = FileStore(root.as_uri())
    assert store.get("run/commits/1.json") == b"newer"
    assert sorted(info.key for info in store.list("run/data/")) == ["run/data/large"]


def test_an_acl_of_the_root_gives_its_group_nothing(tmp_path: Path) -> None:
    """With an ACL the group bits are its mask: the daemon's group does not get a named user's rights."""
    root = tmp_path / "store"
    root.mkdir()
    # Version 2; owner rwx, user 64002 rwx, group none, mask rwx, others none.
    entries = [(1, 7, -1), (2, 7, 64002), (4, 0, -1), (16, 7, -1), (32, 0, -1)]
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, bits, uid & 0xFFFFFFFF) for tag, bits, uid in entries
    )
    try:
        os.setxattr(root, "system.posix_acl_access", acl)
        os.setxattr(root, "system.posix_acl_default", acl)
    except OSError:
        pytest.skip("does not apply: this file system knows no ACLs")
    assert stat.S_IMODE(root.stat().st_mode) == 0o770
    store = FileStore(root.as_uri())
    store.put("run/commits/1.json", b"x")
    store.put("run/commits/2.json", b"x")
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_dir()} == {
        0o700
    }
    files = [path for path in root.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert not [path for path in files if "system.posix_acl_access" in os.listxattr(path)]


@pytest.mark.fault("O23", "O07")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_world_writable_root_is_refused(tmp_path: Path, mode: int) -> None:
    """By every call, with the fix: any user of the machine could plant a commit there."""
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(mode)
    store = FileStore(root.as_uri())
    calls: list[Callable[[], object]] = [
        store.check,
        lambda: store.put("key", b"x"),
        lambda: store.put("key", b"x", if_absent=True),
        lambda: store.create("key", memoryview(b"x")),
        lambda: store.get("key"),
        lambda: store.head("key"),
        lambda: list(store.list("")),
    ]
    for call in calls:
        with pytest.raises(Permanent) as caught:
            call()
        assert "chmod o-w" in caught.value.hint
    assert os.listdir(root) == []
    root.chmod(0o700)
    store.put("key", b"x")
    assert store.get("key") == b"x"


# ---------------------------------------------------------------- links


@pytest.mark.fault("S1")
@pytest.mark.parametrize("where", ["run", "run/data", ".swansong-tmp"])
def test_no_link_is_followed(tmp_path: Path, where: str) -> None:
    """A link in place of any directory: nothing behind it is written, read or removed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (outside / "data").mkdir()
    (outside / "data" / "secret").write_bytes(b"secret")
    root = tmp_path / "store"
    (root / where).parent.mkdir(parents=True)
    (root / where).symlink_to(outside)
    before = sorted(outside.rglob("*"))
    store = FileStore(root.as_uri())
    calls: list[Callable[[], object]] = [
        lambda: store.put("run/data/key", b"x"),
        lambda: store.put("run/data/key", b"x", if_absent=True),
        lambda: store.create("run/data/key", memoryview(b"x")),
        lambda: store.get("run/data/secret"),
    ]
    for call in calls:
        with pytest.raises(StoreError):
            call()
    store.delete("run/data/secret")
    store.delete("run/secret")
    assert store.head("run/data/secret") is None
    assert list(store.list("run/")) == []
    assert sorted(outside.rglob("*")) == before
    assert (outside / "data" / "secret").read_bytes() == b"secret"


@pytest.mark.fault("S2")
def test_a_directory_that_is_swapped_for_a_link(tmp_path: Path) -> None:
    """Another process keeps swapping a directory and a link: no write goes behind the link."""
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "store"
    (root / "run").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    over = threading.Event()

    exchange = ctypes.CDLL(None).renameat2
    names = os.fsencode(root / "run"), os.fsencode(root / "link")

    def swap() -> None:
        while not over.is_set():
            exchange(-100, names[0], -100, names[1], 2)  # AT_FDCWD, RENAME_EXCHANGE

    thread = threading.Thread(target=swap, daemon=True)
    thread.start()
    store = FileStore(root.as_uri())
    outcomes: set[bool] = set()

    def put(number: int) -> bool:
        try:
            store.put(f"run/{number}", b"x")
        except StoreError:
            return False
        return True

    try:
        for number in range(300):
            outcomes.add(put(number))
        until(lambda: outcomes.add(put(0)) or outcomes == {True, False}, what="both outcomes")
    finally:
        over.set()
        thread.join(10)
    assert not thread.is_alive()
    assert os.listdir(outside) == []


@pytest.mark.fault("S7")
def test_deeply_nested_directories(tmp_path: Path) -> None:
    """A thousand nested directories are an error of the listing, without a crash."""
    root = tmp_path / "store"
    root.mkdir()
    store = FileStore(root.as_uri())
    store.put("run/commits/1.json", b"x")
    fds = [os.open(root, os.O_RDONLY)]
    try:
        for _ in range(1000):
            os.mkdir("deep", dir_fd=fds[-1])
            fd = os.open("deep", os.O_RDONLY, dir_fd=fds[-1])
            os.close(fds.pop())
            fds.append(fd)
    finally:
        os.close(fds[-1])
    try:
        with pytest.raises(Permanent, match="more than 100"):
            list(store.list(""))
        assert [info.key for info in store.list("run/")] == ["run/commits/1.json"]
    finally:  # pytest could not
        subprocess.run(["rm", "-rf", str(root / "deep")], check=True)
