# SPDX-License-Identifier: Apache-2.0
"""Files on this machine in place of bytes from the store, on an XFS that shares blocks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import committed
from tests.conftest import DOES_NOT_APPLY
from tests.unit.restore import test_local_files
from tests.unit.restore.test_local_files import Vm

SIZE_BYTES = 16 << 20
CHUNK_BYTES = 1 << 20
DISK_BYTES = 320 << 20
"""The smallest XFS has 300 MiB.  The file behind it is sparse."""


def run(*command: object) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{words}: {done.stderr}"


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    """The root of an empty file system."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for a loop device")
    if missing := [tool for tool in ("losetup", "mkfs.xfs") if not shutil.which(tool)]:
        pytest.skip(f"needs {', '.join(missing)}")
    image, root = tmp_path / "image", tmp_path / "xfs"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    run("mkfs.xfs", "-q", "-m", "reflink=1", image)
    root.mkdir()
    mount = ["mount", "-o", "loop", str(image), str(root)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=60)
    if "unknown filesystem" in done.stderr:
        pytest.skip(f"{DOES_NOT_APPLY}: the kernel has no XFS")
    assert done.returncode == 0, done.stderr
    yield root
    run("umount", "--lazy", root)


def used_bytes(root: Path) -> int:
    run("sync", "--file-system", root)
    space = os.statvfs(root)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def test_a_local_file_costs_no_second_copy(xfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restored file shares the blocks of the staged one, and a later change of that one stays there."""
    files = {"model.bin": os.urandom(SIZE_BYTES + 5)}
    monkeypatch.setattr(test_local_files, "FILES", files)
    vm = Vm(xfs)
    ref = committed.commit(
        vm.store, vm.content, step=100, nonce="a100", chunk_bytes=CHUNK_BYTES
    ).ref
    before = used_bytes(xfs)
    result = vm.fetch(ref)
    assert result.local_bytes == result.size_bytes > SIZE_BYTES
    assert not vm.store.given
    assert used_bytes(xfs) - before < SIZE_BYTES // 8
    assert committed.tree(result.path) == vm.content
    with open(vm.set / "rank-00000/model.bin", "r+b") as file:
        file.write(b"another")
    assert committed.tree(result.path) == vm.content
