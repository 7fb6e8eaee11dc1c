# SPDX-License-Identifier: Apache-2.0
"""The log events: the template has a row for each event of the code, which adds the levels."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from testkit import REPOSITORY
from testkit.reference.markup import filled

LEVELS = ("debug", "info", "warning", "error", "any")
_METHODS = {name: name for name in LEVELS[:4]} | {"exception": "error"}
_ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| ", re.MULTILINE)


def page() -> str:
    """docs/reference/log-events.md."""
    levels = events()
    explained: list[str] = []

    def with_levels(row: re.Match[str]) -> str:
        names = re.findall(r"\w+", row[1])
        explained.extend(names)
        found = {level for name in names for level in levels.get(name, ())}
        return f"{row[0]}{', '.join(sorted(found, key=LEVELS.index))} | "

    text = _ROW.sub(with_levels, filled("log-events.md"))
    wrong = sorted(set(explained) ^ set(levels))
    assert sorted(explained) == sorted(levels), (
        f"rows without event, or events without row: {wrong}"
    )
    heads = text.replace("| event | meaning |", "| event | level | meaning |")
    return heads.replace("| --- | --- | --- |", "| --- | --- | --- | --- |")


def events() -> dict[str, set[str]]:
    """The levels of each log event in the code."""
    found = {"log_dropped": {"warning"}}  # the writer thread writes this event itself
    for path in sorted((REPOSITORY / "daemon").glob("swansong*/**/*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call):
                for name, level in _logged(call):
                    found.setdefault(name, set()).add(level)
    return found


def _logged(call: ast.Call) -> Iterator[tuple[str, str]]:
    """The events of a call, each with its level."""
    names: set[str] = set()
    levels: set[str] = set()
    match call.func:
        case ast.Attribute(attr=attr, value=value) if attr in _METHODS and _is_log(value):
            names, levels = _strings(call.args[0]), {_METHODS[attr]}
            assert names, ast.unparse(call)
        case ast.Attribute(attr="log") | ast.Name(id="Log") if len(call.args) >= 2:
            names, levels = _strings(call.args[1]), _strings(call.args[0]) or {"any"}
        case ast.Attribute(attr="_log_limited"):
            names = _strings(call.args[0])
            given = [_strings(keyword.value) for keyword in call.keywords if keyword.arg == "level"]
            levels = given[0] if given else {"warning"}
    yield from ((name, level) for name in names for level in levels)


def _is_log(node: ast.AST) -> bool:
    return re.search(r"log(ger)?(\(.*\))?$", ast.unparse(node)) is not None


def _strings(node: ast.AST) -> set[str]:
    """All values of an argument that is a constant or a choice of constants."""
    match node:
        case ast.Constant(value=str(value)):
            return {value}
        case ast.IfExp():
            return _strings(node.body) | _strings(node.orelse)
        case _:
            return set()
