# SPDX-License-Identifier: Apache-2.0
"""The host memory for copies of a state; on a GPU as far as it can be seen without one."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import swansong
import torch
from swansong._torch import arena, host_memory
from swansong._torch.arena import Arenas, TensorPiece
from swansong._torch.host_memory import HostMemory, available_bytes
from swansong.torch import TrainingState

from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import Attach
from testkit.waiting import until

SIZE_BYTES = 4 * 10**6


def piece_on_gpu(size_bytes: int = SIZE_BYTES) -> Any:
    """A piece with those attributes of a tensor on a GPU that the arena reads."""
    shape = torch.Size([size_bytes // 4])
    tensor = SimpleNamespace(is_cuda=True, nbytes=size_bytes, dtype=torch.float32, shape=shape)
    tensor.device = torch.device("cuda:0")
    piece = object.__new__(TensorPiece)
    vars(piece).update(group="model", key="weight", tensor=tensor)
    return piece


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[HostMemory]:
    """The memory that was to be pinned."""
    found: list[HostMemory] = []
    monkeypatch.setattr(HostMemory, "_pin", lambda memory: found.append(memory))  # noqa: PLW0108 - a method
    return found


def test_memory_is_prepared_once_in_the_background(pinned: list[HostMemory]) -> None:
    """The first copy takes it, and pins nothing again."""
    arenas = Arenas()
    arenas.prepare([piece_on_gpu()], 1)
    ((_, memory, _),) = arenas._idle[0]._files.values()
    until(lambda: memory in pinned)
    copy = arenas.take([piece_on_gpu()])
    copy.prepare()
    assert pinned.count(memory) == 1  # an earlier test may add others
    assert memory.tensor.nbytes == SIZE_BYTES
    assert not arenas._idle


@pytest.mark.parametrize(
    ("is_prepared", "is_forked"), [(True, False), (False, False), (True, True)]
)
def test_the_first_copy_of_a_state_on_a_cpu_finds_its_pages(
    *, is_prepared: bool, is_forked: bool
) -> None:
    """A page that is used for the first time, or is shared with a fork, takes longer than its copy."""
    pieces = [TensorPiece("model", "weight", torch.rand(16 * 10**6))]
    arenas = Arenas()
    if is_prepared:
        arenas.prepare(pieces, 1)
        ((_, memory, _),) = arenas._idle[0]._files.values()
        until(lambda: memory._is_prepared)
        memory.prepare(is_urgent=False)  # which waits for the other thread
    copy = arenas.take(pieces)
    worker = os.fork() if is_forked else 0
    if is_forked and not worker:
        signal.pause()
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        copy.fill(pieces)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    finally:
        if worker:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
    assert (faults < 64 * 10**6 / 4096 / 4) == is_prepared
    assert torch.equal(copy._views[0], pieces[0].tensor)


def test_a_copy_does_not_wait_until_all_pages_are_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The background ends after the piece in progress, and clears nothing that was copied."""
    monkeypatch.setattr(host_memory, "TOUCH_BYTES", 10**6)
    pieces = [TensorPiece("model", "weight", torch.rand(10**6))]
    held, touched, memset = threading.Event(), [], ctypes.memset

    def slow_memset(begin: int, value: int, size_bytes: int) -> None:
        touched.append(begin)
        assert held.wait(60)
        memset(begin, value, size_bytes)

    monkeypatch.setattr(host_memory.ctypes, "memset", slow_memset)
    arenas = Arenas()
    arenas.prepare(pieces, 1)
    (copy,) = arenas._idle
    ((_, memory, _),) = copy._files.values()
    until(lambda: touched)
    copying = threading.Thread(target=copy.fill, args=(pieces,))
    copying.start()
    until(lambda: memory._is_urgent)
    held.set()
    copying.join(60)
    assert torch.equal(copy._views[0], pieces[0].tensor)
    assert len(touched) == 1


def test_a_copy_does_what_the_background_has_not_done(
    monkeypatch: pytest.MonkeyPatch, pinned: list[HostMemory]
) -> None:
    """It waits for the file in progress only."""
    released = threading.Event()
    prepare = HostMemory.prepare

    def waits(memory: HostMemory, *, is_urgent: bool) -> None:
        if not is_urgent:
            assert released.wait(60)
        prepare(memory, is_urgent=is_urgent)

    monkeypatch.setattr(HostMemory, "prepare", waits)
    arenas = Arenas()
    arenas.prepare([piece_on_gpu()], 1)
    taken = [memory for _, memory, _ in arenas.take([piece_on_gpu()])._files.values()]
    for memory in taken:
        memory.prepare(is_urgent=True)
    released.set()
    assert [memory for memory in pinned if memory in taken] == taken  # not of an earlier test


@pytest.mark.parametrize(("ranks", "is_prepared"), [(1, True), (5, True), (6, False)])
def test_no_more_than_half_of_the_available_memory_is_prepared(
    monkeypatch: pytest.MonkeyPatch, pinned: list[HostMemory], ranks: int, *, is_prepared: bool
) -> None:
    """All ranks of the VM count."""
    monkeypatch.setattr(arena, "available_bytes", lambda: (10 * SIZE_BYTES, 20 * SIZE_BYTES))
    arenas = Arenas()
    arenas.prepare([piece_on_gpu()], ranks)
    assert bool(arenas._idle) == is_prepared


def test_idle_memory_is_freed_while_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, pinned: list[HostMemory]
) -> None:
    """That of a copy in use stays."""
    monkeypatch.setattr(arena, "LOOK_S", 0.01)
    arenas = Arenas()
    arenas.prepare([piece_on_gpu()], 1)
    used = arenas.take([piece_on_gpu()])
    arenas._idle.append(arenas.take([piece_on_gpu()]))
    monkeypatch.setattr(arena, "available_bytes", lambda: (10**6, 10**9))
    until(lambda: not arenas._idle)
    assert used._views[0].nbytes == SIZE_BYTES


def test_memory_of_another_layout_is_kept_if_a_free_could_block(pinned: list[HostMemory]) -> None:
    """CUDA frees pinned memory after all kernels, and a kernel may wait for a lost rank."""
    arenas = Arenas()
    arenas.prepare([piece_on_gpu()], 1)
    (idle,) = arenas._idle
    assert arenas.take([piece_on_gpu(8)], may_wait=False) is not idle
    assert arenas._unused == [idle]


def test_the_available_memory_is_a_part_of_the_whole() -> None:
    """Of this machine and its control groups."""
    available, total = available_bytes()
    assert 0 < available <= total


def test_only_a_trainer_with_a_daemon_prepares(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, after the first step; without a daemon no copy is taken."""
    prepared: list[TrainingState] = []
    monkeypatch.setattr(TrainingState, "prepare_copy", lambda state: prepared.append(state))  # noqa: PLW0108 - a method
    guard = attach(TrainingState(torch.nn.Linear(1, 1)))
    guard.restore()
    assert prepared == []
    guard.step(1)
    guard.step(2)
    assert len(prepared) == 1
    with swansong.attach(TrainingState(torch.nn.Linear(1, 1)), socket="/nonexistent") as alone:
        alone.step(1)
    assert len(prepared) == 1
