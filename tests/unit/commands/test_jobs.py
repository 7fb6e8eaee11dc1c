# SPDX-License-Identifier: Apache-2.0
"""Several jobs on one VM: status and doctor name the other ones, each with the command for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from swansong_tools.commands import jobs, local_sets, main
from swansong_tools.commands.view.once import print_status
from swansongd.config.config import load

from testkit.as_user import OUTSIDER, as_user
from testkit.committed import configuration
from testkit.other_users import needs_root
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


@pytest.mark.parametrize("command", ["status", "ls", "doctor", "run"])
def test_a_configuration_that_cannot_be_looked_up_is_an_error(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in a directory that this user may not search: a line that names it, and no traceback."""
    path = tmp_path / ("n" * 300)
    words = ["--", "true"] if command == "run" else []
    assert main.main(["--config", str(path), command, *words]) in (2, 12)
    shown = "".join(capfd.readouterr())
    assert f"reading {path} failed: File name too long" in shown


@needs_root
def test_a_staging_directory_that_another_user_may_not_search_is_an_error(tmp_path: Path) -> None:
    """``swansong restore --local`` must not take it for an empty one, and raises nothing else."""
    config = load(configuration(tmp_path))
    (tmp_path / "staging").mkdir(mode=0o700)
    answer = as_user(OUTSIDER, lambda: local_sets.find(config, "file:///store", None), groups=())
    assert answer.startswith("StagingError: ")
    assert "cannot be read: Permission denied" in answer
