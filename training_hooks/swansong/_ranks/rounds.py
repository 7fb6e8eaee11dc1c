# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job do with each other in the job's own store: they meet, and decide in rounds.

Every function is one rank's part; nothing here knows of daemons or training loops.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

POLL_S = 0.05
"""So often a rank looks for what others do when it likes.  Looking takes a tenth of a millisecond; a wait
within the store would write a warning of torch's to the trainer's output whenever it ends in vain."""
_HURRY_POLL_S = 0.002
_CONNECT_LIMIT_S = 30.0
ABSENT_S = 10.0
"""What a rank has left about its daemon counts when it has not come for this long."""
_ABSENT = "absent"
_ABSENT_LOOK_S = 1.0
_ABORT = "abort"
_TARGET = "target"


class JobStore(Protocol):
    """What is used of the store of ``torch.distributed``; one connection serves one thread."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


def open_job_store() -> JobStore:
    """A new connection to the store that torchrun, or rank 0, has at MASTER_ADDR and MASTER_PORT.

    Raises:
        Exception: there is none yet, or no torch.
    """
    from torch.distributed import PrefixStore, TCPStore  # noqa: PLC0415 - only jobs that have torch

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_LIMIT_S),
    )
    found: JobStore = PrefixStore("swansong", store)
    return found


@dataclass(frozen=True)
class Call:
    """What a round is for, as its caller said it."""

    id: str
    reason: str
    seconds_left: float
    urgency: str

    @classmethod
    def decode(cls, data: bytes) -> Call:
        return cls(**json.loads(data))


@dataclass(frozen=True)
class Decision:
    """What a round has come to: all save at ``target``, or, when that is None, nobody does."""

    target: int | None
    reason: str = ""

    def encode(self) -> str:
        return f"{_ABORT} {self.reason}" if self.target is None else f"{_TARGET} {self.target}"

    @classmethod
    def decode(cls, data: bytes) -> Decision:
        word, _, rest = data.decode().partition(" ")
        return cls(int(rest)) if word == _TARGET else cls(None, rest)


def take_part(
    store: JobStore,
    key: str,
    *,
    rank: int,
    world_size: int,
    step: int,
    limit_s: float,
    stop: threading.Event,
) -> Decision:
    """One rank's part in a round; the same decision for every rank that gets one.

    Args:
        key: of the round.
        step: last one that this rank has completed; it begins no other before this returns.
        limit_s: longest wait for the other ranks.
        stop: ends the wait.

    Raises:
        Exception: the store failed; this rank does not know what the others do.
    """
    decision = f"{key}/decision"
    store.set(f"{key}/step/{rank}", str(step))
    if store.add(f"{key}/answers", 1) == world_size:
        steps = store.multi_get([f"{key}/step/{each}" for each in range(world_size)])
        own = Decision(max(int(value) for value in steps) + 1)
    else:
        if await_key(store, decision, stop, every_s=_HURRY_POLL_S, limit_s=limit_s):
            return Decision.decode(store.get(decision))
        own = Decision(None, f"rank {rank} waited {limit_s:.1f} s for the ranks of the other VMs")
    return Decision.decode(store.compare_set(decision, "", own.encode()))


def greet(
    store: JobStore,
    *,
    rank: int,
    world_size: int,
    nonce: str,
    stop: threading.Event,
    absent: Callable[[list[int]], object] = lambda _: None,
) -> str | None:
    """Meet the other ranks of this very start of the job; what is returned is common to all of them.

    Every rank is welcomed by rank 0 by the nonce that it came with, so nobody takes for a welcome what
    an earlier start has left.

    Args:
        absent: called with ranks whose VM has no daemon, when they have said so for a while.

    Returns:
        The session; None when ``stop`` was set before all had come.
    """
    begun_mono_s = time.monotonic()
    store.set(f"hello/{rank}", nonce)

    def report(ranks: list[int]) -> None:
        # At first it may be what an earlier start has left.
        if ranks and time.monotonic() - begun_mono_s > ABSENT_S:
            absent(ranks)

    if rank != 0:
        welcome = f"welcome/{nonce}"
        while not await_key(store, welcome, stop, every_s=POLL_S, limit_s=_ABSENT_LOOK_S):
            if stop.is_set():
                return None
            report([0] if _is_absent(store, 0) else [])
        session = store.get(welcome).decode()
        store.set(f"{session}/met/{rank}", "")
        return session
    missing = set(range(1, world_size))
    welcomed: set[str] = set()
    while missing:
        without_daemon = []
        for other in sorted(missing):
            if store.check([f"{nonce}/met/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):
                theirs = store.get(f"hello/{other}").decode()
                if theirs == _ABSENT:
                    without_daemon.append(other)
                elif theirs not in welcomed:
                    welcomed.add(theirs)
                    store.set(f"welcome/{theirs}", nonce)
        report(without_daemon)
        if missing and stop.wait(POLL_S):
            return None
    return nonce


def say_absent(store: JobStore, rank: int) -> None:
    """Let the other ranks know that this one has no daemon, and will not meet them."""
    store.set(f"hello/{rank}", _ABSENT)


def _is_absent(store: JobStore, rank: int) -> bool:
    key = f"hello/{rank}"
    return store.check([key]) and store.get(key).decode() == _ABSENT


def await_key(
    store: JobStore,
    key: str,
    stop: threading.Event,
    *,
    every_s: float,
    limit_s: float = float("inf"),
) -> bool:
    """Wait for a key; False when it has not come within the limit, or ``stop`` was set before."""
    give_up_mono_s = time.monotonic() + limit_s
    while not store.check([key]):
        left_s = give_up_mono_s - time.monotonic()
        if left_s <= 0 or stop.wait(min(every_s, left_s)):
            return False
    return True
