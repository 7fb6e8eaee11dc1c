# SPDX-License-Identifier: Apache-2.0
"""A failing history shrinks to the choices that it needs."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from testkit.simulation import shrink
from testkit.simulation.bucket import Broken
from testkit.simulation.histories import HISTORIES
from testkit.simulation.simulators import load
from testkit.simulation.sweep import ROOT


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
    run = load("breaks")
    script = shrink.shrunk(run, 3)
    (problem,) = shrink.replayed(run, 3, script)[0]["problems"]
    assert problem.startswith("Broken: S: VM b lost step")
    assert len(script) <= 4
    for choice in script:
        rest = {each: value for each, value in script.items() if each != choice}
        assert not shrink.replayed(run, 3, rest)[0]["problems"]


def test_a_seed_that_passes_is_refused() -> None:
    """There is nothing to shrink."""
    with pytest.raises(ValueError, match="seed 1 does not fail"):
        shrink.shrunk(load("fits"), 1)


REPLAYED = """
import sys
import testkit.simulation.__main__
from testkit.simulation.simulators import isolated, load
played = set(sys.modules)
from testkit.simulation.shrink import replayed
imported = [name for name in set(sys.modules) - played if not name.startswith("testkit.")]
assert not imported, f"they create locks before the schedule, which differs from play: {imported}"
run = load(sys.argv[1])
noted, choices = replayed(run, int(sys.argv[2]), None)
again, same = replayed(run, int(sys.argv[2]), choices)
assert again == noted == isolated(int(sys.argv[2]), run)
assert list(same.items()) == list(choices.items()) != []
calm, none = replayed(run, int(sys.argv[2]), {})
assert not calm["problems"] and not none, calm
"""


@pytest.mark.parametrize(("simulator", "seed"), [("live", 3), ("jobs", 2)])
def test_a_script_with_all_choices_is_the_run_itself(simulator: str, seed: int) -> None:
    """Else the failure of a seed would get lost before it is shrunk.  Without choices nothing fails.

    A history on its own clock, and threads on the simulated one: jobs run in the world of production.
    """
    subprocess.run(
        [sys.executable, "-c", REPLAYED, simulator, str(seed)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        cwd=ROOT,
        timeout=300,
        check=True,
    )
