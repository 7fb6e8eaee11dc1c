# SPDX-License-Identifier: Apache-2.0
"""Runs a function as another user, in another process, for tests about permissions."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swansong import openat

from testkit.forked import forked

DAEMON, TRAINER, MEMBER, OUTSIDER = 12001, 12002, 12003, 12004
GROUP = 12100
"""The group of the daemon, the trainer and the member, but not of the outsider."""


def as_user(uid: int, function: Callable[[], Any], *, groups: tuple[int, ...] = (GROUP,)) -> Any:
    """The result of ``function`` as that user, as JSON; an exception becomes ``"ErrorType: message"``.

    The function runs in a fork, because the interpreter may be readable only for root.  It can use only
    modules that are imported already.
    """

    def run() -> Any:
        os.setgroups(groups)
        os.setresgid(*(groups[:1] or (uid,)) * 3)
        os.setresuid(uid, uid, uid)
        try:
            return function()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return forked(run)


@contextmanager
def place_for_all(uid: int, *, mode: int = 0o755) -> Iterator[Path]:
    """A directory of that user that other users can reach; pytest's are below one of mode 0700."""
    path = Path(tempfile.mkdtemp(prefix="swansong-rights-"))
    try:
        os.chown(path, uid, GROUP)
        path.chmod(mode)
        yield path
    finally:
        parent_fd = openat.open_directory(path.parent)
        openat.remove_tree(path.name, dir_fd=parent_fd)  # of any depth
        os.close(parent_fd)
