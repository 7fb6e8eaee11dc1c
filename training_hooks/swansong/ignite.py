# SPDX-License-Identifier: Apache-2.0
"""PyTorch-Ignite: saves a trainer's engine with its objects at a notice, and resumes it at that iteration.

::

    import swansong.ignite

    trainer = Engine(train_step)
    loader = ResumableLoader(DataLoader(...))
    guard = swansong.ignite.attach(trainer, {"model": model, "optimizer": optimizer}, loader=loader)
    guard.restore()
    trainer.run(loader, max_epochs=3)

A checkpoint contains the same state as :class:`swansong.torch.TrainingState`, and the engine's iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.engine.deterministic import DeterministicEngine
from ignite.handlers import ParamScheduler
from ignite.metrics import Metric

import swansong
from swansong._log import log
from swansong.torch import ResumableLoader, TrainingState

__all__ = ["attach"]


def attach(
    trainer: Engine,
    to_save: Mapping[str, Any],
    *,
    loader: Any = None,
    accumulation: int = 1,
    resize: Callable[[str, list[Any]], Any] | None = None,
    **options: Any,
) -> swansong.Guard:
    """Attach to the daemon, as :func:`swansong.attach`, and report the iterations of ``trainer``.

    A checkpoint is taken after all handlers of ``ITERATION_COMPLETED``.  The checkpoint of an epoch's last
    iteration is taken after all handlers of ``EPOCH_COMPLETED``, so a resumed run begins the next epoch.

    Args:
        trainer: the engine that trains.
        to_save: objects by name, as for ``ignite.handlers.Checkpoint``: model, optimizer, schedulers, and
            handlers with a state, such as ``EarlyStopping``.
        loader: a :class:`swansong.torch.ResumableLoader`, or a stateful loader, that ``trainer.run`` gets.
        accumulation: iterations for each optimizer step.  Only the state between two of these steps is saved.
        resize: see :class:`swansong.torch.TrainingState`.
        options: of :func:`swansong.attach`, such as ``every_steps``.

    Raises:
        TypeError: ``trainer`` is a ``DeterministicEngine`` or no engine, or an object cannot be saved.
        ValueError: ``accumulation`` is not positive; or, in ``trainer.run``, the data has no position.
    """
    if not isinstance(trainer, Engine):
        raise TypeError(f"attach() needs the engine first, not a {type(trainer).__qualname__}")
    if isinstance(trainer, DeterministicEngine):
        raise TypeError(
            "a DeterministicEngine that resumes in an epoch shuffles the rest of it again; use an Engine"
            " with a ResumableLoader"
        )
    if accumulation < 1:
        raise ValueError("accumulation= must be positive")
    objects = {name: item for name, item in to_save.items() if item is not trainer}
    _warn_about_metrics(trainer, objects)
    run = _EngineRun(trainer, loader, accumulation)
    state = TrainingState(
        objects.pop("model", None), loader=loader, resize=resize, engine=run, **objects
    )
    run.guard = swansong.attach(state, **options)
    trainer.add_event_handler(Events.STARTED, run.start)
    return run.guard


class _EngineRun:
    """The engine's iteration, what decides how its run continues, and the handlers that report it."""

    guard: swansong.Guard

    def __init__(self, trainer: Engine, loader: Any, accumulation: int) -> None:
        self._trainer, self._loader, self._accumulation = trainer, loader, accumulation
        self._restored: dict[str, Any] | None = None
        self._is_due = False
        """Whether the last iteration is to be reported."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "engine": dict(self._trainer.state_dict()),
            "terminates": bool(self._trainer.should_terminate),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.load_state_dict(state["engine"])
        self._restored = state

    def start(self, trainer: Engine) -> None:
        """Add the other handlers, and continue the restored run."""
        # Here, because handlers that the script adds before run() must come first.
        handlers = {
            Events.ITERATION_COMPLETED: self._end_iteration,
            Events.EPOCH_COMPLETED: self._end_epoch,
            Events.TERMINATE_SINGLE_EPOCH: self._warn_about_epoch,
            Events.TERMINATE: self._report,
            Events.COMPLETED: self._complete,
        }
        for event, handler in handlers.items():
            if trainer.has_event_handler(handler, event):
                trainer.remove_event_handler(handler, event)
            trainer.add_event_handler(event, handler)
        self._check(trainer)
        restored, self._restored = self._restored, None
        if restored is not None:
            self._resume(trainer, restored)

    def _check(self, trainer: Engine) -> None:
        data = trainer.state.dataloader
        if data is not None and data is not self._loader:
            raise ValueError(
                "trainer.run() got other data than attach(loader=...), so a resumed run would begin its epoch"
                " again; pass the same ResumableLoader to both"
            )
        handlers = trainer._event_handlers[Events.EPOCH_STARTED]  # noqa: SLF001 - it has no public name
        owners = [getattr(handler, "__self__", handler) for handler, _, _ in handlers]
        kinds = (ParamScheduler, torch.optim.lr_scheduler.LRScheduler)
        if any(isinstance(owner, kinds) for owner in owners):
            raise ValueError(
                "a scheduler steps at EPOCH_STARTED, which a run that resumes in an epoch fires again;"
                " attach the scheduler to EPOCH_COMPLETED"
            )

    def _resume(self, trainer: Engine, restored: dict[str, Any]) -> None:
        state, engine = trainer.state, restored["engine"]
        iteration, length = engine["iteration"], engine["epoch_length"]
        # run() starts a finished engine again from iteration 0.
        state.iteration, state.epoch = iteration, iteration // length if length else 0
        if restored["terminates"]:
            trainer.terminate()
        is_over = trainer.should_terminate or trainer._is_done(state)  # noqa: SLF001
        if is_over and not self.guard.finished:  # the guard has logged the end of a finished run
            log.warning("the run finished at iteration %s: it does not train again", iteration)

    def _end_iteration(self, trainer: Engine) -> None:
        iteration, length = trainer.state.iteration, trainer.state.epoch_length
        self._is_due = iteration % self._accumulation == 0
        # A resume cannot fire EPOCH_COMPLETED: its handlers may read the last batch and its output.
        if not length or iteration % length:
            self._report(trainer)

    def _end_epoch(self, trainer: Engine) -> None:
        # ignite does not call next() after the last batch, so the loader does not see the end.
        loader = self._loader
        if isinstance(loader, ResumableLoader) and loader.is_at_last_batch:
            loader.end_epoch()
        self._report(trainer)

    def _report(self, trainer: Engine) -> None:
        if self._is_due:
            self._is_due = False
            self.guard.step(trainer.state.iteration, loss=_loss(trainer.state.output))
            if self.guard.should_stop:
                trainer.terminate(skip_completed=True)

    def _warn_about_epoch(self, _trainer: Engine, iter_counter: int) -> None:
        log.warning(
            "terminate_epoch() ended an epoch after %s iterations: a resumed run differs, because an engine"
            " counts epochs by iterations",
            iter_counter,
        )

    def _complete(self, trainer: Engine) -> None:
        self._report(trainer)
        self.guard.finish()


def _warn_about_metrics(trainer: Engine, objects: Mapping[str, Any]) -> None:
    events = (Events.STARTED, Events.EPOCH_STARTED)
    for name, item in objects.items():
        if isinstance(item, Metric) and any(
            trainer.has_event_handler(item.started, event) for event in events
        ):
            log.warning(
                "ignite resets the metric %s at each start of a run, so its values differ after a resume;"
                " the training is equal if nothing in it reads them",
                name,
            )


def _loss(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else None
    return output if isinstance(output, float) else None
