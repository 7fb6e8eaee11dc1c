# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: hypothesis judges properties, never the speed of the machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("machines")
