# SPDX-License-Identifier: Apache-2.0
"""Accelerate: all that ``accelerator.prepare()`` was given, as one training state.

::

    import swansong.accelerate

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    loader = ResumableLoader(loader)
    guard = swansong.accelerate.attach(accelerator, loader=loader)
    step = guard.restore()

Saved is what :class:`swansong.torch.TrainingState` saves, and with it the accelerator's place in gradient
accumulation and all that was given to ``register_for_checkpointing()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

import swansong
from swansong._torch.parts import Parts
from swansong.torch import TrainingState

__all__ = ["attach"]

_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def attach(
    accelerator: Accelerator,
    *,
    loader: Any = None,
    resize: Callable[[str, list[Any]], Any] | None = None,
    **options: Any,
) -> swansong.Guard:
    """As :func:`swansong.attach`; call it after ``accelerator.prepare()``.

    Args:
        accelerator: whose models, optimizers and schedulers are to be saved.
        loader: a prepared loader in a :class:`swansong.torch.ResumableLoader`, or one that is stateful
            by itself.
        resize: see :class:`swansong.torch.TrainingState`.
        options: of :func:`swansong.attach`, such as ``every_steps``.

    Raises:
        TypeError: a plugin whose state cannot be saved by rank.
        ValueError: nothing is prepared yet.
    """
    kind = accelerator.distributed_type
    is_fsdp2 = kind == DistributedType.FSDP and accelerator.is_fsdp2
    if kind not in _KINDS and not is_fsdp2:
        raise TypeError(
            f"{kind} keeps its state in a way of its own; this works with one process, DDP and FSDP2"
        )
    if not accelerator._models:  # noqa: SLF001 - here and below: it offers them only to save_state()
        raise ValueError("attach() comes after accelerator.prepare()")
    named = {
        **_named("model", accelerator._models),  # noqa: SLF001
        **_named("optimizer", accelerator._optimizers),  # noqa: SLF001
        **_named("registered", accelerator._custom_objects),  # noqa: SLF001
    }
    schedulers = Parts([_Place(accelerator), *accelerator._schedulers])  # noqa: SLF001
    state = TrainingState(
        scheduler=schedulers, scaler=accelerator.scaler, loader=loader, resize=resize, **named
    )
    return swansong.attach(state, **options)


class _Place:
    """Where in gradient accumulation the accelerator is."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]


def _named(name: str, objects: list[Any]) -> dict[str, Any]:
    return {f"{name}_{place}" if place else name: item for place, item in enumerate(objects)}
