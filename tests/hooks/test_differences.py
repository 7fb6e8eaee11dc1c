# SPDX-License-Identifier: Apache-2.0
"""The report of two checkpoints that differ names the object, the tensor, the generator and the position."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from swansong._differences import Difference, find_differences, likely_cause
from swansong.rank_files import Bundle
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch.utils.data import DataLoader

from testkit.training_parts import Counter, save_part


class Training:
    """A model with an optimizer, a scheduler, a loader, a generator of its own, and values."""

    def __init__(self) -> None:
        seed_all(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1).bfloat16())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.loader = ResumableLoader(DataLoader(torch.arange(8), batch_size=2))
        self.noise = torch.Generator()
        self.state = TrainingState(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            noise=self.noise,
        )
        self.state.values["best"] = 1.0

    def save(self, directory: Path) -> Path:
        return save_part(self.state, directory)


def change_weight(training: Training) -> None:
    with torch.no_grad():
        training.model[0].weight[0, 1] += 0.5


def change_bfloat16(training: Training) -> None:
    with torch.no_grad():
        training.model[1].weight += 1.0


def advance_loader(training: Training) -> None:
    batches = iter(training.loader)
    next(batches)
    next(batches)


@pytest.mark.parametrize(
    ("kind", "warning", "without_warning"),
    [
        (
            "value",
            "a scheduler of an optimizer of the state is not in the state",
            "such as a generator",
        ),
        (
            "loader",
            "batch 8 of epoch 0 has other contents than before the checkpoint",
            "the loader is at",
        ),
    ],
)
def test_a_warning_of_the_hooks_is_the_likely_cause(
    kind: str, warning: str, without_warning: str
) -> None:
    """The hooks know more than two checkpoints show: state that neither contains, data that changed."""
    found = [Difference(kind, "optimizer.lr is 0.1 instead of 0.2")]
    assert likely_cause(found, f"epoch 1\nno swansongd at /x\n{warning}\n") == warning
    assert without_warning in likely_cause(found, "epoch 1\nno swansongd at /x\n")


@pytest.mark.parametrize(
    ("change", "texts", "cause"),
    [
        (
            change_weight,
            [
                "model: '0.weight' differs in 1 of 6 elements (largest difference 0.5)",
            ],
            "outside of the state",
        ),
        (
            change_bfloat16,
            ["model: '1.weight' differs in 2 of 2 elements (largest difference 1)"],
            "outside of the state",
        ),
        (
            lambda _: torch.rand(1),
            ["generators.torch differs"],
            "random numbers",
        ),
        (
            lambda _: random.random(),
            ["generators.python differs"],
            "random numbers",
        ),
        (
            lambda training: torch.rand(1, generator=training.noise),
            ["noise: this generator differs"],
            "random numbers",
        ),
        (
            lambda training: training.state.values.update(best=2.0),
            ["values: 'best' is 2.0 instead of 1.0"],
            "last in the loop body",
        ),
    ],
)
def test_a_change_is_named(
    tmp_path: Path, change: Callable[[Training], Any], texts: list[str], cause: str
) -> None:
    """The text has no checksum and no offset, and each change has a likely cause."""
    training = Training()
    wanted = training.save(tmp_path / "wanted")
    change(training)
    found, files = find_differences(wanted, training.save(tmp_path / "got"))
    assert [each.text for each in found] == texts
    assert files == len([path for path in wanted.rglob("*") if path.is_file()])
    assert cause in likely_cause(found, "")


def test_generators_of_a_loader_are_named(tmp_path: Path) -> None:
    """In an epoch the loader saves the global generators too; between epochs it does not."""
    training = Training()
    batches = iter(training.loader)
    next(batches)
    wanted = training.save(tmp_path / "wanted")
    torch.rand(1)
    found, _ = find_differences(wanted, training.save(tmp_path / "got"))
    assert [each.text for each in found] == [
        "loader: its generators differ: resume_with",
        "generators.torch differs",
    ]
    assert (
        find_differences(wanted, tmp_path / "got", unseeded=frozenset({"generators.torch"}))[0]
        == []
    )
    other = frozenset({"generators.python"})
    assert find_differences(wanted, tmp_path / "got", unseeded=other)[0] == found


def test_the_position_of_a_loader_comes_first(tmp_path: Path) -> None:
    """Another batch changes all else, so the loader's position is the first difference."""
    training = Training()
    wanted = training.save(tmp_path / "wanted")
    advance_loader(training)
    change_weight(training)
    found, _ = find_differences(wanted, training.save(tmp_path / "got"))
    assert found[0].text.startswith("loader: batch 2 of epoch 0 instead of batch 0")
    assert "loader" in likely_cause(found, "")
    assert found[-1].kind == "tensor"


def test_a_scheduler_that_is_a_step_behind_is_named(tmp_path: Path) -> None:
    """Its count and the rates, in the scheduler and in the optimizer."""
    training = Training()
    wanted = training.save(tmp_path / "wanted")
    training.optimizer.step()
    training.scheduler.step()
    found, _ = find_differences(wanted, training.save(tmp_path / "got"))
    text = "\n".join(each.text for each in found)
    assert "scheduler: 'last_epoch' is 1 instead of 0" in text
    assert "'param_groups.0.lr' is 0.01" in text
    assert "the scheduler has stepped" in likely_cause(found, "")
    counted = Difference("value", "scheduler: '_step_count' is 5 instead of 4")
    assert "the scheduler has stepped" in likely_cause([counted], "")


def test_arrays_and_values_of_a_plain_state(tmp_path: Path) -> None:
    """A state without torch has the same report: objects, numpy arrays and generators."""
    numpy = pytest.importorskip("numpy")
    counter = Counter({"weights": numpy.zeros((2, 2)), "level": 1})
    sets = []
    for name in ("wanted", "got"):
        (tmp_path / name / "rank-00000").mkdir(parents=True)
        Bundle({"game": counter}).save(tmp_path / name / "rank-00000")
        sets.append(tmp_path / name)
        counter.value["weights"][1, 1] = 2.0
        counter.value["level"] = 3
        numpy.random.random()
    found, _ = find_differences(*sets)
    assert [each.text for each in found] == [
        "generators.numpy differs",
        "game: 'value.level' is 3 instead of 1",
        "game: 'value.weights' differs in 1 of 4 elements (largest difference 2)",
    ]
    assert find_differences(sets[0], sets[0]) == ([], 2)


def test_files_of_other_formats(tmp_path: Path) -> None:
    """A file of another format is compared by bytes; a missing file and the rank are named."""
    for name, byte in (("wanted", b"a"), ("got", b"b")):
        for rank in ("rank-00000", "rank-00001"):
            (tmp_path / name / rank).mkdir(parents=True)
        (tmp_path / name / "rank-00001" / "weights.bin").write_bytes(b"0123" + byte)
        (tmp_path / name / "rank-00000" / name).touch()
    found, _ = find_differences(tmp_path / "wanted", tmp_path / "got")
    assert [each.text for each in found] == [
        "only the uninterrupted run saved rank-00000/wanted",
        "only the resumed run saved rank-00000/got",
        "rank-00001/weights.bin: differs, first at byte 4 of 5",
    ]
    found, _ = find_differences(tmp_path / "wanted", tmp_path / "got", r"wanted|got|\.bin")
    assert not found


def test_directories_of_callbacks_do_not_count(tmp_path: Path) -> None:
    """A logger creates another directory at each start; names of files count, and so do other values."""
    sets = []
    for version in ("0", "1"):
        path = f"/logs/version_{version}/epoch=0.ckpt"
        best = {"best": path, "models": {path: 0.5}, "last": f"/logs/step={version}.ckpt"}
        (tmp_path / version / "rank-00000").mkdir(parents=True)
        state = Counter({"callbacks": {"saver": best}, "data": f"/data/{version}/part"})
        Bundle({"fit": state}).save(tmp_path / version / "rank-00000")
        sets.append(tmp_path / version)
    found, _ = find_differences(*sets)
    assert [each.text for each in found] == [
        (
            "fit: 'value.callbacks.saver.last' is 'step=1.ckpt' instead of 'step=0.ckpt';"
            " 'value.data' is '/data/1/part' instead of '/data/0/part'"
        )
    ]
    found, _ = find_differences(*sets, r"state\.json:fit\.value\.(data|callbacks\.saver\.last)$")
    assert not found
