# SPDX-License-Identifier: Apache-2.0
"""The fields of ``swansong status``, and their values."""

from __future__ import annotations

import ast
import inspect
import re

from swansong_bucket.model import Severity
from swansongd.core.planner import PlanKind
from swansongd.observe import report
from swansongd.observe.phase import Phase

from testkit.reference.markup import filled, member_docs, table


def page() -> str:
    """docs/reference/status.md."""
    named = set(re.findall(r"`(\w+)`", " ".join(report.FIELDS.values()))) | set(report.FIELDS)
    assert _keys() <= named, f"fields without a text in FIELDS: {sorted(_keys() - named)}"
    severities = {f"`{name.lower()}`": text for name, text in member_docs(Severity).items()}
    return filled(
        "status.md",
        fields=_table("field", {f"`{name}`": text for name, text in report.FIELDS.items()}),
        states=_table("state", member_docs(Phase)),
        plans=_table("plan", member_docs(PlanKind)),
        severities=_table("severity", severities),
    )


def _table(head: str, rows: dict[str, str]) -> str:
    return table((head, "meaning"), rows.items())


def _keys() -> set[str]:
    """All keys of the report, at any depth."""
    return {
        key.value
        for node in ast.walk(ast.parse(inspect.getsource(report)))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
