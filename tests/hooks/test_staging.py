# SPDX-License-Identifier: Apache-2.0
"""How a rank's files become final: where they are written, and when they move to where they stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from swansong._staging import finish, remove_leftovers, write_checkpoint
from swansong.protocol import RankManifest

MANIFEST = RankManifest(run="r", step=3, kind="emergency", files=[], request_id="q")
PARTIAL = "step-000000000003.n.partial"


def tree(directory: Path) -> set[str]:
    """Paths of all files below."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_what_is_finished_is_final_and_the_rest_is_not(tmp_path: Path) -> None:
    """In mid-save only a finished file has its final name, and the rank has said what it is writing."""

    def save(directory: Path) -> None:
        (directory / "layers").mkdir()
        (directory / "layers" / "0.bin").write_bytes(b"0")
        (directory / "index").write_bytes(b"not yet")
        finish(directory / "layers" / "0.bin")
        assert tree(tmp_path / PARTIAL) == {
            "rank-00000.begun",
            "rank-00000.writing/index",
            "rank-00000/layers/0.bin",
        }
        begun = RankManifest.decode((tmp_path / PARTIAL / "rank-00000.begun").read_bytes())
        assert begun == MANIFEST
        (directory / "index").write_bytes(b"now")

    written = write_checkpoint(str(tmp_path), "n", MANIFEST, save, durable=False)
    assert written.is_sealed
    assert written.size_bytes == 4
    sealed = tmp_path / written.directory
    assert tree(sealed) == {"rank-00000.json", "rank-00000/layers/0.bin", "rank-00000/index"}
    assert sorted(path.name for path in sealed.iterdir()) == ["rank-00000", "rank-00000.json"]
    manifest = RankManifest.decode((sealed / "rank-00000.json").read_bytes())
    assert [(file.path, file.size_bytes) for file in manifest.files] == [
        ("rank-00000/index", 3),
        ("rank-00000/layers/0.bin", 1),
    ]


def test_moving_leaves_the_file_what_it_was(tmp_path: Path) -> None:
    """The daemon knows a file again by inode, size and time: what was stored early is not sent twice."""
    seen: list[os.stat_result] = []

    def save(directory: Path) -> None:
        (directory / "a").write_bytes(b"a")
        finish(directory / "a")
        seen.append((tmp_path / PARTIAL / "rank-00000" / "a").stat())

    written = write_checkpoint(str(tmp_path), "n", MANIFEST, save, durable=True)
    after = (tmp_path / written.directory / "rank-00000" / "a").stat()
    (before,) = seen
    assert (before.st_ino, before.st_size, before.st_mtime_ns, before.st_mode) == (
        (after.st_ino, after.st_size, after.st_mtime_ns, after.st_mode)
    )


def test_outside_of_a_save_nothing_moves(tmp_path: Path) -> None:
    """A save function may be called with any directory, by a test for example."""
    (tmp_path / "a").write_bytes(b"a")
    finish(tmp_path / "a")
    assert tree(tmp_path) == {"a"}


@pytest.mark.parametrize("bad", ["link", "name"])
def test_what_may_not_be_uploaded_fails_the_save(tmp_path: Path, bad: str) -> None:
    """Links and odd names are refused when they are finished, and the set leaves no trace."""

    def save(directory: Path) -> None:
        if bad == "link":
            (directory / "a").symlink_to("/etc/passwd")
        else:
            (directory / "a\n").write_bytes(b"")

    with pytest.raises(ValueError, match=r"no regular file|not allowed"):
        write_checkpoint(str(tmp_path), "n", MANIFEST, save, durable=False)
    assert tree(tmp_path) == set()


@pytest.mark.fault("D12")
def test_a_new_incarnation_removes_what_its_last_one_left(tmp_path: Path) -> None:
    """Everything of that rank goes, finished or not, and other ranks' files stay."""
    partial = tmp_path / PARTIAL
    for directory in ("rank-00000.writing", "rank-00000", "rank-00001"):
        (partial / directory).mkdir(parents=True)
        (partial / directory / "a").write_bytes(b"a")
    (partial / "rank-00000.begun").write_bytes(MANIFEST.encode())
    remove_leftovers(str(tmp_path), 0)
    assert tree(partial) == {"rank-00001/a"}
    remove_leftovers(str(tmp_path), 1)
    assert not partial.exists()
