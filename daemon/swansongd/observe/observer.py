# SPDX-License-Identifier: Apache-2.0
"""The interface of everything that watches the decisions: metrics, notifications, samples of a flush."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from swansongd.core.events import Action
from swansongd.core.state import State
from swansongd.observe.facts import Observed


class Observation(NamedTuple):
    """One decision of the loop, after its actions were carried out: the input of each observer."""

    before: State
    after: State
    event: Observed
    actions: Sequence[Action]
    now_mono_s: float


class Observer(Protocol):
    """Sees each decision, in the thread of the decision loop.

    An observer does no IO and never blocks.  It takes microseconds, and gives longer work to another thread.
    """

    def observe(self, observation: Observation) -> None:
        """Take note of one decision."""
