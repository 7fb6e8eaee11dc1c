# SPDX-License-Identifier: Apache-2.0
"""Property-based fuzzing of all parsers: no input raises anything but the declared error.

The profile ``fuzz`` applies to this directory alone.  ``SWANSONG_FUZZ_EXAMPLES`` sets the number of examples
for each test.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

settings.register_profile(
    "fuzz",
    settings.get_profile("machines"),
    max_examples=int(os.environ.get("SWANSONG_FUZZ_EXAMPLES", "50")),
)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A test takes the profile that is loaded while its module is imported."""
    settings.load_profile("fuzz")
    try:
        return (yield)
    finally:
        settings.load_profile("machines")
