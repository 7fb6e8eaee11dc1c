# SPDX-License-Identifier: Apache-2.0
"""The checks of ``swansong doctor``."""

from __future__ import annotations

import dataclasses
import inspect
import re

from swansong_tools.doctor.findings import FAMILIES, Finding, Level
from swansong_tools.doctor.store import _Probe

from testkit.reference.markup import filled, member_docs, table


def page() -> str:
    """docs/reference/doctor.md."""
    *fields, last = (f"`{field.name}`" for field in dataclasses.fields(Finding))
    steps = re.findall(r'step\("([^"]+)", self\.(\w+)', inspect.getsource(_Probe.rehearsal_checks))
    return filled(
        "doctor.md",
        fields=f"{', '.join(fields)} and {last}",
        levels=table(
            ("level", "meaning"),
            ((f"`{Level[name]}`", text) for name, text in member_docs(Level).items()),
        ),
        families=table(
            ("family", "checks"), ((f"`{name}`", text) for name, text in FAMILIES.items())
        ),
        rehearsal=table(
            ("check", "step"),
            ((f"`{name}`", inspect.getdoc(vars(_Probe)[judge]) or "") for name, judge in steps),
        ),
    )
