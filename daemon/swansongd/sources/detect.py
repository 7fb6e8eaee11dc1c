# SPDX-License-Identifier: Apache-2.0
"""Detects the cloud of this VM from the names in its firmware (DMI), without network access."""

from __future__ import annotations

import os
from typing import Literal

Cloud = Literal["aws", "gcp", "none"]

DMI_DIRECTORY = "/sys/class/dmi/id"


def detect_cloud(dmi_directory: str = DMI_DIRECTORY) -> Cloud:
    """The cloud; ``none`` if the firmware names no known cloud, or cannot be read."""
    # The older, Xen-based instance types have the vendor "Xen"; their firmware version names Amazon.
    if _read(dmi_directory, "sys_vendor") == "Amazon EC2" or _read(
        dmi_directory, "bios_version"
    ).endswith(".amazon"):
        return "aws"
    if _read(dmi_directory, "product_name") in ("Google Compute Engine", "Google"):
        return "gcp"
    return "none"


def describe_firmware(dmi_directory: str = DMI_DIRECTORY) -> str:
    """The vendor and product names of the firmware, for a message."""
    names = [_read(dmi_directory, name)[:60] for name in ("sys_vendor", "product_name")]
    found = " ".join(name for name in names if name)
    return f"unknown firmware ({found})" if found else "the firmware names no vendor"


def _read(directory: str, name: str) -> str:
    try:
        with open(os.path.join(directory, name), encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
