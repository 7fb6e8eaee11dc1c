# SPDX-License-Identifier: Apache-2.0
"""A key-value store of the living ranks of one VM: files in a directory that all of them can reach.

It needs no process.  The job's own store may have ended with the lost rank, or with its VM.
"""

from __future__ import annotations

import contextlib
import os
import secrets

from swansong import openat

STORE_PREFIX = ".survivors."
"""Beginning of the names of these directories in staging."""
_VALUE_BYTES_MAX = 2**20


class DirectoryStore:
    """See :class:`swansong._ranks.job_store.JobStore`.

    Needs a file system with hard links.

    Args:
        parent: directory of this user and its group.
        name: of the store, new or existing.
    """

    def __init__(self, parent: str, name: str) -> None:
        with openat.held(openat.open_directory(parent)) as parent_fd:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent_fd)
            self._fd = openat.open_directory(name, dir_fd=parent_fd, owners={os.geteuid()})

    def set(self, key: str, value: str) -> None:
        openat.replace_file(_name(key), value.encode(), dir_fd=self._fd, durable=False)

    def get(self, key: str) -> bytes:
        # A new key has two names for a moment, which openat.read_file refuses.
        with openat.held(os.open(_name(key), openat.FILE, dir_fd=self._fd)) as fd:
            facts = os.fstat(fd)
            if facts.st_uid != os.geteuid() or facts.st_size > _VALUE_BYTES_MAX:
                raise openat.UnsafeFileError(key, "has another owner, or is too large")
            return os.read(fd, _VALUE_BYTES_MAX)

    def add(self, key: str, amount: int) -> int:
        for _ in range(amount):
            self.set(f"{key}.{secrets.token_hex(8)}", "")
        own = f"{_name(key)}."
        return sum(each.startswith(own) for each in os.listdir(self._fd))

    def check(self, keys: list[str]) -> bool:
        return set(map(_name, keys)).issubset(os.listdir(self._fd))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that does not exist; ``expected`` must be empty."""
        assert not expected
        new = f"{secrets.token_hex(8)}.new"
        self.set(new, desired)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(new, _name(key), src_dir_fd=self._fd, dst_dir_fd=self._fd)
        finally:
            with contextlib.suppress(FileNotFoundError):  # a new start has removed it
                os.unlink(new, dir_fd=self._fd)
        return self.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


def _name(key: str) -> str:
    return key.replace("/", "+")
