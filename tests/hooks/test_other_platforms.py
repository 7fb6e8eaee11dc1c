# SPDX-License-Identifier: Apache-2.0
"""A script with the hooks also runs where there is no daemon: on macOS and on Windows.

The names that these systems lack are removed from a Python on Linux.
"""

from __future__ import annotations

import sys

import pytest

from testkit.python_process import run_python

REMOVED = """
import inspect, json, logging, mmap, os, random, secrets, select, signal, socket, sys, time
import struct, tempfile, threading, weakref, zlib
{imports}
LACKS = {lacks!r}
for name in LACKS:
    module, _, attribute = name.partition(".")
    if not attribute:
        sys.modules[module] = None  # an import of it raises
    elif hasattr(sys.modules[module], attribute):
        delattr(sys.modules[module], attribute)
sys.platform = {platform!r}
"""
LINUX_ONLY = [
    *("os.memfd_create", "os.pidfd_open", "os.pipe2", "os.sched_getaffinity", "os.getxattr"),
    *("os.posix_fallocate", "os.posix_fadvise", "mmap.MADV_HUGEPAGE", "mmap.MADV_POPULATE_WRITE"),
    *("signal.pidfd_send_signal", "socket.MSG_CMSG_CLOEXEC", "socket.SO_PEERCRED"),
    *("socket.SOCK_CLOEXEC", "time.CLOCK_BOOTTIME"),
]
UNIX_ONLY = [
    *("pwd", "grp", "fcntl", "resource", "termios"),
    *("os.O_CLOEXEC", "os.O_DIRECTORY", "os.O_NOFOLLOW", "os.O_NONBLOCK", "os.fchmod", "os.fork"),
    *("os.geteuid", "os.getuid", "os.killpg", "os.register_at_fork", "os.statvfs", "os.sysconf"),
    *(
        "os.preadv",
        "os.pwritev",
        "os.mkfifo",
        "os.getpgid",
        "mmap.MAP_PRIVATE",
        "mmap.MAP_ANONYMOUS",
    ),
    *("select.poll", "signal.SIGUSR1", "signal.SIGKILL", "signal.pthread_sigmask"),
    *("socket.AF_UNIX", "socket.SCM_RIGHTS", "socket.CMSG_LEN", "socket.SOCK_SEQPACKET"),
]
PLAIN = """
objects = {"counts": {"seen": [0]}}
"""
TORCH = """
model = torch.nn.Linear(2, 1)
objects = {"model": model, "loader": ResumableLoader(DataLoader(torch.zeros(8, 2)))}
"""
TRAINS = """
guard = swansong.attach(objects)
for step in range(guard.restore(), 3):
    guard.step(step + 1, loss=0.5)
assert not guard.save(3)
assert not guard.finish()
print("trained")
"""


@pytest.mark.parametrize(
    ("platform", "lacks", "imports", "objects"),
    [
        ("win32", LINUX_ONLY + UNIX_ONLY, "", PLAIN),
        ("darwin", LINUX_ONLY, "import numpy, torch, torch.utils.data", TORCH),
    ],
)
def test_a_script_trains_without_a_daemon(
    warm_python: str, platform: str, lacks: list[str], imports: str, objects: str
) -> None:
    """No call raises, and the log is as quiet as on Linux without a daemon."""
    hooks = "import swansong\n"
    if imports:
        hooks += (
            "from torch.utils.data import DataLoader\nfrom swansong.torch import ResumableLoader\n"
        )
    script = REMOVED.format(imports=imports, lacks=lacks, platform=platform)
    python = warm_python if imports else sys.executable
    done = run_python("-c", script + hooks + objects + TRAINS, python=python)
    assert (done.stdout, done.stderr) == ("trained\n", ""), done.stderr
