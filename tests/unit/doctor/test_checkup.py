# SPDX-License-Identifier: Apache-2.0
"""Doctor's checks in another process, on a machine that lacks what they need."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from swansong_tools.doctor.checkup import check
from swansong_tools.doctor.installation import Options, ask_nothing
from swansong_tools.doctor.sandbox import ProcessIdentity


def test_without_a_temporary_directory_the_other_checks_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A read-only root is a finding with a fix, and the checks of daemon and trainers follow."""
    (tmp_path / "staging").mkdir()
    config = tmp_path / "swansong.toml"
    config.write_text(
        f'[run]\nname = "r"\n[staging]\npath = "{tmp_path}/staging"\n'
        f'[store]\nurl = "file://{tmp_path}/store"\n[sources]\ncloud = "none"\n'
    )
    monkeypatch.setattr(ProcessIdentity, "is_this_process", lambda _: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    found = {each.name: each for each in check(config, ask_nothing, Options())}
    assert found["as the daemon"].level == "failure"
    assert "missing" in found["as the daemon"].found
    assert found["as the daemon"].fix == "# set TMPDIR to a writable directory"
    assert "daemon" in found
