# SPDX-License-Identifier: Apache-2.0
"""Writes small files of the daemon's own so that a crash leaves the old content or the new one."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Replace the content of ``path``: temporary file, fsync, rename, fsync of the directory.

    Raises:
        OSError: it could not be written; the old content stands.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)
