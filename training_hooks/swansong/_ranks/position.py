# SPDX-License-Identifier: Apache-2.0
"""Finds the position of this process in its job, and compares it with ``torch.distributed``.

An initialised ``torch.distributed`` is right about rank and number of ranks.  It does not know which ranks
share a VM.  If the launcher does not report that either, the ranks exchange it through the store of the
process group.  They use no collective, so the exchange needs no GPU and disturbs no other communication.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any

from swansong._ranks.agreement import Ranks
from swansong._ranks.environment import INIT_FIRST, PositionError, ranks_from_environment
from swansong._ranks.job_store import (
    POLL_S,
    JobStore,
    first_line,
    store_of_group,
    wait_for_key,
)

ATTACH_LIMIT_S = 120.0
"""Longest wait of one rank's attach() for that of another rank."""
_ANSWER_LIMIT_S = 10.0
"""Further wait for the answer of rank 0."""
_POLLS_PER_S = 2000.0
"""Polls by all ranks together.  In a large job each rank polls less often."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
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
    try:
        found = ranks_from_environment(os.environ)
    except PositionError:
        found = Ranks()
    is_same = (found.rank, found.world_size) == group
    if world_size == 1:
        return found if is_same else Ranks()
    if is_same and found.restart_id:
        return found
    try:
        return _exchange(store_of_group(), rank, world_size, _daemon_of(socket_path))
    except PositionError:
        raise
    except Exception as error:  # the stores raise errors of many types
        raise PositionError(
            "attach() failed: the ranks cannot exchange their positions through the store of the process"
            f" group: {first_line(error)}; start them with torchrun"
        ) from error


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
    """Publish the daemon of this rank, and return the position that follows from those of all ranks."""
    key = f"swansong/attach/{next(_exchanges)}"
    every_s = max(POLL_S / 5, world_size / _POLLS_PER_S)
    never = threading.Event()
    store.set(f"{key}/{rank}", json.dumps(daemon))
    if rank == 0:
        answer = _gather(store, key, world_size, every_s)
        store.set(f"{key}/all", json.dumps(answer))
    elif wait_for_key(
        store, f"{key}/all", never, every_s=every_s, limit_s=ATTACH_LIMIT_S + _ANSWER_LIMIT_S
    ):
        answer = json.loads(store.get(f"{key}/all"))
    else:
        answer = {"missing": 0}
    if "missing" in answer:
        raise PositionError(
            f"attach() failed: rank {answer['missing']} of {world_size} did not call swansong.attach() within"
            f" {ATTACH_LIMIT_S:.0f} s; call it on all ranks, as often on each of them"
        )
    return _placed(answer["daemons"], rank, answer["restart_id"])


def _gather(store: JobStore, key: str, world_size: int, every_s: float) -> dict[str, Any]:
    """The part of rank 0: collect the daemons of all ranks, and draw the id of this start of the job."""
    give_up_mono_s = time.monotonic() + ATTACH_LIMIT_S
    never = threading.Event()
    daemons = []
    for rank in range(world_size):
        left_s = max(0.0, give_up_mono_s - time.monotonic())
        if not wait_for_key(store, f"{key}/{rank}", never, every_s=every_s, limit_s=left_s):
            return {"missing": rank}
        daemons.append(json.loads(store.get(f"{key}/{rank}")))
    return {"daemons": daemons, "restart_id": secrets.token_hex(8)}


def _placed(daemons: list[list[Any]], rank: int, restart_id: str) -> Ranks:
    """Number the VMs in the order of their first ranks."""
    vms: list[list[Any]] = []
    for daemon in daemons:
        if daemon not in vms:
            vms.append(daemon)
    own = [other for other, daemon in enumerate(daemons) if daemon == daemons[rank]]
    return Ranks(
        rank=rank,
        local_rank=own.index(rank),
        world_size=len(daemons),
        local_world_size=len(own),
        node=vms.index(daemons[rank]),
        nodes=len(vms),
        restart_id=restart_id,
    )
