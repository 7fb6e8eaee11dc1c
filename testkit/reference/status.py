# SPDX-License-Identifier: Apache-2.0
"""The fields of ``swansong status``, and their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from swansong_bucket.model import Severity
from swansongd.core.planner import PlanKind
from swansongd.observe.phase import Phase
from swansongd.observe.status import DaemonStatus

from testkit.reference.markup import field_docs, filled, member_docs, table


def page() -> str:
    """docs/reference/status.md."""
    severities = {f"`{name.lower()}`": text for name, text in member_docs(Severity).items()}
    return filled(
        "status.md",
        fields=table(("field", "meaning"), _fields(DaemonStatus)),
        states=_table("state", member_docs(Phase)),
        plans=_table("plan", member_docs(PlanKind)),
        severities=_table("severity", severities),
    )


def _table(head: str, rows: dict[str, str]) -> str:
    return table((head, "meaning"), rows.items())


def _fields(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A row for each field that has a text; fields of a record are also listed in the row of the record."""
    docs = field_docs(kind)
    for name, hint in get_type_hints(kind).items():
        records = [each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)]
        is_list, text = ... in get_args(hint), docs.get(name, "")
        for record in records:
            names = ", ".join(f"`{field.name}`" for field in dataclasses.fields(record))
            text += f" A list; fields of each: {names}." if is_list else f" Fields: {names}."
        if text:
            yield f"`{prefix}{name}`", text
        for record in records:
            yield from _fields(record, f"{prefix}{name}{'[]' * is_list}.")
