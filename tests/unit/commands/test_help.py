# SPDX-License-Identifier: Apache-2.0
"""The help of ``swansong``: one line per command, and examples that the parser accepts."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
from swansong_bucket.errors import Stopped
from swansong_tools import __main__
from swansong_tools.commands import main, version


def commands_in(example: str) -> list[list[str]]:
    """The arguments of each ``swansong`` in a shell line."""
    return [shlex.split(found) for found in re.findall(r"\bswansong ([^|>)]+)", example)]


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_example_is_a_valid_command_line(command: str) -> None:
    """The examples at the end of the help parse, and at least one of them shows the command itself."""
    examples = import_module(f"swansong_tools.commands.{command}").EXAMPLES
    shown = [words for line in examples.values() for words in commands_in(line)]
    assert len(shown) == len(examples)
    assert command in {main.parser(words).parse_args(words).command for words in shown}


@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        ("advise --size 84000000000", "size", 84 * 10**9),
        ("advise --bandwidth 2000000000", "bandwidth", 2e9),
        ("advise --notice 30", "notice", 30.0),
        ("drill --in 120", "in_s", 120.0),
        ("run --grace 25 -- true", "grace", 25.0),
        ("verify --rate 50000000", "rate", 5e7),
    ],
)
def test_digits_are_a_number_as_in_the_configuration(line: str, option: str, value: float) -> None:
    words = line.split()
    assert getattr(main.parser(words).parse_args(words), option) == value


def test_the_examples_of_the_command_itself_are_valid() -> None:
    """``swansong --help`` ends with examples as well."""
    for line in main.EXAMPLES.values():
        (words,) = commands_in(line)
        main.parser(words).parse_args(words)


def test_each_command_has_one_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    """As in git: an imperative, in lower case, without a full stop, on the line of its command."""
    with pytest.raises(SystemExit):
        main.main(["--help"])
    shown = capsys.readouterr().out
    for command, text in main.COMMANDS.items():
        assert re.search(rf"^    {command} +{re.escape(text)}$", shown, re.MULTILINE)
        assert re.fullmatch(r"[a-z].*[^.]", text)


@pytest.mark.parametrize("place", ["import", "add_arguments", "run"])
def test_an_interrupt_at_any_point_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """Ctrl-C while the program or a command is loaded or runs gives exit code 9 and no traceback."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if place == "import":
        monkeypatch.delitem(sys.modules, "swansong_tools.commands.main")
        monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=interrupted)])
    else:
        monkeypatch.setattr(version, place, interrupted)
    monkeypatch.setattr(sys, "argv", ["swansong", "version"])
    assert __main__.main() == Stopped.exit_code
    assert capsys.readouterr() == ("", "swansong: stopped by SIGINT\n")
