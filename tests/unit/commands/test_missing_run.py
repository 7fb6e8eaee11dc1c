# SPDX-License-Identifier: Apache-2.0
"""Commands for a run that the store does not have: a mistyped name is an error, not an empty answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from swansong_tools.commands import main

from testkit.committed import commit, configuration, file_store

_COMMANDS = {
    "ls": [],
    "pin": ["1", "--name", "best"],
    "unpin": ["best"],
    "prune": ["--dry-run", "--json"],
    "loss": [],
    "report": [],
    "advise": [],
    "exporter": ["--once"],
    "restore": ["--to", "{new}"],
    "export": ["--to", "{new}"],
    "mirror": ["--dry-run"],
    "verify": [],
}
"""The commands that need a run that the store has."""
_ANSWERS = {
    "finished": (18, "is not finished"),  # a scheduler asks before the first start, too
    "lifecycle": (2, "has rules for S3 and GCS only"),  # rules are set before the first start
}
"""The exit codes and answers of commands that answer for a run that the store does not have."""
_STARTING = {"init", "run"}
"""These commands name a run for its first start."""


def test_each_command_that_selects_a_run_is_in_a_table() -> None:
    """A new command with ``--run`` must choose its answer for a run that does not exist."""
    parser = main.parser(main.COMMANDS)
    (commands,) = (each for each in parser._actions if isinstance(each.choices, dict))
    choices = commands.choices or {}
    selecting = {name for name in choices if "--run" in choices[name]._option_string_actions}
    assert selecting == {*_COMMANDS, *_ANSWERS, *_STARTING}


@pytest.mark.parametrize("command", _COMMANDS)
def test_a_run_that_does_not_exist_is_an_error(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 17 with the name of the run, and nothing is written; other runs of the store do not count."""
    commit(file_store(tmp_path / "bucket"), {"a": b"x"}, step=1)
    file_store(tmp_path / "mirror")
    config = configuration(tmp_path, mirror=(tmp_path / "mirror").as_uri())
    words = [word.format(new=tmp_path / "new") for word in _COMMANDS[command]]
    assert main.main(["--config", str(config), command, *words, "--run", "other"]) == 17
    out, err = capfd.readouterr()
    assert out == "" or command == "exporter"
    assert "run other" in err
    assert not (tmp_path / "new").exists()
    assert not list(file_store(tmp_path / "mirror").list(""))


@pytest.mark.parametrize(
    "command", ["ls", "prune", "loss", "report", "exporter", "mirror", "verify"]
)
def test_a_run_that_exists_is_no_error(command: str, tmp_path: Path) -> None:
    """The same command lines succeed for the run of the store."""
    commit(file_store(tmp_path / "bucket"), {"a": b"x"}, step=1)
    file_store(tmp_path / "mirror")
    config = configuration(tmp_path, mirror=(tmp_path / "mirror").as_uri())
    words = [*_COMMANDS[command], "--run", "r"]
    assert main.main(["--config", str(config), command, *words]) == 0


@pytest.mark.parametrize("command", _ANSWERS)
def test_a_command_that_needs_no_record_answers_for_a_new_run(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is used before the first start of the training."""
    file_store(tmp_path / "bucket")
    code, said = _ANSWERS[command]
    words = ["--config", str(configuration(tmp_path)), command, "--run", "other"]
    assert main.main(words) == code
    out, err = capfd.readouterr()
    assert said in out + err
