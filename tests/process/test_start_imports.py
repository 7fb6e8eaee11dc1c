# SPDX-License-Identifier: Apache-2.0
"""The start of each process imports only what it needs: most of its CPU time is imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

SDKS = {"azure", "boto3", "botocore", "google", "msal", "requests", "urllib3"}
"""Loaded for the first request, or for a proxy."""


def loaded(program: str) -> set[str]:
    """Names of the modules that a program has loaded at its end."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("module", "unwanted", "most"),
    [
        ("swansongd.service.main", SDKS | {"watchdog", "crc32c"}, 545),
        # Beside a daemon the restore unit only asks it.
        (
            "swansong_tools.commands.restore",
            SDKS
            | {"structlog", "rich", "swansong_bucket.stores", "swansong_bucket", "swansongd.core"},
            170,
        ),
        ("swansong_tools.commands.fetch", SDKS | {"crc32c"}, 480),
        ("swansong_tools.commands.status", SDKS | {"structlog", "swansong_bucket.stores"}, 240),
    ],
)
def test_a_start_imports_no_more_than_it_needs(module: str, unwanted: set[str], most: int) -> None:
    """No cloud library is loaded at the start, and the number of modules is bounded."""
    found = loaded(f"import {module}")
    assert module in found
    assert not found & {*unwanted, "swansong.guard"}  # the daemon needs the hooks' protocol only
    assert len(found) <= most
