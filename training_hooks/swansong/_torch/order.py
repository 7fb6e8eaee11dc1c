# SPDX-License-Identifier: Apache-2.0
"""Detects, in the first steps, a call of ``guard.step()`` that is not the last line of the loop body."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from swansong._log import log
from swansong._torch.change_counts import count_of
from swansong._torch.kinds import Hooked, optimizers_of

INTERVALS = 3
"""Number of intervals between two steps after which the order is clear."""
STEPS_MAX = 20
"""Number of steps after which the search ends, also with fewer intervals."""


class OrderWatch(Hooked):
    """Compares the counters of all objects between ``guard.step()`` and the next optimizer step.

    An object that changes there is missing in the checkpoint of that step, and a resume skips the change.
    Two intervals in a row must show it: a scheduler may step once at the end of an epoch.  An object that
    also changes before the first optimizer step belongs to the start of the loop body.  A resume repeats it.

    The watch sees optimizers, the parameters of modules, schedulers, gradient scalers, and averages that
    count their updates.  It does not see an object that changes only at some steps.

    Args:
        objects: of the training state, by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = {name: item for name, item in objects.items() if name != "loader"}
        self._loader = objects.get("loader")
        self._hooks = []
        for name, optimizer in optimizers_of(objects).items():
            # An optimizer around another one may have no hooks.
            with contextlib.suppress(AttributeError, TypeError):
                hook = functools.partial(self._before_step, name)
                self._hooks.append(optimizer.register_step_pre_hook(hook))
        self.begin()

    @property
    def has_begun(self) -> bool:
        """Whether an optimizer has stepped since :meth:`begin`."""
        return self._anchor is not None

    @property
    def is_new(self) -> bool:
        """Whether ``guard.step()`` was not called since :meth:`begin`."""
        return self._reports == 0

    def begin(self) -> None:
        """Begin again: all objects have their state of before the first step."""
        self._anchor: str | None = None
        """The optimizer that steps first in the loop body."""
        self._begun_with = self._counters()
        self._leading: set[str] = set()
        """Objects that change before the first optimizer step."""
        self._at_report: dict[str, Any] | None = None
        self._epoch: Any = None
        self._late: dict[str, int] = {}
        """For each object, the number of intervals in a row in which it changed."""
        self._intervals = self._reports = 0

    def report(self) -> bool:
        """Note that ``guard.step()`` is called; returns whether the watch continues."""
        self._reports += 1
        if self._intervals >= INTERVALS or self._reports >= STEPS_MAX:
            self.end()
            return False
        self._at_report, self._epoch = self._counters(), getattr(self._loader, "epoch", None)
        return True

    def _before_step(self, name: str, *_: Any) -> None:
        if self._anchor is None:
            self._anchor = name
            self._leading = _changed(self._begun_with, self._counters())
        if name == self._anchor and self._at_report is not None:
            before, self._at_report = self._at_report, None
            if getattr(self._loader, "epoch", None) == self._epoch:
                self._judge(_changed(before, self._counters()) - self._leading - {name})

    def _judge(self, late: set[str]) -> None:
        self._intervals += 1
        self._late = {name: self._late.get(name, 0) + 1 for name in late}
        names = sorted(name for name, count in self._late.items() if count == 2)
        if names:
            log.warning(
                "%s changed after guard.step() and before the next optimizer step, twice in a row: the"
                " checkpoint of a step does not contain this change; call guard.step() last in the loop"
                " body",
                " and ".join(names),
            )
            self._intervals = INTERVALS

    def _counters(self) -> dict[str, Any]:
        return {name: count_of(item) for name, item in self._objects.items()}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    return {name for name, count in after.items() if before[name] != count}
