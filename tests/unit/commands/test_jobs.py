# SPDX-License-Identifier: Apache-2.0
"""Several jobs on one VM: status and doctor name the other ones, each with the command for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from swansong_tools.commands import jobs, main
from swansong_tools.commands.view.once import print_status

from testkit.committed import configuration
from testkit.status_picture import status


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration that commands read by default, which does not exist; job ``b`` has one."""
    path = tmp_path / "swansong.toml"
    monkeypatch.setattr(jobs, "DEFAULT_PATH", path)
    (tmp_path / "b").mkdir()
    configuration(tmp_path / "b")
    return path


def test_the_jobs_of_a_vm_know_each_other(first: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A configuration elsewhere, and one job alone, have no other jobs."""
    b, c = (first.parent / name / first.name for name in "bc")
    assert jobs.other_jobs(b) == []
    configuration(first.parent)
    c.parent.mkdir()
    configuration(c.parent)
    assert jobs.other_jobs(first) == [b, c]
    assert jobs.other_jobs(c) == [first, b]
    assert jobs.other_jobs(Path("/elsewhere") / first.name) == []
    print_status(status(-5.0), jobs=jobs.other_jobs(first))
    shown = "".join(line.strip() for line in capfd.readouterr().out.splitlines())
    assert f"swansong --config {b} status".replace(" ", "") in shown.replace(" ", "")


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_command_for_no_job_names_the_jobs_of_the_vm(
    first: Path, is_configured: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The configuration is missing, or is the example of the package, whose daemon does not run."""
    if is_configured:
        path = configuration(first.parent)
        path.write_text(path.read_text() + f'[trainer]\nsocket = "{first.parent}/none.sock"\n')
    command = f"swansong --config {first.parent}/b/{first.name} "
    assert main.main(["--config", str(first), "status"]) == (13 if is_configured else 2)
    assert f"other job of this VM: {command}status" in capfd.readouterr().err
    assert main.main(["--config", str(first), "doctor"]) == 12
    assert f"other job: sudo {command}doctor" in capfd.readouterr().out
