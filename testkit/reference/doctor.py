# SPDX-License-Identifier: Apache-2.0
"""The checks of ``swansong doctor``."""

from __future__ import annotations

import dataclasses

from swansong_tools.doctor import checks
from swansong_tools.doctor.findings import Finding, Level

from testkit.reference.markup import filled, member_docs, table


def page() -> str:
    """docs/reference/doctor.md."""
    *fields, last = (f"`{field.name}`" for field in dataclasses.fields(Finding))
    return filled(
        "doctor.md",
        fields=f"{', '.join(fields)} and {last}",
        levels=table(
            ("level", "meaning"),
            ((f"`{Level[name]}`", text) for name, text in member_docs(Level).items()),
        ),
        checks=table(
            ("family", "check", "examines"),
            (
                (f"`{each.family}`", f"`{each.name}`", each.shows.replace("``", "`"))
                for each in checks.ALL
            ),
        ),
    )
