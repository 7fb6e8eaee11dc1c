# SPDX-License-Identifier: Apache-2.0
"""Rights in a file store: for its user, and for the users that the mode of the root admits."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from swansong_bucket.errors import Permanent, StoreError
from swansong_bucket.stores import checksums
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.file.store import FileStore

from testkit.as_user import DAEMON, GROUP, MEMBER, OUTSIDER, as_user, place_for_all
from testkit.other_users import needs_root
from testkit.store_backends import every_call
from testkit.waiting import until

checksums.load()
"""Another user may have no rights to import modules."""
KNOWN = ["run/generations/1.json", "run/commits/1.json", "run/data/small", "run/data/large"]


def attempted(root: Path) -> list[str]:
    """The calls that this user can make in the store: reads, writes and changes of names and modes."""
    done: list[str] = []

    def tried(what: str, call: Callable[[], object]) -> None:
        with suppress(OSError):
            call()
            done.append(what)

    paths = [root]
    for path in paths:
        tried("list", lambda path=path: paths.extend(path.iterdir()))  # type: ignore[misc]
    for path in sorted({*paths, *(root / name for name in KNOWN)}):
        tried("read", partial(open_and_close, path, os.O_RDONLY))
        if os.path.isdir(path):
            tried("create", partial(os.mkdir, path / "mine"))
        else:
            tried("write", partial(open_and_close, path, os.O_WRONLY))
        tried("chmod", partial(os.chmod, path, 0o777))
        tried("rename", partial(os.rename, path, f"{path}.away"))
        tried("remove", partial(os.unlink, path))
    return done


def open_and_close(path: Path, flags: int) -> None:
    os.close(os.open(path, flags))


@pytest.fixture
def root() -> Iterator[Path]:
    """An empty directory of the daemon, which other users can reach."""
    with place_for_all(0) as place:
        (place / "store").mkdir()
        os.chown(place / "store", DAEMON, GROUP)
        yield place / "store"


def write(root: Path, umask: int) -> None:
    """Create a store with objects as the daemon."""

    def create() -> None:
        os.umask(umask)
        store = FileStore(root.as_uri())
        store.check()
        store.put("run/generations/1.json", b"claim", if_absent=True)
        store.put("run/commits/1.json", b"commit")
        store.create("run/data/small", Body(b"shard"))
        store.create("run/data/large", Body(b"abcabc"))

    assert as_user(DAEMON, create) is None


def modes(root: Path) -> tuple[set[int], set[int]]:
    """Permission bits of all directories below the root, and of all files."""
    found = [path for path in root.rglob("*") if not path.is_symlink()]
    assert len(found) > 8
    directories = {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()}
    files = {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()}
    return directories, files


@needs_root
@pytest.mark.fault("O23")
def test_what_the_store_makes_is_for_its_user_alone(root: Path) -> None:
    """Even with umask 0, a member of the daemon's group can neither read nor change an object."""
    root.chmod(0o700)
    write(root, 0)
    assert modes(root) == ({0o700}, {0o600})
    assert as_user(MEMBER, lambda: attempted(root)) == []
    assert as_user(OUTSIDER, lambda: attempted(root), groups=()) == []
    store = FileStore(root.as_uri())
    assert store.get("run/commits/1.json") == b"commit"
    assert store.get("run/data/large") == b"abcabc"


@needs_root
@pytest.mark.fault("O23")
def test_the_group_reads_below_a_readable_root(root: Path) -> None:
    """With a root of mode 0750 the group can read everything, and change nothing."""
    root.chmod(0o750)
    write(root, 0)
    assert modes(root) == ({0o750}, {0o640})
    assert set(as_user(MEMBER, lambda: attempted(root))) == {"list", "read"}
    assert as_user(OUTSIDER, lambda: attempted(root), groups=()) == []


@needs_root
@pytest.mark.fault("O23")
@pytest.mark.parametrize(
    ("mode", "directory", "file", "umask"),
    [
        (0o700, 0o700, 0o600, 0o000),
        (0o755, 0o755, 0o644, 0o077),
        (0o2770, 0o2770, 0o660, 0o077),
        (0o3770, 0o3770, 0o660, 0o000),
        (0o711, 0o711, 0o600, 0o000),
    ],
)
def test_the_root_decides(root: Path, mode: int, directory: int, file: int, umask: int) -> None:
    """Directories get its permission bits, files the same without execute, as in a shared git repository."""
    root.chmod(mode)
    write(root, umask)
    assert modes(root) == ({directory}, {file})
    assert {path.stat().st_gid for path in root.rglob("*")} == {GROUP}


@needs_root
@pytest.mark.fault("O23")
def test_daemons_of_one_group_share_a_store(root: Path) -> None:
    """With mode 2770 one daemon continues from the commit of the other."""
    root.chmod(0o2770)
    write(root, 0o077)

    def continue_it() -> None:
        store = FileStore(root.as_uri())
        store.put("run/commits/2.json", b"theirs")
        store.put("run/commits/1.json", b"newer")
        store.delete("run/data/small")

    assert as_user(MEMBER, continue_it) is None
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
    for call in every_call(store).values():
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
        lambda: store.create("run/data/key", Body(b"x")),
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
        for number in range(100):
            outcomes.add(put(number))
        until(lambda: outcomes.add(put(0)) or outcomes == {True, False}, what="both outcomes")
    finally:
        over.set()
        thread.join(60)
    assert not thread.is_alive()
    assert os.listdir(outside) == []


@pytest.mark.fault("S7")
def test_deeply_nested_directories(tmp_path: Path) -> None:
    """More than a hundred nested directories are an error of the listing."""
    root = tmp_path / "store"
    root.mkdir()
    store = FileStore(root.as_uri())
    store.put("run/commits/1.json", b"x")
    (root / "/".join(["deep"] * 102)).mkdir(parents=True)
    with pytest.raises(Permanent, match="more than 100"):
        list(store.list(""))
    assert [info.key for info in store.list("run/")] == ["run/commits/1.json"]
