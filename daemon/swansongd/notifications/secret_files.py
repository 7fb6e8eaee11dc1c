# SPDX-License-Identifier: Apache-2.0
"""Reads the files with secrets: addresses and tokens.  They are read again for each request."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from swansong import openat
from swansong_bucket.config.values import InvalidValue
from swansong_bucket.errors import SwansongError

from swansongd.config import notify

_BYTES_MAX = 4096
_CREDENTIAL = "credential:"


class UnusableSecret(SwansongError):
    """A secret cannot be read, or is not private.  The message does not contain the secret."""

    exit_code = 2


def address(url: str | None, file: str | None, *, allow_http: bool) -> str:
    """The address from the configuration, or from its file.

    Raises:
        UnusableSecret: the file cannot be used, or contains no address.
    """
    if file is None:
        assert url is not None
        return url
    try:
        found = notify.url(read(file))
    except InvalidValue as error:
        raise UnusableSecret(f"the address in {file} {error.problem}", hint=error.remedy) from None
    if not allow_http and not notify.is_encrypted_or_local(found):
        raise UnusableSecret(
            f"the address in {file} would send without encryption",
            hint="Use https, or set notify.allow_http",
        )
    return found


def token(file: str) -> str:
    """The token in the file: printable ASCII without spaces.

    Raises:
        UnusableSecret: the file cannot be used, or contains no token.
    """
    found = read(file)
    if not found or not found.isascii() or not found.isprintable() or " " in found:
        raise UnusableSecret(f"{file} contains no token", hint="Write the token into one line")
    return found


def read(file: str) -> str:
    """The text of a secret file, without white space around it.

    Raises:
        UnusableSecret: it cannot be read, has over 4 KiB, or other users may read it.
    """
    path, is_private = _path(file)
    try:
        with openat.held(openat.open_directory(os.path.realpath(path.parent))) as directory_fd:
            fd = openat.open_file(path.name, dir_fd=directory_fd, owners={0, os.geteuid()})
        with os.fdopen(fd, "rb") as opened:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            data = opened.read(_BYTES_MAX + 1)
    except OSError as error:
        raise UnusableSecret(
            f"{file} cannot be read: {error.strerror}",
            hint=f"Let only the daemon's user read it: chown swansong {path}; chmod 0400 {path}",
        ) from None
    if mode & 0o077 and not is_private:
        raise UnusableSecret(
            f"{file} has mode {mode:04o}: other users may read it", hint=f"chmod 0400 {path}"
        )
    if len(data) > _BYTES_MAX:
        raise UnusableSecret(f"{file} has over {_BYTES_MAX} bytes", hint="Keep only the secret")
    return data.decode(errors="replace").strip()


def _path(file: str) -> tuple[Path, bool]:
    """The path, and whether systemd keeps other users away from it."""
    if not file.startswith(_CREDENTIAL):
        return Path(file), False
    name = file.removeprefix(_CREDENTIAL)
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        raise UnusableSecret(
            f"{file} is not there: the unit has no LoadCredential=",
            hint=f"Add a drop-in with LoadCredential={name}:FILE",
        )
    return Path(directory, name), True
