# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the contract tests."""

from contract.store_backends import (
    bare_store,
    cloud,
    cloud_environment,
    gcs_process,
    gcs_server,
    open_cloud,
    proxy,
    s3_process,
    s3_server,
    store,
)

__all__ = [
    "bare_store", "cloud", "cloud_environment", "gcs_process", "gcs_server", "open_cloud", "proxy",
    "s3_process", "s3_server", "store",
]  # fmt: skip
