# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face ``Trainer``: a run that resumes at any step does the same as an uninterrupted one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from swansong.protocol import Sealed
from swansong.transformers import SwansongCallback
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import Restore
from testkit.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS_OF_EPOCH = 3
LAST_STEP = 2 * STEPS_OF_EPOCH
TIMES = ("runtime", "per_second", "train_loss", "total_flos")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        del input_ids  # the Trainer groups by its length
        found = self.layers(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


class Calls(TrainerCallback):
    """Records the events that must happen once in each step or epoch."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_epoch_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.calls.append(("epoch end", state.global_step))

    def on_evaluate(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.calls.append(("evaluation", state.global_step))

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.calls.append(("save", state.global_step))


class SaveInEvaluation(TrainerCallback):
    """Saves in the middle of the evaluation of one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.batches = 0
        self.own: SwansongCallback | None = None

    def on_prediction_step(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.batches += state.global_step == self.step
        if self.batches == 2:
            assert self.own is not None
            assert self.own.guard.save(state.global_step)


def data(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 4, generator=generator)
    return [{"x": x, "labels": x.sum()} for x in inputs]


class Run:
    """A start of the training, in this process."""

    def __init__(
        self,
        directory: Path,
        *callbacks: TrainerCallback,
        attach: dict[str, Any] | None = None,
        train_data: Any = None,
        **arguments: Any,
    ) -> None:
        defaults = {
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.3,
            "logging_steps": 3,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 3,
        }
        args = TrainingArguments(str(directory), **{**defaults, **arguments})
        self.calls = Calls()
        self.trainer = Trainer(
            args=args,
            model_init=Model,
            train_dataset=train_data or data(8 * STEPS_OF_EPOCH),
            eval_dataset=data(24),
            callbacks=[self.calls, *callbacks],
        )
        self.own = SwansongCallback(self.trainer, **(attach or {}))
        for callback in callbacks:
            if isinstance(callback, SaveInEvaluation):
                callback.own = self.own
        self.trainer.train(resume_from_checkpoint=self.own.restore())

    @property
    def weights(self) -> list[float]:
        return torch.cat([p.detach().ravel() for p in self.trainer.model.parameters()]).tolist()

    @property
    def log(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in entry.items() if not key.endswith(TIMES)}
            for entry in self.trainer.state.log_history
        ]


EVALUATIONS = {
    "by-step": {"eval_strategy": "steps", "eval_steps": 2},
    "by-epoch": {"eval_strategy": "epoch"},
}
BEST = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
    "metric_for_best_model": "loss",
    "greater_is_better": False,
    "load_best_model_at_end": True,
}


def periodic_sets(daemon: FakeDaemon, count: int) -> dict[int, Path]:
    """The sets by step, without that of the end of the run."""

    def found() -> dict[int, Path]:
        sealed = [each for each in daemon.all_of(Sealed) if each.directory]
        return {each.step: daemon.staging / each.directory for each in reversed(sealed)}

    until(lambda: len(found()) >= count, what=f"{count} sets")
    assert len(found()) == count
    return found()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("evaluation", EVALUATIONS.values(), ids=EVALUATIONS)
def test_a_run_resumes_at_every_step(
    tmp_path: Path, daemon: FakeDaemon, restore_from: Restore, evaluation: dict[str, Any]
) -> None:
    """Plateau scheduler, best model, early stopping, log and own checkpoints are those of one long run."""
    options = {**evaluation, **BEST, "save_strategy": evaluation["eval_strategy"], "save_steps": 2}
    output = tmp_path / "output"
    whole = Run(
        output,
        EarlyStoppingCallback(4),
        attach={"every_steps": 1, "socket": daemon.path},
        **options,
    )
    assert whole.trainer.state.global_step == LAST_STEP
    assert whole.trainer.state.best_model_checkpoint
    for step, directory in periodic_sets(daemon, LAST_STEP).items():
        restore_from(directory)
        shutil.rmtree(output)  # another VM has none of the Trainer's own checkpoints
        again = Run(output, EarlyStoppingCallback(4), **options)
        assert again.log == whole.log, f"resumed from step {step}"
        assert again.weights == whole.weights, f"resumed from step {step}"
        # What is due at the step of the checkpoint comes after the checkpoint.
        assert again.calls.calls == [call for call in whole.calls.calls if call[1] >= step]


def test_a_checkpoint_in_an_evaluation_is_one_of_the_step_before_it(
    tmp_path: Path, daemon: FakeDaemon, restore_from: Restore
) -> None:
    """The evaluation draws random numbers; the resumed run draws the same ones, and evaluates once."""
    options = {**EVALUATIONS["by-epoch"], **BEST, "save_strategy": "epoch"}
    whole = Run(
        tmp_path / "whole",
        SaveInEvaluation(STEPS_OF_EPOCH),
        attach={"socket": daemon.path},
        **options,
    )
    restore_from(periodic_sets(daemon, 2)[STEPS_OF_EPOCH])
    again = Run(tmp_path / "again", **options)
    assert again.log == whole.log
    assert again.weights == whole.weights
    # The callbacks had already seen the end of the epoch.
    assert (
        again.calls.calls == [call for call in whole.calls.calls if call[1] >= STEPS_OF_EPOCH][1:]
    )


@pytest.mark.parametrize("from_step", [True, False], ids=["killed-after-its-last-step", "ended"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 5, **EVALUATIONS["by-step"]},
        {**EVALUATIONS["by-step"], **BEST, "save_strategy": "steps", "save_steps": 2},
    ],
    ids=["max-steps", "early-stopping"],
)
def test_a_finished_run_does_not_train_again(
    tmp_path: Path,
    daemon: FakeDaemon,
    restore_from: Restore,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    *,
    from_step: bool,
) -> None:
    """A start from the last checkpoint of a finished run reports that in one line, and trains no step."""
    stopping = [EarlyStoppingCallback(1, 9.0)] if "metric_for_best_model" in options else []
    whole = Run(
        tmp_path / "whole", *stopping, attach={"every_steps": 1, "socket": daemon.path}, **options
    )
    last_step = whole.trainer.state.global_step
    assert last_step < LAST_STEP
    last = periodic_sets(daemon, last_step)[last_step]
    restore_from(last if from_step else daemon.staging / daemon.all_of(Sealed)[-1].directory)
    caplog.clear()
    again = Run(tmp_path / "again", *stopping, **options)
    assert again.trainer.state.global_step == last_step
    assert again.weights == whole.weights
    assert [line for line in caplog.messages if f"finished at step {last_step}" in line]
    longer = Run(tmp_path / "longer", *stopping, **{**options, "max_steps": 6})
    assert longer.trainer.state.global_step == (last_step if stopping else 6)


class Recording(list[Any]):
    """Data that knows in which order its samples were read."""

    read: list[int]

    def __getitem__(self, place: Any) -> Any:
        self.read.append(place)
        return super().__getitem__(place)


def test_batches_that_are_grouped_by_length_resume(
    tmp_path: Path, daemon: FakeDaemon, restore_from: Restore
) -> None:
    """A start in the middle of an epoch has the same order; another epoch has another one."""
    samples = Recording({**item, "input_ids": torch.ones(3)} for item in data(8 * STEPS_OF_EPOCH))
    samples.read = []
    grouped = {
        "train_data": samples,
        "train_sampling_strategy": "group_by_length",
    }
    whole = Run(tmp_path / "whole", attach={"every_steps": 1, "socket": daemon.path}, **grouped)
    count = len(samples)
    first, second = samples.read[-2 * count : -count], samples.read[-count:]
    assert sorted(first) == sorted(second)
    assert first != second
    for step, directory in periodic_sets(daemon, LAST_STEP).items():
        restore_from(directory)
        again = Run(tmp_path / "again", **grouped)
        assert again.weights == whole.weights, f"resumed from step {step}"


class WithoutLength(torch.utils.data.IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from data(self.count)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
            "persistent_workers is",
        ),
        ({"dataloader_num_workers": 1}, ""),
        ({"train_data": WithoutLength(8), "max_steps": 3}, "the data set has no length"),
        ({"train_data": WithoutLength(24), "max_steps": 3}, ""),
    ],
)
def test_data_that_the_trainer_cannot_repeat_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], words: str
) -> None:
    """Workers that live through several epochs, and a second pass over data without a length."""
    Run(tmp_path / "run", attach={"socket": tmp_path / "no-daemon"}, **arguments)
    found = [each for each in caplog.messages if "persistent" in each or "no length" in each]
    assert len(found) == bool(words)
    assert all(words in each for each in found)


def test_random_numbers_of_the_data_set_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A data set that draws in the trainer's process is named in one line; another one is not."""

    class Noisy(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8 * STEPS_OF_EPOCH

        def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
            x = torch.randn(4)
            return {"x": x, "labels": x.sum()}

    nowhere = {"socket": tmp_path / "no-daemon"}
    Run(tmp_path / "plain", attach=nowhere, **EVALUATIONS["by-step"])
    assert "draws random numbers" not in caplog.text
    Run(tmp_path / "noisy", attach=nowhere, train_data=Noisy())
    assert caplog.text.count("draws random numbers") == 1


def test_a_checkpoint_by_each_rank_alone_is_refused(tmp_path: Path) -> None:
    """With ``enable_jit_checkpoint`` the ranks may save different steps: the callback refuses it."""
    with pytest.raises(ValueError, match="turn it off"):
        Run(tmp_path, enable_jit_checkpoint=True)
