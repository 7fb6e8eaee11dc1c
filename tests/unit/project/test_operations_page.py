# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md says what there is, all of it and nothing else: log lines, keys, fields, exit codes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import swansongd
from swansongd import errors
from swansongd.cli import notify
from swansongd.config.config import section_keys

from testkit import REPOSITORY

PAGE = (REPOSITORY / "docs" / "operations.md").read_text()
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
FROM_ELSEWHERE = {"log_dropped"}
"""Written without structlog, by the thread that writes the lines."""


def section(title: str) -> str:
    """What stands below the heading, down to the next one of the same depth."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found[1]


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the rows of all tables, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not re.match(r"\|[ -]+\|", line) and not re.match(r"\|[ -]+\|", following):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def words(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def calls() -> Iterator[ast.Call]:
    for path in sorted(Path(swansongd.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                yield node


def strings(node: ast.AST) -> set[str]:
    """All that the argument may be, where it is a constant or a choice of constants."""
    match node:
        case ast.Constant(value=str(value)):
            return {value}
        case ast.IfExp():
            return strings(node.body) | strings(node.orelse)
        case _:
            return set()


def events() -> set[str]:
    """The names of all log lines in the code."""
    found = set(FROM_ELSEWHERE)
    for call in calls():
        assert isinstance(call.func, ast.Attribute)
        method, target = call.func.attr, ast.unparse(call.func.value)
        if method in LEVELS and re.search(r"log(ger)?(\(.*\))?$", target) and call.args:
            found |= strings(call.args[0])
        elif method == "log" and len(call.args) >= 2:
            found |= strings(call.args[1])
        elif method == "_complain":
            found |= strings(call.args[0])
    return found


def phases() -> set[str]:
    """The phases of the timeline of an evacuation."""
    return {
        phase
        for call in calls()
        if isinstance(call.func, ast.Attribute) and call.func.attr == "mark" and call.args
        for phase in strings(call.args[0])
    }


def test_every_log_line_is_explained() -> None:
    """Each event of the code has a row, and each row an event."""
    table = section("Log lines").partition("### ")[0]
    explained = [name for cells in rows(table) for name in re.findall(r"`(\w+)`", cells[0])]
    assert sorted(explained) == sorted(events())


def test_every_phase_is_explained() -> None:
    """Each phase of the timeline as well."""
    table = section("Log lines").partition("### Phases")[2]
    explained = [name for cells in rows(table) for name in re.findall(r"`(\w+)`", cells[0])]
    assert sorted(explained) == sorted(phases())


def test_every_key_of_the_configuration_is_explained() -> None:
    """Each key has a row, in the order of the file, and each row a key."""
    explained = [name for cells in rows(section("Configuration")) for name in words(cells[0])]
    keys = [f"{name}.{key}" for name, known in section_keys().items() for key in known]
    assert sorted(explained) == sorted(keys)


def fields() -> set[str]:
    """The top-level fields of the report: of the state, and what the service adds."""
    package = Path(swansongd.__path__[0])
    of_state, of_service = (
        ast.parse((package / name).read_text()) for name in ("observe/report.py", "service.py")
    )
    reports = [
        statement.value
        for function in ast.walk(of_state)
        if isinstance(function, ast.FunctionDef) and function.name == "status_report"
        for statement in function.body
        if isinstance(statement, ast.Return)
    ] + [
        statement.value
        for statement in ast.walk(of_service)
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "report"
    ]
    assert len(reports) == 2
    return {
        name
        for report in reports
        if isinstance(report, ast.Dict)
        for key in report.keys
        if key is not None
        for name in strings(key)
    }


def test_every_field_of_the_status_is_explained() -> None:
    """Each top-level field of `swansong status --json` has a row, and each row a field."""
    explained = {
        re.split(r"[.\[]", name)[0] for cells in rows(section("Status")) for name in words(cells[0])
    }
    assert explained == fields()


def test_every_exit_code_is_explained() -> None:
    """Each code that a command may end with has a row."""
    own = {
        error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.SwansongError)
    }
    verdicts = set(notify.EXIT_BY_VERDICT.values())
    explained = {int(code) for cells in rows(section("Exit codes")) for code in cells[0].split(",")}
    assert explained == own | verdicts | {0}
