# SPDX-License-Identifier: Apache-2.0
"""The fault matrix."""

from __future__ import annotations

import tomllib
from collections import Counter

from testkit import REPOSITORY
from testkit.reference.markup import filled, table

LAYERS = {
    "S": (
        "code",
        "the code alone: functions, or hours of a daemon with a seeded clock, disk, store and scheduler",
    ),
    "C": (
        "contract",
        "one part at its real interface: sockets, files, signals, stores and metadata services",
    ),
    "P": ("processes", "the daemon, a trainer and a store as processes"),
    "N": ("network", "several VMs, each in a network namespace"),
    "V": ("system", "a booted systemd in a container, or a virtual machine"),
}


def page() -> str:
    """docs/reliability.md."""
    matrix = tomllib.loads((REPOSITORY / "tests" / "faults.toml").read_text())
    layers = Counter(layer for facts in matrix.values() for layer in facts["layers"].split())
    return filled(
        "reliability.md",
        number=str(len(matrix)),
        layers=table(
            ("shown by", "tests", "faults"),
            [(*LAYERS[layer], str(layers[layer])) for layer in LAYERS],
        ),
    )
