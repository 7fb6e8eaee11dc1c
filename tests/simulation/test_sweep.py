# SPDX-License-Identifier: Apache-2.0
"""A sweep over many seeds continues after an interrupt, and starts again with other code."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.simulation import sweep
from testkit.simulation.simulators import MUTANTS, SIMULATORS, Result, known_mutants
from testkit.simulation.sweep import Unit, applied

SEEDS = SIMULATORS["live"].seeds


def played(unit: Unit) -> list[Result]:
    """The second unit has a seed that fails."""
    return [{"seed": SEEDS + 3, "problems": ["SAFE was false"]}] if unit.first == SEEDS else []


def test_a_sweep_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs only the missing units of the same code, and reports each failure again, with its command."""
    file = tmp_path / "done"
    monkeypatch.setattr(sweep, "played", played)
    for code, left_out, already in (("a", "", ""), ("a", "[", "2 of 3"), ("b", "", "")):
        monkeypatch.setattr(sweep, "code", lambda code=code: code)
        if left_out:  # the last line was cut off
            file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]) + left_out)
        assert sweep.run(["live"], 0, 3 * SEEDS, 1, file) == 1
        output = capsys.readouterr().out
        assert ("already" in output) == bool(already)
        assert already in output
        assert f"play live {SEEDS + 3} 1" in output
    assert sweep.run(["fits"], 0, 1, 1, file) == 0


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_fits_the_code(name: str) -> None:
    """A mutant whose line was edited would break the import, and would count as found."""
    for mutant in known_mutants(name):
        compile(applied(mutant), mutant.name, "exec")
