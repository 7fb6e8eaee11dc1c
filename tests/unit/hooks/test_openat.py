# SPDX-License-Identifier: Apache-2.0
"""File operations below directories that other users may write to: no link is followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from swansong import openat
from swansong.openat import UnsafeFileError


@pytest.fixture
def top(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "top").mkdir()
    fd = openat.open_directory(tmp_path / "top")
    yield fd
    os.close(fd)


@pytest.mark.fault("S1", "S4")
def test_links_and_special_files_are_not_opened(tmp_path: Path, top: int) -> None:
    """A link, FIFO, directory or hard link is not opened as a file, and does not block the reader."""
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", "link", dir_fd=top)
    os.mkfifo("fifo", dir_fd=top)
    os.mkdir("directory", dir_fd=top)
    os.link(tmp_path / "secret", "hard", dst_dir_fd=top)
    for name in ("link", "fifo", "directory", "hard", "missing"):
        with pytest.raises(OSError, match=r"link|regular|No such"):
            openat.open_file(name, dir_fd=top)
    with pytest.raises(OSError, match=r"Not a directory|link"):
        openat.open_directory("link", dir_fd=top)


@pytest.mark.fault("S3")
def test_a_file_of_another_user_is_refused(top: int) -> None:
    os.close(openat.create_file("file", dir_fd=top))
    with pytest.raises(UnsafeFileError, match="belongs to user id"):
        openat.open_file("file", dir_fd=top, owners={os.geteuid() + 1})
    with pytest.raises(UnsafeFileError, match="belongs to user id"):
        openat.open_directory(".", dir_fd=top, owners=())


def test_a_new_file_never_goes_through_a_link(tmp_path: Path, top: int) -> None:
    os.symlink(tmp_path / "elsewhere", "name", dir_fd=top)
    with pytest.raises(FileExistsError):
        openat.create_file("name", dir_fd=top)
    assert not (tmp_path / "elsewhere").exists()
    openat.replace_file("name", b"new", dir_fd=top)
    assert openat.read_file("name", dir_fd=top, max_bytes=10) == b"new"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes_are_exact_whatever_the_umask(top: int, umask: int) -> None:
    before = os.umask(umask)
    try:
        os.close(openat.make_directory("directory", dir_fd=top, mode=0o2750))
        os.close(openat.create_file("file", dir_fd=top, mode=0o640))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(os.stat(name, dir_fd=top).st_mode) for name in ("directory", "file")]
    assert modes == [0o2750, 0o640]


def test_a_file_above_the_limit_is_not_read(top: int) -> None:
    """A sparse file of a tebibyte takes no more memory than the limit."""
    fd = openat.create_file("large", dir_fd=top)
    os.ftruncate(fd, 2**40)
    os.close(fd)
    with pytest.raises(UnsafeFileError, match="more than 1000 bytes"):
        openat.read_file("large", dir_fd=top, max_bytes=1000)


@pytest.mark.fault("S7")
def test_a_tree_of_any_depth_is_removed(tmp_path: Path, top: int) -> None:
    """1,100 levels with files, and a link whose target stays."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("data")
    fd = openat.make_directory("doomed", dir_fd=top, mode=0o700)
    for level in range(1100):
        os.symlink(tmp_path / "precious", "link", dir_fd=fd)
        os.close(openat.create_file("file", dir_fd=fd))
        below = openat.make_directory(f"level-{level}", dir_fd=fd, mode=0o700)
        os.close(fd)
        fd = below
    os.close(fd)
    openat.remove_tree("doomed", dir_fd=top)
    assert os.listdir(top) == []
    assert (tmp_path / "precious" / "file").read_text() == "data"


def test_removing_a_link_leaves_its_target(tmp_path: Path, top: int) -> None:
    (tmp_path / "target").mkdir()
    os.symlink(tmp_path / "target", "link", dir_fd=top)
    openat.remove_tree("link", dir_fd=top)
    openat.remove_tree("missing", dir_fd=top)
    assert os.listdir(top) == []
    assert (tmp_path / "target").is_dir()


def test_wide_trees_are_removed(top: int) -> None:
    for outer in range(10):
        for inner in range(10):
            os.makedirs(f"/proc/self/fd/{top}/doomed/{outer}/{inner}/leaf")
    openat.remove_tree("doomed", dir_fd=top)
    assert os.listdir(top) == []


@pytest.mark.fault("S7")
@pytest.mark.parametrize("where", ["doomed", "doomed/inner"])
def test_one_pass_over_a_directory_that_never_ends_is_limited(
    top: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that made a directory may add entries to it as fast as they are removed."""
    monkeypatch.setattr(openat, "REMOVED_ENTRIES_MAX", 10)
    os.makedirs(f"/proc/self/fd/{top}/{where}")
    for number in range(100):
        open(f"/proc/self/fd/{top}/{where}/{number}", "w").close()
    with pytest.raises(OSError, match="more than 10 entries"):
        openat.remove_tree("doomed", dir_fd=top)
    assert len(os.listdir(f"/proc/self/fd/{top}/{where}")) >= 90
