# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric: the ``state`` of ``fabric.save()`` as a training state.

::

    import swansong.fabric

    model, optimizer = fabric.setup(model, optimizer)
    loader = ResumableLoader(fabric.setup_dataloaders(loader))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    guard = swansong.fabric.attach(fabric, state)
    guard.restore()

A checkpoint contains the same state as :class:`swansong.torch.TrainingState`, the plain values of ``state``,
and the scaler of Fabric's precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import swansong
from swansong.rank_files import RandomSource
from swansong.torch import TrainingState

try:
    from lightning.fabric import Fabric, strategies
except ImportError:  # the older name of the package
    from lightning_fabric import Fabric, strategies

__all__ = ["attach"]

_STRATEGIES = (
    strategies.SingleDeviceStrategy,
    strategies.DDPStrategy,
    strategies.ModelParallelStrategy,
)


def attach(
    fabric: Fabric,
    state: dict[str, Any],
    *,
    resize: Callable[[str, list[Any]], Any] | None = None,
    **options: Any,
) -> swansong.Guard:
    """Attach to the daemon, as :func:`swansong.attach`, after ``fabric.launch()`` and ``fabric.setup()``.

    Args:
        fabric: its strategy and its precision are saved with the state.
        state: objects and plain values by name, as for ``fabric.save()``.  As ``fabric.load()``, a restore
            changes the objects, and replaces the plain values in this dictionary.
        resize: see :class:`swansong.torch.TrainingState`.
        options: of :func:`swansong.attach`, such as ``every_steps``.

    Raises:
        TypeError: the state of Fabric's strategy, or an object, cannot be saved.
        ValueError: an object has a reserved name.
    """
    if not isinstance(fabric.strategy, _STRATEGIES):
        raise TypeError(
            f"the state of {type(fabric.strategy).__name__} cannot be saved by rank; one device, DDP and"
            " ModelParallelStrategy (FSDP2) are supported"
        )
    items = {name: _unwrap_loader(item) for name, item in state.items()}
    for name, item in items.items():
        if hasattr(item, "dataset") and not hasattr(item, "state_dict"):
            raise TypeError(
                f"state[{name!r}] has no state_dict(), so a resumed run would begin its epoch again; wrap it:"
                " ResumableLoader(fabric.setup_dataloaders(...))"
            )
    objects = {name: item for name, item in items.items() if _is_object(item)}
    names = [name for name in state if name not in objects]
    model = objects.pop("model", None)
    rest = _Rest(fabric, state, names)
    return swansong.attach(TrainingState(model, **objects, resize=resize, fabric=rest), **options)


class _Rest:
    """The plain values of a state, and the scaler of Fabric's precision."""

    def __init__(self, fabric: Fabric, state: dict[str, Any], names: list[str]) -> None:
        self._precision = fabric.strategy.precision
        self._state = state
        self._names = names

    def state_dict(self) -> dict[str, Any]:
        values = {name: self._state[name] for name in self._names}
        return {"values": values, "precision": self._precision.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        missing = set(self._names) - saved["values"].keys()
        if missing:
            raise KeyError(f"the checkpoint contains no value for {sorted(missing)}")
        self._state.update({name: saved["values"][name] for name in self._names})
        self._precision.load_state_dict(saved["precision"])


def _unwrap_loader(item: Any) -> Any:
    """Return the stateful loader that ``fabric.setup_dataloaders()`` has hidden."""
    inner = vars(item).get("_dataloader") if hasattr(item, "__dict__") else None
    return inner if hasattr(inner, "state_dict") else item


def _is_object(item: Any) -> bool:
    return hasattr(item, "load_state_dict") or RandomSource.of(item) is not None
