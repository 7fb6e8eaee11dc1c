# SPDX-License-Identifier: Apache-2.0
"""A failing history shrinks to the choices that it needs."""

from __future__ import annotations

import random

import pytest

from testkit.simulation import shrink
from testkit.simulation.bucket import Broken
from testkit.simulation.histories import HISTORIES, failure_of


def breaks(seed: int) -> None:
    """Fails if a store has an outage while one of its three VMs gets a notice of at most 30 s."""
    weather, world = random.Random(f"weather {seed}"), random.Random(seed)
    for _ in range(200):
        vm = weather.choice(("a", "b", "c"))
        nonce = world.getrandbits(32)
        is_out = world.random() < 0.3
        if is_out and vm == "b" and weather.uniform(0, 120) < 30:
            raise Broken(f"S: VM b lost step {nonce}")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HISTORIES, "breaks", breaks)


def test_each_choice_of_a_script_is_needed() -> None:
    """The script fails in the same way, and no longer with any of its choices left out."""
    script = shrink.shrunk("breaks", 3)
    assert shrink.replayed("breaks", 3, script).startswith("Broken: S: VM b lost step")
    assert len(script) <= 4
    for choice in script:
        rest = {each: value for each, value in script.items() if each != choice}
        assert not shrink.replayed("breaks", 3, rest)


def test_a_script_with_all_choices_is_the_run_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the failure of a seed would get lost before it is shrunk."""
    failure = failure_of("breaks", 3)
    monkeypatch.setattr(shrink, "RUNS_MAX", 0)
    assert shrink.replayed("breaks", 3, shrink.shrunk("breaks", 3)) == failure != ""


def test_a_seed_that_passes_is_refused() -> None:
    """There is nothing to shrink."""
    with pytest.raises(ValueError, match="seed 1 does not fail"):
        shrink.shrunk("fits", 1)
