# SPDX-License-Identifier: Apache-2.0
"""The users of one VM as real processes: daemon, trainer, another member of the trainers' group, outsider."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import swansong

from testkit import REPOSITORY
from testkit.warm import python_of

DAEMON, TRAINER, MEMBER, OUTSIDER = 12000, 12001, 12002, 12003
GROUP = 12100
"""Group of the trainers."""
OUTSIDERS = 12103
HOOKS = Path(swansong.__file__).parents[1]

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, for other users, mounts or namespaces"
)

_PRELUDE = """
import errno, json, os, shutil, socket, stat, sys, tempfile, threading
from pathlib import Path
from swansong import layout, openat
from swansong._checkpoint.staging import finish, remove_leftovers, write_checkpoint
from swansong.layout import RankManifest
from swansong.rank_files import Bundle
from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import Counter

uid, gid, arguments = json.loads(sys.argv[1])
os.setgroups([gid])
os.setgid(gid)
os.setuid(uid)

def show(value):
    print(json.dumps(value), flush=True)

def wait():
    return json.loads(sys.stdin.readline())
"""


class UserProcess:
    """A process of another user, which runs ``_PRELUDE`` and then ``script``.

    The prelude imports the modules before it drops root, because only root may be able to read them.
    """

    def __init__(self, script: str, *arguments: Any, uid: int, gid: int = GROUP) -> None:
        python = python_of(os.environ["SWANSONG_TEST_WARM"], "torch")
        self.process = subprocess.Popen(
            [python, "-c", _PRELUDE + script, json.dumps([uid, gid, arguments])],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HOOKS, REPOSITORY)))},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def shown(self) -> Any:
        """Return the next value that the process shows."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return json.loads(line)

    def tell(self, value: Any = None) -> None:
        """Send a value to the process, which waits for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def ask(self, value: Any = None) -> Any:
        """Send a value to the process, and return the next value that it shows."""
        self.tell(value)
        return self.shown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        # The warm Python kills the script, which must not see the end of its input before.
        assert self.process.stdout is not None
        self.process.stdout.read()
        self.process.communicate()


def run_as(script: str, *arguments: Any, uid: int, gid: int = GROUP) -> Any:
    """Run a script as another user, and return the value that it shows."""
    with UserProcess(script, *arguments, uid=uid, gid=gid) as process:
        return process.shown()


@contextmanager
def reachable_directory() -> Iterator[Path]:
    """A temporary directory that all users may enter, unlike ``tmp_path``."""
    directory = Path(tempfile.mkdtemp(prefix="swansong-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def make_run_directory(path: Path, *, has_acl: bool) -> Path:
    """Create the staging directory of a run as the daemon does, with or without a default ACL."""
    path.mkdir()
    os.chown(path, DAEMON, GROUP)
    path.chmod(0o3770)
    if has_acl:
        no_id = 0xFFFFFFFF
        entries = (
            (0x01, 7, no_id),  # owner: rwx
            (0x02, 7, DAEMON),  # the daemon: rwx
            (0x04, 5, no_id),  # group: r-x
            (0x10, 7, no_id),  # mask: rwx
            (0x20, 0, no_id),  # others: none
        )
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        try:
            os.setxattr(path, "system.posix_acl_default", acl)
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            pytest.skip("the file system of the temporary directory has no ACLs")
    return path
