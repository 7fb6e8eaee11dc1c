# SPDX-License-Identifier: Apache-2.0
"""The commands with their options, and the exit codes."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections import Counter
from collections.abc import Iterator

from swansong_bucket.errors import DAEMON_EXIT_CODES, EXIT_CODES
from swansong_tools.commands import main

from testkit import REPOSITORY
from testkit.reference.markup import filled, linked, table

COMMON = 3
"""Options of this number of commands are explained once."""
_UNIT = REPOSITORY / "systemd/swansongd.service"


def page() -> str:
    """docs/reference/commands.md."""
    (commands,) = (
        action
        for action in main.parser(main.COMMANDS)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    options = {name: _options(parser) for name, parser in commands.choices.items()}
    counts = Counter(option for of_one in options.values() for option in of_one)
    common = {option for option, count in counts.items() if count >= COMMON}
    return filled(
        "commands.md",
        table=table(
            ("command", "purpose"),
            ((f"[`{name}`](#{name})", text) for name, text in main.COMMANDS.items()),
        ),
        common=table(("option", "meaning"), (option for option in counts if option in common)),
        commands="\n\n".join(
            _section(name, parser, options[name], common)
            for name, parser in commands.choices.items()
        ),
        codes=table(("code", "meaning", "systemd and the daemon"), _codes()),
        pause=_setting("RestartSec"),
    )


def _options(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    return [
        (f"`{_usage(action)}`", (action.help or "").replace("%%", "%"))
        for action in parser._actions
        if action.dest != "help"
    ]


def _section(
    name: str,
    parser: argparse.ArgumentParser,
    options: list[tuple[str, str]],
    common: set[tuple[str, str]],
) -> str:
    examples = textwrap.dedent((parser.epilog or "").removeprefix("examples:\n"))
    parts = [f"### {name}", linked(parser.description or ""), f"```\n{examples}\n```"]
    if own := [option for option in options if option not in common]:
        parts.append(table(("option", "meaning"), own))
    if shared := [usage for usage, text in options if (usage, text) in common]:
        parts.append(f"[Common options](#options): {', '.join(shared)}.")
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
