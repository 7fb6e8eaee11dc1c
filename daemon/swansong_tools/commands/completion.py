# SPDX-License-Identifier: Apache-2.0
"""``swansong completion``: print a completion script for a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import shtab

from swansong_tools.commands import main

SHELLS = ("bash", "zsh", "fish")

EXAMPLES = {
    "Complete in this bash.": "source <(swansong completion bash)",
    "Complete in every bash of this machine.": (
        "swansong completion bash | sudo tee /etc/bash_completion.d/swansong"
    ),
    "Complete in every fish of this user.": (
        "swansong completion fish >~/.config/fish/completions/swansong.fish"
    ),
}

_COMPLETIONS = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}
"""By the metavar of an option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell that will read the script")


def run(args: argparse.Namespace) -> int:
    parser = main.parser(main.COMMANDS)
    for action in _actions(parser):
        if isinstance(action.metavar, str) and action.metavar in _COMPLETIONS:
            action.complete = _COMPLETIONS[action.metavar]
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """All options and arguments, those of the commands included."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of them
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                yield from _actions(command)
