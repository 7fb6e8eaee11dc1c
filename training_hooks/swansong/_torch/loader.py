# SPDX-License-Identifier: Apache-2.0
"""Gives any ``DataLoader`` the means to go on in the middle of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

log = logging.getLogger("swansong")


class ResumableLoader:
    """Yields what ``loader`` yields, and knows how far it is.

    After a restore the first epoch begins as it began then, with torch's generator of that moment, and
    batches that were seen already are fetched again and dropped: samplers and workers are then where they
    were, bit for bit.  That costs the time to load them; torchdata's ``StatefulDataLoader`` avoids it
    for data sets that support it.

    Args:
        loader: a ``torch.utils.data.DataLoader``.  If it or its sampler has ``set_epoch``, that is called.

    Each ``iter()`` is one epoch; begin the next one only when one is exhausted or given up.  Whatever else
    is asked of it (``dataset``, ``batch_size``) the loader within answers.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = 0
        """Number of the epoch that is under way, or comes next."""
        self.batches = 0
        """How many batches of it were yielded."""
        self._begun_with: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._is_restored = False

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """What is asked of the loader itself: ``dataset``, ``batch_size``, ``sampler``."""
        if name == "loader":  # not made yet: by copy or pickle
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        own = getattr(self.loader, "generator", None)
        was_given_up = self._begun_with is not None and not self._is_restored
        if was_given_up:
            if self.batches <= 1:
                log.warning(
                    "epoch %s of the loader was given up after %s batches; for a mere look at the data ask"
                    " the loader within: next(iter(loader.loader))",
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
        """The epoch, how many of its batches were yielded, and the generators that it began with."""
        return {"epoch": self.epoch, "batches": self.batches, "begun_with": self._begun_with}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next ``iter()`` goes on from there."""
        self.epoch, self.batches = state["epoch"], state["batches"]
        self._begun_with = state["begun_with"]
        self._is_restored = self._begun_with is not None

    def end_epoch(self) -> None:
        """The epoch is over, though nobody asked for a batch after the last one."""
        self.epoch += 1
        self.batches = 0
        self._begun_with = None
        self._is_restored = False
