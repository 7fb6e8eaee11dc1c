# SPDX-License-Identifier: Apache-2.0
"""Finds the position of this process in its job, and compares it with ``torch.distributed``.

An initialised ``torch.distributed`` is right about rank and number of ranks.  Its ranks exchange the rest
through the store of the process group: which of them share a VM and, on one VM, the id of the start.  The
exchange is no collective, so it needs no GPU and disturbs no other communication.  A rank that does not call
``attach()`` is found here, and not in a checkpoint that is never complete.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swansong._log import log
from swansong._ranks.agreement import Ranks
from swansong._ranks.environment import INIT_FIRST, PositionError, ranks_from_environment
from swansong._ranks.job_store import (
    POLL_S,
    JobStore,
    first_line,
    store_of_group,
    wait_for_key,
)
from swansong._ranks.rendezvous import meet_ranks

ATTACH_LIMIT_S = 600.0
"""Longest wait of one rank's attach() for that of another rank, as long as that of a collective."""
ATTACH_WARNING_S = 10.0
"""Wait after which a rank that has not called attach() is logged."""
_ANSWER_LIMIT_S = 10.0
"""Further wait for the answer of rank 0."""
_POLLS_PER_S = 2000.0
"""Polls by all ranks together.  In a large job each rank polls less often."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CALL_IT = "call it on every rank, and equally often"
_NEVER = threading.Event()
_exchanges = itertools.count(1)
"""Number of the next exchange: a second attach() must not read what the first one wrote."""


def find_ranks(socket_path: str) -> Ranks:
    """Return the position of this process in its job.

    Args:
        socket_path: path of the daemon's socket.  Ranks with the same daemon are on the same VM for Swansong,
            also if they are in several containers.

    Raises:
        PositionError: the position is unknown, or another rank did not call this function.
    """
    group = _process_group()
    if group is None:
        return ranks_from_environment(os.environ)
    rank, world_size = group
    if world_size == 1:
        return Ranks()
    try:
        return _exchange(store_of_group(), rank, world_size, _daemon_of(socket_path))
    except PositionError:
        raise
    except Exception as error:  # the stores raise errors of many types
        raise PositionError(
            "attach() failed: the ranks cannot exchange their positions through the store of the process"
            f" group: {first_line(error)}"
        ) from error


def own_process() -> dict[str, Any]:
    """Return ``boot_id`` and ``began_ticks`` of a rank manifest; empty if the system reports neither."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return {"boot_id": _BOOT_ID.read_text().strip(), "began_ticks": int(fields[19])}
    except (OSError, ValueError, IndexError):
        return {}


def check_ranks(ranks: Ranks) -> None:
    """Compare the position that the guard uses with ``torch.distributed``.

    Raises:
        PositionError: they differ.  A checkpoint would then lack the state of other ranks.
    """
    group = _process_group()
    if group is not None and group != (ranks.rank, ranks.world_size):
        raise PositionError(
            f"this process is rank {group[0]} of {group[1]} in torch.distributed, but it was rank"
            f" {ranks.rank} of {ranks.world_size} in swansong.attach(); {INIT_FIRST}"
        )


def _process_group() -> tuple[int, int] | None:
    """Rank and number of ranks in ``torch.distributed``; None if no process group exists."""
    # Never import torch: a script without it does not need it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _daemon_of(socket_path: str) -> list[Any]:
    """The identity of a daemon, which is the same for all processes that reach it.

    It is the directory of the socket, and not the socket: a daemon that restarts creates a new socket.
    Containers on one machine with a daemon each have different directories under the same path.
    """
    directory, name = os.path.split(os.path.abspath(socket_path))
    try:
        place = os.stat(directory)
        identity = [place.st_dev, place.st_ino, name]
    except OSError:
        identity = [directory, name]
    return [_BOOT_ID.read_text().strip(), *identity]


def _exchange(store: JobStore, rank: int, world_size: int, daemon: list[Any]) -> Ranks:
    """Meet the other ranks, and return the position that follows from the daemons of all ranks.

    torchrun keeps its store over a restart, after which the ranks may be fewer, or on other VMs.  So the keys
    of an exchange begin with the id under which its ranks have met.  If all ranks are on one VM, it is also
    the id of the start.
    """
    prefix, nonce = f"swansong/attach/{next(_exchanges)}/", secrets.token_hex(8)
    begun_mono_s, has_warned = time.monotonic(), False

    def watch(missing: Sequence[int], _: Sequence[int]) -> None:
        nonlocal has_warned
        waited_s = time.monotonic() - begun_mono_s
        if waited_s > ATTACH_WARNING_S and not has_warned:
            has_warned = True
            log.warning("waiting for rank %s to call swansong.attach(); %s", missing[0], _CALL_IT)
        if waited_s > ATTACH_LIMIT_S:
            for other in range(1, world_size) if rank == 0 else ():
                store.set(f"{prefix}{nonce}/answer/{other}", json.dumps({"missing": missing[0]}))
            raise _is_missing(missing[0], world_size)

    own = json.dumps(daemon)
    start_id = meet_ranks(
        store, rank, world_size, nonce, closed=_NEVER, watch=watch, prefix=prefix, value=own
    )
    assert start_id is not None
    answers = f"{prefix}{start_id}/answer"
    if rank == 0:
        others = (f"{prefix}{start_id}/met/{other}" for other in range(1, world_size))
        daemons = [own, *(store.get(key).decode() for key in others)]
        places = Ranks.among(dict(enumerate(daemons)))
        # One answer for each rank: one for all would grow with the job, and each rank would fetch it.
        for other, place in places.items():
            store.set(f"{answers}/{other}", json.dumps(place.position()))
        found = places[0]
    else:
        limit_s = ATTACH_LIMIT_S + _ANSWER_LIMIT_S
        every_s = max(POLL_S / 5, world_size / _POLLS_PER_S)
        is_there = wait_for_key(
            store, f"{answers}/{rank}", _NEVER, every_s=every_s, limit_s=limit_s
        )
        answer = json.loads(store.get(f"{answers}/{rank}")) if is_there else {"missing": 0}
        if "missing" in answer:
            raise _is_missing(answer["missing"], world_size)
        found = Ranks(**answer)
    return found if found.nodes > 1 else dataclasses.replace(found, start_id=start_id)


def _is_missing(rank: int, world_size: int) -> PositionError:
    return PositionError(
        f"attach() failed: rank {rank} of {world_size} did not call swansong.attach() within"
        f" {ATTACH_LIMIT_S:.0f} s; {_CALL_IT}"
    )
