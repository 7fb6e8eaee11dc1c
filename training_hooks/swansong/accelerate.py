# SPDX-License-Identifier: Apache-2.0
"""Accelerate: the objects of ``accelerator.prepare()`` as one training state.

::

    import swansong.accelerate

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    loader = ResumableLoader(loader)
    guard = swansong.accelerate.attach(accelerator, loader=loader)
    step = guard.restore()

A checkpoint contains the same state as :class:`swansong.torch.TrainingState`, the accelerator's position in
gradient accumulation, and the objects of ``register_for_checkpointing()``.
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
    """Attach to the daemon, as :func:`swansong.attach`, after ``accelerator.prepare()``.

    Args:
        accelerator: its models, optimizers and schedulers are saved.
        loader: a prepared loader in a :class:`swansong.torch.ResumableLoader`, or a stateful loader.
        resize: see :class:`swansong.torch.TrainingState`.
        options: of :func:`swansong.attach`, such as ``every_steps``.

    Raises:
        TypeError: the state of the accelerator's plugin cannot be saved by rank.
        ValueError: no model is prepared yet.
    """
    kind = accelerator.distributed_type
    is_fsdp2 = kind == DistributedType.FSDP and accelerator.is_fsdp2
    if kind not in _KINDS and not is_fsdp2:
        raise TypeError(
            f"the state of {kind} cannot be saved by rank; one process, DDP and FSDP2 are supported"
        )
    if not accelerator._models:  # noqa: SLF001 - here and below: only save_state() uses them publicly
        raise ValueError("call attach() after accelerator.prepare()")
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
    """The accelerator's position in gradient accumulation."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]


def _named(name: str, objects: list[Any]) -> dict[str, Any]:
    return {f"{name}_{place}" if place else name: item for place, item in enumerate(objects)}
