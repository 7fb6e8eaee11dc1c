# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the contract tests."""

import pytest

from testkit.store_backends import (
    certificates,
    cloud,
    cloud_environment,
    is_wanted,
    open_cloud,
    requires,
    server_name,
    store,
    store_servers,
)

__all__ = [
    "certificates",
    "cloud",
    "cloud_environment",
    "open_cloud",
    "requires",
    "server_name",
    "store",
    "store_servers",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if is_wanted(item)]
