# SPDX-License-Identifier: Apache-2.0
"""Walking, opening and removing sets: the daemon reads only files, and no file outside the set."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swansong import openat
from swansong_bucket.errors import StagingError
from swansong_bucket.model import CheckpointId, CheckpointKind, Staged, StagedFile
from swansongd.core.events import Prune
from swansongd.staging import scan
from swansongd.staging.remover import Remover

from testkit.other_users import needs_root
from testkit.overlay import mount, overlay
from testkit.staged import ME, write_files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_files(tmp_path / "r1" / "set", {"a": b"1", "dir/b": b"22", "dir/.metadata": b""})
    return tmp_path / "r1"


def listing(run: Path, directory: str = "set") -> tuple[StagedFile, ...]:
    return scan.listing(run, directory, ME)


def staged(run: Path, directory: str = "set") -> Staged:
    return Staged(
        id=CheckpointId(1, "n"),
        directory=directory,
        kind=CheckpointKind.PERIODIC,
        files=listing(run, directory),
    )


def find(run: Path, path: str) -> StagedFile:
    return next(file for file in listing(run) if file.path == path)


def test_a_file_alone_is_a_set(run: Path) -> None:
    """A set of one file has the name of its file, and works like any other."""
    (run / "step=5.ckpt").write_bytes(b"abc")
    one = staged(run, "step=5.ckpt")
    assert [file.path for file in one.files] == ["step=5.ckpt"]
    fd = scan.open_file(run, one.directory, one.files[0])
    assert os.read(fd, 10) == b"abc"
    os.close(fd)
    assert scan.same_listing(run, one)
    (run / "step=5.ckpt").write_bytes(b"abcd")
    assert not scan.same_listing(run, one)
    scan.remove_set(run, one.directory)
    assert visible(run) == ["set"]


def _hard_link(at: Path) -> None:
    secret = at.parents[1] / "secret"
    secret.write_text("x")
    os.link(secret, at)


def _bind(at: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(at))


def _device(at: Path) -> None:
    try:
        os.mknod(at, 0o020666, os.makedev(1, 5))  # /dev/zero never ends
    except PermissionError:
        pytest.skip("making a device needs root")


@pytest.mark.fault("S1", "S3", "S4")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda at: at.symlink_to("/etc/shadow"), "symbolic link"),
        (lambda at: at.symlink_to("/etc"), "symbolic link"),
        (_hard_link, "hard links"),
        (os.mkfifo, "FIFO"),
        (_bind, "socket"),
        (_device, "device"),
    ],
)
def test_an_entry_that_is_not_a_regular_file_voids_the_set(
    run: Path, make: Callable[[Path], None], words: str
) -> None:
    """Links, FIFOs, sockets and devices are named, and never read."""
    make(run / "set" / "dir" / "evil")
    with pytest.raises(StagingError, match=words):
        listing(run)


@needs_root
@pytest.mark.fault("S3")
@pytest.mark.parametrize("path", ["set", "set/dir", "set/dir/b"])
def test_an_entry_of_another_user_voids_the_set(run: Path, path: str) -> None:
    """Each directory and file of a set must belong to an allowed user."""
    os.chown(run / path, 65534, 65534)
    with pytest.raises(StagingError, match="user id 65534") as caught:
        listing(run)
    assert "trainer.users" in caught.value.hint
    assert len(scan.listing(run, "set", frozenset({0, 65534}))) == 3


@needs_root
@pytest.mark.fault("T14")
def test_files_that_the_daemon_cannot_read_are_named(run: Path) -> None:
    """A umask of the trainer that excludes the daemon is reported with the fix."""
    (run / "set" / "a").chmod(0o600)
    for parent in (run, *run.parents[:-1]):
        if parent.name.startswith("pytest-") or parent == run:
            parent.chmod(0o755)
    directory_fd = os.open(run / "set", os.O_RDONLY)
    os.seteuid(65534)
    try:
        with pytest.raises(StagingError, match="cannot be read by the daemon") as caught:
            scan.walk(directory_fd, frozenset({0}))
    finally:
        os.seteuid(0)
        os.close(directory_fd)
    assert "umask" in caught.value.hint


@pytest.mark.fault("S7")
def test_sets_are_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number, depth and size of a trainer's entries have limits, also of empty directories."""
    deep = run / "deep" / "/".join("d" * 16)
    write_files(deep.parent, {"f": b""})
    assert len(listing(run, "deep")) == 1
    write_files(deep, {"f": b""})
    with pytest.raises(StagingError, match=r"17 levels; the limit is 16.*nest fewer"):
        listing(run, "deep")
    for number in range(60):
        (run / "wide" / f"d{number}").mkdir(parents=True)
    monkeypatch.setattr(scan, "DIRECTORIES_MAX", 50)
    with pytest.raises(StagingError, match="more than 50 directories"):
        listing(run, "wide")
    monkeypatch.setattr(scan, "FILES_MAX", 2)
    with pytest.raises(StagingError, match="more than 2"):
        listing(run)
    with open(run / "sparse", "wb") as file:
        file.truncate(1)
    (run / "giant").mkdir()
    space = os.statvfs(run)
    try:
        with open(run / "giant" / "f", "wb") as file:
            file.truncate(space.f_blocks * space.f_frsize + 1)
    except OSError:
        pytest.skip("the file system takes no file larger than itself")
    with pytest.raises(StagingError, match="sparse"):
        listing(run, "giant")
    (run / "giant" / "f").rename(run / "step=7.ckpt")
    with pytest.raises(StagingError, match="sparse"):
        listing(run, "step=7.ckpt")


@pytest.mark.fault("D09", "S5")
def test_a_changed_file_is_detected(run: Path) -> None:
    """Growing, truncating, rewriting or replacing a file is detected on the descriptor or at the open."""
    file = find(run, "a")
    fd = scan.open_file(run, "set", file)
    target = run / "set" / "a"
    os.utime(target, ns=(0, file.mtime_ns + 1))
    assert not scan.unchanged(fd, file)
    os.close(fd)
    for content in (b"22", b""):
        target.write_bytes(content)
        os.utime(target, ns=(0, file.mtime_ns))
        with pytest.raises(StagingError, match="changed"):
            scan.open_file(run, "set", file)
    target.rename(run / "set" / "old")
    target.write_bytes(b"1")
    os.utime(target, ns=(0, file.mtime_ns))
    with pytest.raises(StagingError, match="changed"):
        scan.open_file(run, "set", file)


@pytest.mark.fault("S1", "S4", "S6")
def test_open_stays_inside_the_set(run: Path) -> None:
    """No path, link or FIFO leads out of the set or blocks, with any listing."""
    file = find(run, "dir/b")
    outside = write_files(run.parent / "outside", {"b": b"22"})
    for path in ("../outside/b", "/etc/passwd", "dir/../a", "", ".", "dir//b"):
        with pytest.raises(StagingError):
            scan.open_file(run, "set", file._replace(path=path))
    for directory in ("..", ".", "", "a/b", "/etc", "set/dir"):
        with pytest.raises(StagingError):
            scan.open_file(run, directory, file)
        with pytest.raises(StagingError):
            scan.remove_set(run, directory)
    (run / "set" / "dir").rename(run / "set" / "real")
    (run / "set" / "dir").symlink_to(outside)
    with pytest.raises(StagingError):
        scan.open_file(run, "set", file)
    os.mkfifo(run / "set" / "fifo")
    with pytest.raises(StagingError):
        scan.open_file(run, "set", file._replace(path="fifo"))
    fifo = os.stat(run / "set" / "fifo")
    itself = StagedFile(path="fifo", size_bytes=0, mtime_ns=fifo.st_mtime_ns, inode=fifo.st_ino)
    with pytest.raises(StagingError, match="FIFO"):
        scan.open_file(run, "set", itself)
    (run / "linked").symlink_to(run / "set")
    with pytest.raises(StagingError, match="symbolic link"):
        listing(run, "linked")


@pytest.mark.fault("S2")
def test_a_link_swapped_in_is_never_read(run: Path) -> None:
    """While a name alternates between a file and a link to a secret, only the file is read."""
    secret = run.parent / "secret"
    secret.write_bytes(b"S")
    target, spare = run / "set" / "a", run / "set" / "next"
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            spare.symlink_to(secret)
            spare.rename(target)
            spare.write_bytes(b"1")
            spare.rename(target)

    swapper = threading.Thread(target=swap, daemon=True)
    swapper.start()
    results = {"read": 0, "refused": 0}
    set_fd = os.open(run / "set", os.O_RDONLY)
    try:
        while min(results.values()) < 100:
            try:
                fd = scan._open_below(set_fd, "a")
            except OSError:  # at this moment it was a link
                results["refused"] += 1
                continue
            assert os.read(fd, 1) == b"1"
            os.close(fd)
            results["read"] += 1
    finally:
        stop.set()
        swapper.join(60)
        os.close(set_fd)


@pytest.mark.fault("D09", "S5")
def test_any_change_of_a_set_is_detected(run: Path) -> None:
    """Adding, removing or changing a file changes the listing; so does removing the set."""
    before = staged(run)
    assert scan.same_listing(run, before)
    extra = run / "set" / "extra"
    extra.write_bytes(b"")
    assert not scan.same_listing(run, before)
    extra.unlink()
    assert scan.same_listing(run, before)
    os.utime(run / "set" / "a", ns=(0, 0))
    assert not scan.same_listing(run, before)
    assert not scan.same_listing(run, replace(before, directory="gone"))


def test_removing_a_set_removes_nothing_else(run: Path) -> None:
    """All entries of the set are removed, also special files; the targets of its links stay."""
    outside = write_files(run.parent / "outside", {"keep": b"1"})
    (run / "set" / "dir" / "link").symlink_to(outside)
    (run / "set" / "file-link").symlink_to(outside / "keep")
    os.mkfifo(run / "set" / "fifo")
    scan.remove_set(run, "set")
    scan.remove_set(run, "set")
    assert visible(run) == []
    assert (outside / "keep").read_bytes() == b"1"
    (run / "linked").symlink_to(outside)
    scan.remove_set(run, "linked")
    assert (outside / "keep").exists()
    assert visible(run) == []
    assert os.listdir(run / scan.OWN_DIRECTORY) == []


def test_an_interrupted_removal_leaves_no_set(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set loses its name before its first file, and the next start removes the rest."""

    def interrupted(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", interrupted)
        with pytest.raises(StagingError):
            scan.remove_set(run, "set")
    assert visible(run) == []
    assert len(os.listdir(run / scan.OWN_DIRECTORY)) == 1
    scan.remove_leftovers(run)
    assert os.listdir(run / scan.OWN_DIRECTORY) == []


def test_the_rest_of_a_failed_removal_goes_with_the_next_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk error during a removal costs no space until the next start of the daemon."""
    is_removed = threading.Event()
    with openat.held(openat.open_directory(run)) as run_fd:
        remover = Remover(run_fd, is_removed.set)
        remover.start()
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", lambda *_, **__: os.close(-1))
            remover.submit(Prune(("set",)))
            assert is_removed.wait(60)
        is_removed.clear()
        remover.submit(Prune(()))
        assert is_removed.wait(60)
    assert os.listdir(run / scan.OWN_DIRECTORY) == []


@pytest.mark.fault("S7", "D12")
def test_only_the_daemons_own_leftovers_are_removed(run: Path) -> None:
    """A trainer's directory with the name of a leftover stays, at any depth."""
    write_files(run / ".removing.x", {"a/b/c": b"1"})
    write_files(run / "0123456789abcdef.removing", {"a/b/c": b"1"})
    scan.remove_leftovers(run)
    assert sorted(os.listdir(run)) == [
        ".removing.x", ".swansongd", "0123456789abcdef.removing", "set",
    ]  # fmt: skip


def visible(run: Path) -> list[str]:
    """Entries of the staging directory of the run, without the daemon's own."""
    return sorted(name for name in os.listdir(run) if name != scan.OWN_DIRECTORY)


names = st.text(alphabet="abcXYZ019_+=@,.- ", min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)
trees = st.recursive(
    st.binary(max_size=20), lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=12
).filter(lambda tree: isinstance(tree, dict))


def plant(directory: Path, tree: dict[str, object]) -> dict[str, bytes]:
    """Write the tree; returns its files by path."""
    directory.mkdir()
    planted: dict[str, bytes] = {}
    for name, content in tree.items():
        if isinstance(content, bytes):
            (directory / name).write_bytes(content)
            planted[name] = content
        else:
            assert isinstance(content, dict)
            inner = plant(directory / name, content)
            planted |= {f"{name}/{path}": data for path, data in inner.items()}
    return planted


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=trees)
def test_any_tree_is_listed_read_and_removed_whole(
    tree: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The listing is the tree, and the removal leaves nothing.

    Each file opens by path and by a descriptor of the run directory, ready for blocking reads of its bytes.
    """
    run = tmp_path_factory.mktemp("run")
    planted = plant(run / "set", tree)
    files = listing(run)
    assert [file.path for file in files] == sorted(planted)
    run_fd = os.open(run, os.O_RDONLY)
    for file, where in product(files, (run, run_fd)):
        fd = scan.open_file(where, "set", file)
        assert os.get_blocking(fd)
        assert os.read(fd, 100) == planted[file.path]
        os.close(fd)
    os.close(run_fd)
    scan.remove_set(run, "set")
    assert visible(run) == []


@needs_root
@pytest.mark.fault("S7")
@pytest.mark.parametrize("path", ["set", "set/dir"])
def test_a_mount_is_not_part_of_a_set(run: Path, path: str) -> None:
    """Reads from a FUSE mount of the trainer may block forever."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.fsencode(run / path)
    if libc.mount(b"tmpfs", place, b"tmpfs", 0, None) != 0:
        pytest.skip("does not apply: no mounts in this sandbox")
    try:
        with pytest.raises(StagingError, match="another file system"):
            scan.listing(run, "set")
    finally:
        libc.umount2(place, 2)


def test_a_set_on_overlayfs_is_read_and_a_mounted_file_is_not(tmp_path: Path) -> None:
    """Its files have another device than its directories, without any mount in the set."""
    with overlay(tmp_path) as merged:
        (merged / "set").mkdir()
        place = merged / "set" / "a"
        place.write_bytes(b"data")
        (file,) = scan.listing(merged, "set")
        os.close(scan.open_file(merged, "set", file))
        assert place.stat().st_dev != place.parent.stat().st_dev
        other = tmp_path / "upper" / "other"
        other.write_bytes(b"data")
        with ExitStack() as mounts:
            mount(mounts, "bind", place, source=other)
            (file,) = scan.listing(merged, "set")
            with pytest.raises(StagingError, match="another file system"):
                scan.open_file(merged, "set", file)
