# SPDX-License-Identifier: Apache-2.0
"""A ``DataLoader`` that resumes in the middle of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

log = logging.getLogger("swansong")


class ResumableLoader:
    """Yields the batches of ``loader``, and saves the position in the epoch.

    After a restore, the first epoch begins with the generator state that it had before.  Batches that were
    already yielded are loaded again and dropped.  Samplers and workers then have the same state, bit by bit.
    This costs the time to load those batches.  torchdata's ``StatefulDataLoader`` avoids it for data sets
    that support it.

    Each ``iter()`` is one epoch.  Begin the next one only after the last one is exhausted or abandoned.
    All other attributes, such as ``dataset`` and ``batch_size``, are those of ``loader``.

    Args:
        loader: a ``torch.utils.data.DataLoader``.  Its ``set_epoch``, and that of its sampler, is called if
            it exists.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = 0
        """Number of the current epoch or, between epochs, of the next one; counted from 0."""
        self.batches = 0
        """Number of batches of this epoch that were yielded."""
        self._begun_with: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._is_restored = False

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the loader, such as ``dataset`` and ``batch_size``."""
        if name == "loader":  # not set yet, in copy or pickle
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        own = getattr(self.loader, "generator", None)
        was_abandoned = self._begun_with is not None and not self._is_restored
        if was_abandoned:
            if self.batches <= 1:
                log.warning(
                    "epoch %s of the loader was abandoned after %s batches; to inspect a batch, use"
                    " next(iter(loader.loader))",
                    self.epoch,
                    self.batches,
                )
            self.end_epoch()
        ordered: tuple[Any, ...] = (self.loader, getattr(self.loader, "sampler", None))
        for each in ordered:
            if hasattr(each, "set_epoch"):
                each.set_epoch(self.epoch)
        if self._begun_with is None:
            self._begun_with = (torch.get_rng_state(), own.get_state() if own is not None else None)
            batches = iter(self.loader)
        else:
            now = torch.get_rng_state()
            torch.set_rng_state(self._begun_with[0])
            if own is not None and self._begun_with[1] is not None:
                own.set_state(self._begun_with[1])
            batches = iter(self.loader)
            for _ in range(self.batches):
                next(batches, None)
            torch.set_rng_state(now)
        self._is_restored = False
        for batch in batches:
            self.batches += 1
            yield batch
        self.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of its yielded batches, and the generator states at its begin."""
        return {"epoch": self.epoch, "batches": self.batches, "begun_with": self._begun_with}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this state at the next ``iter()``."""
        self.epoch, self.batches = state["epoch"], state["batches"]
        self._begun_with = state["begun_with"]
        self._is_restored = self._begun_with is not None

    def end_epoch(self) -> None:
        """End the epoch, for a framework that does not call ``next()`` after the last batch."""
        self.epoch += 1
        self.batches = 0
        self._begun_with = None
        self._is_restored = False
