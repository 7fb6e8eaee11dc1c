# SPDX-License-Identifier: Apache-2.0
"""The commands with their options, and the exit codes."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator

from swansong_bucket.errors import DAEMON_EXIT_CODES, EXIT_CODES
from swansong_tools.commands import main

from testkit import REPOSITORY
from testkit.reference.markup import filled, linked, table

_UNIT = REPOSITORY / "systemd/swansongd.service"


def page() -> str:
    """docs/reference/commands.md."""
    (commands,) = (
        action
        for action in main.parser(main.COMMANDS)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return filled(
        "commands.md",
        table=table(
            ("command", "purpose"),
            ((f"[`{name}`](#{name})", text) for name, text in main.COMMANDS.items()),
        ),
        commands="\n\n".join(_section(name, parser) for name, parser in commands.choices.items()),
        codes=table(("code", "meaning", "systemd and the daemon"), _codes()),
        pause=_setting("RestartSec"),
    )


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    examples = textwrap.dedent((parser.epilog or "").removeprefix("examples:\n"))
    parts = [f"### {name}", linked(parser.description or ""), f"```\n{examples}\n```"]
    options = [
        (f"`{_usage(action)}`", (action.help or "").replace("%%", "%"))
        for action in parser._actions
        if action.dest != "help"
    ]
    if options:
        parts.append(table(("option", "meaning"), options))
    return "\n\n".join(parts)


def _usage(action: argparse.Action) -> str:
    value = action.metavar or "|".join(action.choices or ())
    if not action.option_strings:
        return f"[{value}]" if action.nargs == "?" else str(value)
    return " ".join(filter(None, (action.option_strings[-1], str(value))))


def _codes() -> Iterator[tuple[str, str, str]]:
    final = _setting("RestartPreventExitStatus").split()
    for code, text in EXIT_CODES.items():
        after = "stays down until you start it" if str(code) in final else "restarts"
        yield str(code), text, after if code in DAEMON_EXIT_CODES else ""


def _setting(name: str) -> str:
    found = re.search(rf"^{name}=(.*)$", _UNIT.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{_UNIT.name} has no {name}="
    return found[1]
