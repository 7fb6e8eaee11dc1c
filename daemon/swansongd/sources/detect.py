# SPDX-License-Identifier: Apache-2.0
"""Detects the cloud of this VM and NVIDIA's library from local files, without network access."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Cloud = Literal["aws", "gcp", "azure", "none"]

DMI_DIRECTORY = "/sys/class/dmi/id"
AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The chassis of each Azure VM has it; the vendor's name also stands for other machines under Hyper-V."""
NVML_LIBRARY = "libnvidia-ml.so.1"

_LIBRARY_DIRECTORIES = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
_LOADER_CACHE = Path("/etc/ld.so.cache")


def detect_cloud(dmi_directory: str = DMI_DIRECTORY) -> Cloud:
    """The cloud; ``none`` if the firmware names no known cloud, or cannot be read."""
    # The older, Xen-based instance types have the vendor "Xen"; their firmware version names Amazon.
    if _read(dmi_directory, "sys_vendor") == "Amazon EC2" or _read(
        dmi_directory, "bios_version"
    ).endswith(".amazon"):
        return "aws"
    if _read(dmi_directory, "product_name") in ("Google Compute Engine", "Google"):
        return "gcp"
    if _read(dmi_directory, "chassis_asset_tag") == AZURE_ASSET_TAG:
        return "azure"
    return "none"


def describe_firmware(dmi_directory: str = DMI_DIRECTORY) -> str:
    """The vendor and product names of the firmware, for a message."""
    names = [_read(dmi_directory, name)[:60] for name in ("sys_vendor", "product_name")]
    found = " ".join(name for name in names if name)
    return f"unknown firmware ({found})" if found else "the firmware names no vendor"


def has_nvml() -> bool:
    """Whether the loader would find NVML's library; nothing is loaded."""
    paths = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_LIBRARY_DIRECTORIES]
    if any(path and os.path.exists(os.path.join(path, NVML_LIBRARY)) for path in paths):
        return True
    try:
        return NVML_LIBRARY.encode() + b"\0" in _LOADER_CACHE.read_bytes()
    except OSError:
        return False


def _read(directory: str, name: str) -> str:
    try:
        with open(os.path.join(directory, name), encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
