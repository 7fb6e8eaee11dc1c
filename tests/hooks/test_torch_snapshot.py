# SPDX-License-Identifier: Apache-2.0
"""The copy between two steps, and failures in the middle of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from swansong import bounds, layout
from swansong._torch import arena
from swansong._torch.arena import Arena, TensorPiece
from swansong.protocol import Failed
from swansong.torch import TrainingState
from torch import nn

from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import DEVICE, Attach
from testkit.waiting import until


class Trainer:
    def __init__(self, value: float) -> None:
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to(DEVICE)
        self.state = TrainingState(self.model)
        self.becomes(value)

    def becomes(self, value: float) -> None:
        for parameter in self.model.parameters():
            parameter.data.fill_(value)

    def values(self) -> set[float]:
        return {value for each in self.model.parameters() for value in each.flatten().tolist()}


def restored(daemon: FakeDaemon, attach: Attach, sealed: Path) -> set[float]:
    """Restore this set in a new trainer, and return the values of its state."""
    step, _ = layout.parse_sealed_name(sealed.name) or (0, "")
    daemon.restorable = lambda: (sealed, step)
    trainer = Trainer(0.0)
    assert attach(trainer.state).restore() == step
    return trainer.values()


@pytest.mark.fault("T03")
def test_a_copy_that_fails_leaves_the_previous_one_complete(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous copy is still being written when the next one fails halfway; it is sealed unchanged.

    The daemon gets Failed, the training loop no error, and the next copy is complete.
    """
    released = threading.Event()
    write, fill = arena._write, Arena.fill

    def waits(file: object, data: memoryview) -> None:
        assert released.wait(60)
        write(file, data)

    def fails(arena: Arena, pieces: list[TensorPiece]) -> None:
        for view, piece in list(zip(arena._views, pieces, strict=True))[:5]:
            view.copy_(piece.tensor)
        raise RuntimeError("an error of the device")

    monkeypatch.setattr(arena, "_write", waits)
    trainer = Trainer(1.0)
    guard = attach(trainer.state)
    guard.restore()
    guard.step(1)
    assert guard.save(1)
    trainer.becomes(2.0)
    monkeypatch.setattr(Arena, "fill", fails)
    daemon.request()
    until(lambda: guard.request is not None)
    guard.step(2)
    assert "of the device" in daemon.wait_for(Failed).reason
    assert daemon.sealed() == []
    monkeypatch.setattr(Arena, "fill", fill)
    trainer.becomes(3.0)
    guard.step(3)
    assert guard.save(3)
    released.set()
    assert guard.wait_saved(10)
    assert [restored(daemon, attach, sealed) for sealed in daemon.sealed()] == [{1.0}, {3.0}]


def test_a_file_is_final_before_the_next_one_is_written(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may upload the first files of a large state while the last ones are written."""
    monkeypatch.setattr(arena, "FILE_BYTES", 100)
    begun: list[object] = []
    second, released = threading.Event(), threading.Event()
    write = arena._write

    def waits(file: object, data: memoryview) -> None:
        if file not in begun:
            begun.append(file)
        if len(begun) == 2:
            second.set()
            assert released.wait(60)
        write(file, data)

    monkeypatch.setattr(arena, "_write", waits)
    guard = attach(Trainer(1.0).state)
    guard.restore()
    assert guard.save(1)
    assert second.wait(60)
    own = daemon.staging / daemon.partial()[0] / "rank-00000"
    final = [path.name for path in own.iterdir()]
    assert len(final) == 1
    assert bounds.path(final[0], "path")
    released.set()
    assert guard.wait_saved(10)
    (sealed,) = daemon.sealed()
    assert len(list((sealed / "rank-00000").iterdir())) > 3
    assert restored(daemon, attach, sealed) == {1.0}


def test_files_are_filled_up_to_the_limit() -> None:
    """A larger tensor has its own file.  The memory is as large as the files."""
    sizes = [60, 30, 20, 250, 90, 10, 1]
    pieces = [
        TensorPiece("model", str(place), torch.zeros(size, dtype=torch.uint8))
        for place, size in enumerate(sizes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "FILE_BYTES", 100)
        copy = Arena(pieces)
    held = {name: memory.tensor.nbytes for name, (_, memory, _) in copy._files.items()}
    assert list(held.values()) == [90, 20, 250, 100, 1]
    assert copy.homes[3] == "model-00002.safetensors"


def test_a_file_is_whole_when_the_daemon_may_send_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished file is sent before the set is sealed, so nothing of it is written later."""
    finished: dict[Path, bytes] = {}
    finish = arena.finish

    def noted(path: Path) -> None:
        finished[path] = path.read_bytes()
        finish(path)

    monkeypatch.setattr(arena, "finish", noted)
    Trainer(7.0).state.snapshot()(tmp_path)
    assert finished
    assert {path: path.read_bytes() for path in finished} == finished
