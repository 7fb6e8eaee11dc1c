# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: nothing is skipped in CI, and hypothesis never judges the machine's speed."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("machines")

DOES_NOT_APPLY = "does not apply"
"""A reason that begins so is no missing tool or right: the property is another one on this machine."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a missing tool, or right, is a failure."""
    report = yield
    if os.environ.get("CI") and report.skipped and call.excinfo is not None:
        reason = str(call.excinfo.value)
        if DOES_NOT_APPLY not in reason:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: in CI nothing is skipped: {reason}"
    return report
