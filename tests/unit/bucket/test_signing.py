# SPDX-License-Identifier: Apache-2.0
"""The signing key: its location, its permissions and its size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from swansongd.bucket import signing
from swansongd.errors import ConfigError

KEY = bytes(range(64))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "signing.key"
    path.write_bytes(KEY)
    path.chmod(0o400)
    return path


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        signing.load(path, owners={0, os.geteuid()})
    (line,) = caught.value.problems
    assert line.startswith("store.signing_key_file: ")
    assert str(path) in line
    assert "; " in line, "names the fix"
    assert "\x00\x01\x02" not in line
    return line


def test_all_bytes_of_the_file_are_the_key(key_file: Path) -> None:
    assert signing.load(key_file, owners={0, os.geteuid()}).key == KEY
    assert signing.load(key_file, owners=None).key == KEY


@pytest.mark.fault("S25")
@pytest.mark.parametrize("mode", [0o440, 0o404, 0o620, 0o602, 0o401])
def test_a_key_with_rights_for_others_is_refused(key_file: Path, mode: int) -> None:
    """Readable, writable or executable for group or others."""
    key_file.chmod(mode)
    assert f"has mode {mode:04o}; keep it private: chmod 0400" in problem(key_file)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_key_of_another_user_is_refused(key_file: Path) -> None:
    """Its owner could replace it."""
    os.chown(key_file, 65534, 65534)
    assert "belongs to user id 65534" in problem(key_file)


@pytest.mark.parametrize("size_bytes", [0, 1, signing.KEY_BYTES_MIN - 1, signing.KEY_BYTES_MAX + 1])
def test_a_key_of_the_wrong_size_is_refused(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(b"k" * size_bytes)
    assert "bytes, not 32 to 4096" in problem(path)


@pytest.mark.fault("S1", "S4")
def test_only_a_regular_file_is_accepted(key_file: Path, tmp_path: Path) -> None:
    """A link, a FIFO, a directory or a missing file is refused without waiting."""
    link, fifo, directory = tmp_path / "link", tmp_path / "fifo", tmp_path / "directory"
    link.symlink_to(key_file)
    os.mkfifo(fifo, 0o600)
    directory.mkdir(0o700)
    for path in (link, fifo, directory, tmp_path / "missing", tmp_path / "no" / "directory"):
        assert "cannot be used" in problem(path)
