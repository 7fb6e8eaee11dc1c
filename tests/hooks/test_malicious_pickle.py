# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in which a bucket writer has hidden a pickle: Swansong's formats never unpickle."""

from __future__ import annotations

import io
import os
import pickle  # noqa: TID251 - the attacker's tool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from swansong.rank_files import load_tree, save_tree
from swansong.torch import TrainingState
from torch import nn


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def payloads(marker: Path) -> list[bytes]:
    """A bare pickle, a pickle in PyTorch's archive, and NumPy's array of objects."""
    archive, array = io.BytesIO(), io.BytesIO()
    torch.save(Payload(marker), archive)
    np.save(array, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    return [pickle.dumps(Payload(marker)), archive.getvalue(), array.getvalue()]


class Torch:
    """Weights and optimizer, as ``swansong.torch`` saves them."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.state = TrainingState(self.model, torch.optim.AdamW(self.model.parameters()))

    def save(self, directory: Path) -> None:
        self.state.snapshot()(directory)

    def load(self, directory: Path) -> None:
        self.state.load(directory.parent)


class Plain:
    """Numbers and arrays, as ``attach(state=...)`` saves them."""

    def save(self, directory: Path) -> None:
        save_tree(directory, {"step": 5, "weights": np.arange(10.0)})

    def load(self, directory: Path) -> None:
        load_tree(directory)


@pytest.mark.parametrize("number", range(3))
def test_the_payload_works_where_something_unpickles(tmp_path: Path, number: int) -> None:
    """The next test depends on it."""
    marker = tmp_path / "marker"
    data = io.BytesIO(payloads(marker)[number])
    read = [
        lambda: pickle.load(data),
        lambda: torch.load(data, weights_only=False),
        lambda: np.load(data, allow_pickle=True),
    ]
    read[number]()
    assert marker.exists()


@pytest.mark.fault("S23")
@pytest.mark.parametrize("kind", [Torch, Plain])
@pytest.mark.parametrize("number", range(3))
def test_a_pickle_in_the_place_of_any_file_is_not_run(
    tmp_path: Path, kind: type[Torch | Plain], number: int
) -> None:
    """The load fails, and the code in the pickle never runs."""
    trainer = kind()
    own = tmp_path / "rank-00000"
    own.mkdir()
    trainer.save(own)
    trainer.load(own)
    files = [path for path in own.rglob("*") if path.is_file()]
    assert len(files) >= 2
    for path in files:
        honest = path.read_bytes()
        path.write_bytes(payloads(tmp_path / "marker")[number])
        with pytest.raises((ValueError, KeyError, TypeError, OSError)):
            trainer.load(own)
        path.write_bytes(honest)
    assert not (tmp_path / "marker").exists()
    trainer.load(own)
