# SPDX-License-Identifier: Apache-2.0
"""The job's own key-value store, through which ranks on several VMs reach each other.

The store is a ``torch.distributed.TCPStore``, which torchrun or rank 0 serves.  Swansong opens no other
connection between the VMs and takes part in no collective.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any, Protocol

from swansong import openat
from swansong._log import log
from swansong._ranks.agreement import Ranks

STORE_PREFIX = ".survivors."
"""Beginning of the names of directories in staging for :func:`open_vm_store`."""
POLL_S = 0.05
"""Interval of polls that are not urgent.  One check takes about 0.1 ms.  A blocking wait inside the store
would make torch write a warning to the trainer's output at each timeout."""
_CONNECT_LIMIT_S = 30.0


class JobStore(Protocol):
    """The methods that Swansong uses of a ``torch.distributed`` store.  One connection serves one thread."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


def open_job_store(limit_s: float = _CONNECT_LIMIT_S) -> JobStore:
    """Open a new connection to the store at MASTER_ADDR and MASTER_PORT.

    Without these variables, to that of the process group.

    Raises:
        Exception: no store answers there yet, or torch is not installed.
    """
    from torch.distributed import PrefixStore, TCPStore  # noqa: PLC0415 - only jobs that have torch

    if "MASTER_ADDR" in os.environ:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    else:
        of_group: Any = store_of_group()
        while isinstance(of_group, PrefixStore):
            of_group = of_group.underlying_store
        if not isinstance(of_group, TCPStore):
            raise ConnectionError("no store has an address; set MASTER_ADDR and MASTER_PORT")
        host, port = of_group.host, of_group.port
    store = TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=limit_s),
    )
    found: JobStore = PrefixStore("swansong", store)
    return found


def open_vm_store(parent: str, name: str, limit_s: float) -> JobStore:
    """Open a store of the living ranks of this VM, which needs no process: a file in a directory.

    Args:
        parent: directory of this user and its group.
        name: of the directory, new or existing.
        limit_s: longest wait for the file, in seconds.

    Raises:
        OSError: the directory belongs to another user, or the file system returned an error.
    """
    from torch.distributed import FileStore  # noqa: PLC0415 - only jobs that have torch

    with openat.held(openat.open_directory(parent)) as parent_fd:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent_fd)
        fd = openat.open_directory(name, dir_fd=parent_fd, owners={os.geteuid()})
    # By its descriptor, because members of the group can replace the directory.
    store: JobStore = FileStore(f"/proc/self/fd/{fd}/store")
    store.set_timeout(timedelta(seconds=limit_s))  # type: ignore[attr-defined]
    return store


def store_of_group() -> JobStore:
    """Return the store of the process group.

    Raises:
        Exception: no process group exists, or torch is not installed.
    """
    from torch.distributed import distributed_c10d  # noqa: PLC0415 - only jobs that have torch

    store: JobStore = distributed_c10d._get_default_store()  # noqa: SLF001 - it has no public name
    return store


def wait_for_key(
    store: JobStore,
    key: str,
    stop: threading.Event,
    *,
    every_s: float,
    limit_s: float = float("inf"),
) -> bool:
    """Poll the store until it contains a key.

    Args:
        store: connection of this thread.
        key: name of the key.
        stop: ends the wait.
        every_s: interval of the polls, in seconds.
        limit_s: longest wait, in seconds.

    Returns:
        False if the limit passed or ``stop`` was set before the key appeared.
    """
    give_up_mono_s = time.monotonic() + limit_s
    left_s = limit_s
    while not store.check([key]):  # at least once after the limit has passed
        if left_s <= 0 or stop.wait(min(every_s, left_s)):
            return False
        left_s = give_up_mono_s - time.monotonic()
    return True


def warn_about_shared_store(ranks: Ranks) -> None:
    """Warn, once for each VM, if restarts of this torchrun job share one store.

    The agents of torch 2.13 share the store of their rendezvous with the ranks.  After a restart, gloo may
    find the address of an earlier process in it, and that restart fails.  When a VM returns to a job that has
    shrunk, the agent on the surviving VM fails at that store, and the job ends.
    """
    is_elastic = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")
    shares = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if ranks.nodes > 1 and ranks.local_rank == 0 and is_elastic and shares:
        log.warning(
            "torchrun shares its store with the ranks: a restart may fail with 'Connection refused', and once"
            " the job has shrunk, no VM can join it again; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the"
            " environment of torchrun on every VM"
        )


def first_line(error: BaseException) -> str:
    """Type and message of an error on one line of at most 300 characters."""
    text = f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:300]
