# SPDX-License-Identifier: Apache-2.0
"""A small file has the old content or the new one, wherever the writer dies."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from swansong import openat

from testkit.python_process import output_of

OLD, NEW = b"old", b"the new content"

_KILLED_EVERYWHERE = """
import json, os, signal, sys
from pathlib import Path
from swansong import openat

NAMES = ("open", "fchmod", "write", "fsync", "close", "rename")
real = {name: getattr(os, name) for name in NAMES}

def child(path, strike, after):
    calls = 0
    directory_fd = openat.open_directory(path.parent)
    def struck(name):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == strike:
                if name == "write":  # half of the bytes are written
                    real["write"](arguments[0], bytes(arguments[1])[: 7 if after else 0])
                elif after:
                    real[name](*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*arguments, **options)
        return call
    for name in NAMES:
        setattr(os, name, struck(name))
    openat.replace_file(path.name, b"the new content", dir_fd=directory_fd)
    os._exit(0)

found = []
directory = Path(sys.argv[1])
for strike in range(1, 100):
    codes = []
    for after in (False, True):
        path = directory / f"{strike}-{after}.json"
        path.write_bytes(b"old")
        pid = os.fork()
        if pid == 0:
            child(path, strike, after)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        found.append([strike, after, codes[-1], path.read_text()])
    if codes == [0, 0]:
        break
print(json.dumps(found))
"""

_FULL = """
import json, resource, signal, sys
from pathlib import Path
from swansong import openat

resource.setrlimit(resource.RLIMIT_FSIZE, (7, 7))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
try:
    openat.replace_file(path.name, b"the new content", dir_fd=openat.open_directory(path.parent))
except OSError as error:
    sys.stdout.write(str(error.errno))
"""


def write(path: Path, data: bytes) -> None:
    directory_fd = openat.open_directory(path.parent)
    try:
        openat.replace_file(path.name, data, dir_fd=directory_fd)
    finally:
        os.close(directory_fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the old content."""
    made = tmp_path / "claim.json"
    made.write_bytes(OLD)
    return made


@pytest.mark.fault("D05")
def test_a_killed_writer_leaves_the_old_content_or_the_new(tmp_path: Path) -> None:
    """A real process dies before and after each system call; the content changes at the rename, once."""
    found = json.loads(output_of("-c", _KILLED_EVERYWHERE, tmp_path))
    killed = [content for _, _, code, content in found if code == -9]
    assert len(killed) >= 14, (
        "struck at open, fchmod, write, fsync, close, rename, and fsync of the directory"
    )
    assert set(killed) == {OLD.decode(), NEW.decode()}
    assert killed == sorted(killed), "once it is new it does not become old again"
    assert [content for *_, code, content in found if code == 0] == [NEW.decode()] * 2


def test_the_new_content_is_read(path: Path) -> None:
    """Replaced completely, readable for its owner only, without a temporary file."""
    write(path, NEW)
    assert path.read_bytes() == NEW
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.fault("D02")
def test_a_full_disk_keeps_the_old_content(path: Path) -> None:
    """The kernel writes half of the bytes and then fails: an error, and no temporary file."""
    assert output_of("-c", _FULL, path) == str(errno.EFBIG)
    assert path.read_bytes() == OLD
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.fault("D04")
def test_a_failed_fsync_keeps_the_old_content(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content that may not be on the disk does not replace the old content."""

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        write(path, NEW)
    assert path.read_bytes() == OLD
    assert os.listdir(path.parent) == [path.name]


def test_the_data_is_synced_before_the_name_and_the_name_after(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order a power cut does no harm."""
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(fd: int) -> None:
        calls.append("directory" if os.path.isdir(f"/proc/self/fd/{fd}") else "data")
        fsync(fd)

    def noted_rename(source: str, destination: str, **options: int) -> None:
        calls.append("rename")
        rename(source, destination, **options)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    write(path, NEW)
    assert calls == ["data", "rename", "directory"]
