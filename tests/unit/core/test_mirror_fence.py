# SPDX-License-Identifier: Apache-2.0
"""A promoted mirror ends the daemon, whatever the number of its claim; and the limits of copies."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from swansongd.core import limits
from swansongd.core.events import Exit, FenceFound
from swansongd.core.machine import step
from swansongd.core.state import Settings, State
from swansongd.core.transition import EXIT_FENCED
from swansongd.model import Verdict


@pytest.mark.fault("M06")
@pytest.mark.parametrize("several_vms", [False, True])
@pytest.mark.parametrize("number", [3, 7, 1008])
def test_a_foreign_claim_ends_the_daemon(several_vms: bool, number: int) -> None:
    """Over several VMs as well: no later start of the job may continue in the old store."""
    state = replace(
        State(settings=Settings(reserve_s=1.0, signals_trainer=False, several_vms=several_vms)),
        generation=7,
    )
    state, actions = step(state, FenceFound(number, in_mirror=True), 10.0)
    assert Exit(EXIT_FENCED, f"generation {number} has taken the run over") in actions
    assert state.newer_generation == number


def test_an_old_claim_of_the_store_fences_no_vm() -> None:
    """Only a claim that the store lacks counts with any number."""
    state = replace(State(settings=Settings(reserve_s=1.0, signals_trainer=False)), generation=7)
    state, actions = step(state, FenceFound(3), 10.0)
    assert state.newer_generation is None
    assert not [action for action in actions if isinstance(action, Exit)]


@pytest.mark.parametrize(
    ("verdict", "is_sending", "may_copy", "rate"),
    [
        (None, False, True, 5.0),
        (None, True, False, 5.0),
        ("open", False, False, None),
        (Verdict.SAFE, False, True, None),
        (Verdict.SAFE, True, False, None),
    ],
)
def test_copies_give_way_to_checkpoints(
    verdict: Any, is_sending: bool, may_copy: bool, rate: float | None
) -> None:
    """They pause for a flush and until the verdict; after it they have no limit of the rate."""
    decided = None if verdict == "open" else verdict
    evacuation = None if verdict is None else SimpleNamespace(verdict=decided)
    state: Any = SimpleNamespace(evacuation=evacuation, flight=object() if is_sending else None)
    assert limits.may_mirror(state) is may_copy
    assert limits.mirror_rate_bytes_per_s(state, 5.0) == rate
