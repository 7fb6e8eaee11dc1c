# SPDX-License-Identifier: Apache-2.0
"""Logged values of a ``Trainer``, which Lightning's own checkpoints leave out.

Schedulers, early stopping and the choice of the best checkpoint depend on them: the last values of all
metrics, the averages over the current epoch, and the state of ``torchmetrics`` in the module.
"""

from __future__ import annotations

import builtins
from typing import Any

import torch
from torchmetrics import Metric

from swansong._lightning import pl

_KINDS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_FACTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch"),
    *("enable_graph", "add_dataloader_idx", "metric_attribute"),
)
_move = pl.utilities.move_data_to_device
_SUMS = ("value", "cumulated_batch_size")


def take_logged(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the last values of all metrics, and the sums of the current epoch."""
    connector = trainer._logger_connector  # noqa: SLF001 - here and below: it has no public name
    epoch_loop = trainer.fit_loop.epoch_loop
    return {
        "last": {kind: dict(getattr(connector, kind)) for kind in _KINDS},
        "epoch": [_take(each) for each in epoch_loop._results.values() if not each.has_reset],  # noqa: SLF001
        "module": {
            name: {"state": dict(metric.metric_state), "updates": metric.update_count}
            for name, metric in _metrics_of(trainer).items()
        },
    }


def set_logged(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Set the values that :func:`take_logged` returned."""
    connector = trainer._logger_connector  # noqa: SLF001
    for kind, values in state["last"].items():
        getattr(connector, kind).update(values)
    for name, metric in _metrics_of(trainer).items():
        if name in state["module"]:
            saved = state["module"][name]
            for key, value in saved["state"].items():
                setattr(metric, key, _move(value, metric.device))
            metric._update_count, metric._computed = saved["updates"], None  # noqa: SLF001
    for saved in state["epoch"]:
        _set(trainer, saved)


def _take(result: Any) -> dict[str, Any]:
    meta, reduce = result.meta, result.meta.reduce_fx
    return {
        **{fact: getattr(meta, fact) for fact in _FACTS},
        "reduce": reduce.__name__,
        "is_of_torch": reduce is getattr(torch, reduce.__name__),
        "is_synced": meta.sync.should,
        "is_of_rank_zero": meta.sync.rank_zero_only,
        "updates": result.update_count,
        "last": result._forward_cache,  # noqa: SLF001
        "sums": {key: getattr(result, key) for key in _SUMS if _is_tensor(result, key)},
    }


def _set(trainer: pl.Trainer, saved: dict[str, Any]) -> None:
    results, device = trainer.fit_loop.epoch_loop._results, trainer.strategy.root_device  # noqa: SLF001
    sums = _move(saved["sums"], device)
    reduce = saved["reduce"]
    results.log(
        **{fact: saved[fact] for fact in _FACTS},
        value=sums["value"] if sums else _metrics_of(trainer)[saved["metric_attribute"]],
        reduce_fx=getattr(torch if saved["is_of_torch"] else builtins, reduce),
        sync_dist_fn=trainer.strategy.reduce,
        rank_zero_only=saved["is_of_rank_zero"],
        batch_size=1,
    )
    result = results[f"{saved['fx']}.{saved['name']}"]
    result.meta.sync.should = saved["is_synced"]  # not earlier: log() would communicate
    for key, total in sums.items():
        setattr(result, key, total)
    result._forward_cache = _move(saved["last"], device)  # noqa: SLF001
    result._update_count, result._computed = saved["updates"], None  # noqa: SLF001


def _is_tensor(result: Any, key: str) -> bool:
    return isinstance(getattr(result, key, None), torch.Tensor)


def _metrics_of(trainer: pl.Trainer) -> dict[str, Metric]:
    named = trainer.lightning_module.named_modules()
    return {name: module for name, module in named if isinstance(module, Metric)}
