# SPDX-License-Identifier: Apache-2.0
"""Containers with the real units of the daemon, as for ``make test-system``."""

from tests.system.nspawn.conftest import aws, bucket, debian, image, network, new_vm

__all__ = ["aws", "bucket", "debian", "image", "network", "new_vm"]
