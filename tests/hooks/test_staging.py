# SPDX-License-Identifier: Apache-2.0
"""How a rank's files become final: they are written in one directory, and then move to another."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from swansong import bounds
from swansong._checkpoint.staging import _name_of, finish, remove_leftovers, write_checkpoint
from swansong.layout import RankManifest

from testkit.overlay import overlay
from testkit.python_process import output_of

MANIFEST = RankManifest(run="r", step=3, kind="emergency", files=[], request_id="q")
PARTIAL = "step-000000000003.n.partial"


def tree(directory: Path) -> set[str]:
    """Return the paths of all files below a directory."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_only_finished_files_have_their_final_name(tmp_path: Path) -> None:
    """During a save, the manifest without files is there, and other files are in the writing directory."""

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

    written = write_checkpoint(str(tmp_path), "n", MANIFEST, save)
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


def test_a_rank_finds_the_name_that_another_rank_gave_to_their_set(tmp_path: Path) -> None:
    """Also on overlayfs, where the entry of a directory has another inode than the directory."""
    with overlay(tmp_path) as run, contextlib.ExitStack() as opened:
        for step in (2, 3):
            (run / f"step-{step:012}.n").mkdir()
        set_fd, run_fd = (os.open(each, os.O_RDONLY) for each in (run / "step-000000000003.n", run))
        opened.callback(os.close, set_fd)
        opened.callback(os.close, run_fd)
        assert _name_of(set_fd, run_fd) == "step-000000000003.n"


def test_moving_changes_no_file(tmp_path: Path) -> None:
    """The daemon recognises a file by inode, size and time, so an early shard is not uploaded twice."""
    seen: list[os.stat_result] = []

    def save(directory: Path) -> None:
        (directory / "a").write_bytes(b"a")
        finish(directory / "a")
        seen.append((tmp_path / PARTIAL / "rank-00000" / "a").stat())

    written = write_checkpoint(str(tmp_path), "n", MANIFEST, save)
    after = (tmp_path / written.directory / "rank-00000" / "a").stat()
    (before,) = seen
    assert (before.st_ino, before.st_size, before.st_mtime_ns, before.st_mode) == (
        (after.st_ino, after.st_size, after.st_mtime_ns, after.st_mode)
    )


def test_outside_of_a_save_nothing_moves(tmp_path: Path) -> None:
    """A save function may be called with any directory, for example in a test."""
    (tmp_path / "a").write_bytes(b"a")
    finish(tmp_path / "a")
    assert tree(tmp_path) == {"a"}


def link_to_a_file(directory: Path) -> None:
    (directory / "a").symlink_to("/etc/passwd")


def link_to_a_directory(directory: Path) -> None:
    (directory / "a").symlink_to("/etc")


def hard_link(directory: Path) -> None:
    (directory / "a").write_bytes(b"a")
    os.link(directory / "a", directory.parent / "b")


def fifo(directory: Path) -> None:
    os.mkfifo(directory / "a")


def odd_name(directory: Path) -> None:
    (directory / "a\n").write_bytes(b"")


def deep_directory(directory: Path) -> None:
    directory.joinpath(*("d" * 20)).mkdir(parents=True)


@pytest.mark.fault("S1", "S3", "S4", "S6")
@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (link_to_a_file, "not a regular file"),
        (link_to_a_directory, "not a regular file"),
        (hard_link, "not a regular file"),
        (fifo, "not a regular file"),
        (odd_name, "not allowed"),
        (deep_directory, "17 levels; the limit is 16"),
    ],
)
def test_a_file_that_may_not_be_uploaded_fails_the_save(
    tmp_path: Path, put: Callable[[Path], None], reason: str
) -> None:
    """finish() refuses links and invalid names, and the partial set is removed."""
    with pytest.raises(ValueError, match=reason):
        write_checkpoint(str(tmp_path), "n", MANIFEST, put)
    assert list(tmp_path.iterdir()) == []


def test_a_step_with_too_many_digits_fails_the_save(tmp_path: Path) -> None:
    """The daemon would neither commit nor delete the set: its name is not one of a set."""
    manifest = replace(MANIFEST, step=bounds.STEP_MAX + 1)
    with pytest.raises(ValueError, match="step is 1000000000000, not an integer"):
        write_checkpoint(str(tmp_path), "n", manifest, lambda _: None)
    assert list(tmp_path.iterdir()) == []


# Before the n-th file operation of finish(), the file and its directory become links to a secret file and its
# directory; for n = 1, 2, ... until finish() needs no further operation.
SWAPS = """
import os, sys
from pathlib import Path
from swansong._checkpoint.staging import finish, write_checkpoint
from swansong.layout import RankManifest

root, what = Path(sys.argv[1]), sys.argv[2]
left, at = 0, Path()

def audit(event, arguments):
    global left
    if left > 0 and (event == "open" or event.startswith("os.")):
        left -= 1
        if left == 0:
            swapped = at if what == "file" else at.parent
            swapped.rename(at.parent.parent / "aside")
            swapped.symlink_to(root / "home" / swapped.name)

def save(directory):
    global left, at
    at = directory / "layers" / "key"
    at.parent.mkdir()
    at.write_bytes(b"model")
    left = n
    try:
        finish(at)
    finally:
        is_over, left = left > 0, 0
    if is_over:
        raise StopIteration

sys.addaudithook(audit)
n, is_over = 0, False
while not is_over:
    n += 1
    staging = root / f"{n:04d}"
    staging.mkdir()
    manifest = RankManifest(run="r", step=3, kind="final", files=[])
    try:
        write_checkpoint(str(staging), "n", manifest, save)
    except StopIteration:
        is_over = True
    except (OSError, ValueError):
        pass
print(n)
"""


@pytest.mark.fault("S2")
@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_link_that_replaces_a_file_is_not_followed(tmp_path: Path, what: str) -> None:
    """At each operation, a file or directory may become a link: the target is unchanged."""
    home = tmp_path / "home" / "layers"
    home.mkdir(parents=True)
    home.parent.chmod(0o700)
    secrets = [home / "key", home.parent / "key"]
    for secret in secrets:
        secret.write_text("secret")
        secret.chmod(0o600)
    assert int(output_of("-c", SWAPS, tmp_path, what)) > 3
    for secret in secrets:
        assert secret.read_text() == "secret"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert tree(tmp_path / "home") == {"key", "layers/key"}
    staged = [path for path in tmp_path.rglob("step-*/**/*") if path.is_file()]
    assert not any(path.read_bytes() == b"secret" for path in staged)


@pytest.mark.fault("D12")
def test_a_restarted_rank_removes_its_leftovers(tmp_path: Path) -> None:
    """All files of that rank are removed, finished or not, and other ranks' files stay."""
    partial = tmp_path / PARTIAL
    for directory in ("rank-00000.writing", "rank-00000", "rank-00001"):
        (partial / directory).mkdir(parents=True)
        (partial / directory / "a").write_bytes(b"a")
    (partial / "rank-00000.begun").write_bytes(MANIFEST.encode())
    remove_leftovers(str(tmp_path), 0)
    assert tree(partial) == {"rank-00001/a"}
    remove_leftovers(str(tmp_path), 1)
    assert not partial.exists()
