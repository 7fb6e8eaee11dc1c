# SPDX-License-Identifier: Apache-2.0
"""Commands for a run that the store does not have: a mistyped name is an error, not an empty answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from swansong_tools.commands import main

from testkit.committed import commit, configuration, file_store


@pytest.mark.parametrize(
    "command", [["ls"], ["prune"], ["prune", "--dry-run", "--json"], ["loss"], ["report"]]
)
def test_a_run_that_does_not_exist_is_an_error(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 17 with the name of the run; the other runs of the store do not count."""
    commit(file_store(tmp_path / "bucket"), {"a": b"x"})
    config = configuration(tmp_path)
    words = ["--config", str(config), *command]
    assert main.main([*words, "--run", "other"]) == 17
    out, err = capfd.readouterr()
    assert out == ""
    assert "has no run other" in err
    assert main.main(words) == 0
