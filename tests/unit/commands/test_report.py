# SPDX-License-Identifier: Apache-2.0
"""``swansong report`` against a file store: text, page and JSON agree, and the page explains each field."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from swansong_tools.commands import main

from testkit import REPOSITORY, past_run
from testkit.committed import configuration, file_store
from tests.unit.commands.test_loss import names_of

PAGE = (REPOSITORY / "docs/operations/report.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The configuration of a run in a store that no test changes; by default with a short name."""
    directory, run = tmp_path_factory.mktemp("past"), getattr(request, "param", past_run.RUN)
    past_run.write(file_store(directory / "bucket"), run)
    return str(configuration(directory, run=run))


def test_the_facts_are_those_of_the_loss(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One reading of the bucket, and the same figures as the other command."""
    assert main.main(["--config", config, "loss", "--json"]) == 0
    loss = json.loads(capfd.readouterr().out)
    assert main.main(["--config", config, "report", "--json", "--price", "spot=2"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["loss"] == loss
    assert [each["verdict"] for each in report["evacuations"]] == ["PARTIAL", "SAFE"]
    assert [each["resumed_by"] for each in report["evacuations"]] == [3, 2]
    assert len(report["commits"]) == 25
    assert report["cost"]["GPU time on spot VMs"].endswith(" USD")


def test_every_field_is_explained(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    """By docs/operations/report.md, or by the pages that it names."""
    main.main(["--config", config, "report", "--json"])
    report = json.loads(capfd.readouterr().out)
    del report["loss"]["interruptions"], report["loss"]["total"]
    fields = set(report) | {name for each in report["evacuations"] for name in each}
    fields |= names_of(report["commits"])
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert fields - named - {"run", "store", "written", "final"} == set()


@pytest.mark.parametrize("config", ["r" * 100], indirect=True)
@pytest.mark.parametrize("command", ["advise", "loss", "ls", "report"])
def test_no_line_has_more_than_80_columns(
    command: str, config: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal as in one, also for the longest name of a run; no figure is unknown."""
    assert main.main(["--config", config, command]) == 0
    shown = capfd.readouterr().out
    assert max(map(cell_len, shown.splitlines())) <= 80, shown
    assert not re.search(r"(?<![\d,.])1 \w+s\b|\?|\de[+-]\d", shown), shown


def test_the_page_replaces_the_file_as_a_whole(
    config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An existing page is replaced, its mode follows the umask, and no temporary file stays."""
    target = tmp_path / "pages" / "report.html"
    target.parent.mkdir()
    target.write_text("old")
    before = os.umask(0o027)
    try:
        assert main.main(["--config", config, "report", "--html", str(target)]) == 0
    finally:
        os.umask(before)
    assert "The verdict is SAFE" in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o640
    assert list(target.parent.iterdir()) == [target]
    assert capfd.readouterr().out == ""


def test_a_page_that_cannot_be_written_is_an_error(
    config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It names the file and the fix."""
    target = tmp_path / "missing" / "report.html"
    assert main.main(["--config", config, "report", "--html", str(target)]) == 15
    assert "Name a file in a directory that exists" in capfd.readouterr().err


def test_the_number_of_evacuations_is_an_option(
    config: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The newest ones are shown."""
    assert main.main(["--config", config, "report", "--evacuations", "1"]) == 0
    text = capfd.readouterr().out
    assert "PARTIAL" in text
    assert "SAFE" not in text
    with pytest.raises(SystemExit):
        main.main(["--config", config, "report", "--evacuations", "0"])
