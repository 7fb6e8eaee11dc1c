# SPDX-License-Identifier: Apache-2.0
"""The fault matrix."""

from __future__ import annotations

import tomllib

from testkit import REPOSITORY
from testkit.reference.markup import filled, table

GROUPS = {
    "N": "Notices and metadata services",
    "T": "Trainers and hooks",
    "D": "Staging and the local disk",
    "S": "Hostile trainers, users and accounts",
    "O": "Network and object store",
    "K": "Locks of objects",
    "M": "The mirror",
    "G": "Commits, generations and restores",
    "H": "Processes and the host",
    "OE": "Engines",
    "X": "GPUs",
    "W": "Notifications",
    "OM": "Metrics",
    "OX": "The exporter",
    "OT": "Status and terminal",
    "OA": "Advice",
}
"""By the letters of a row's name."""
LAYERS = {
    "S": "code",
    "C": "contract",
    "P": "processes",
    "N": "network",
    "V": "system",
}


def page() -> str:
    """docs/reliability.md."""
    matrix = tomllib.loads((REPOSITORY / "tests" / "faults.toml").read_text())
    rows: dict[str, list[tuple[str, str, str]]] = {letters: [] for letters in GROUPS}
    for name, facts in matrix.items():
        layers = ", ".join(LAYERS[layer] for layer in facts["layers"].split())
        rows[name.rstrip("0123456789")].append((name, facts["fault"], layers))
    tables = [
        f"### {GROUPS[letters]}\n\n{table(('row', 'fault', 'shown by'), found)}"
        for letters, found in rows.items()
    ]
    return filled("reliability.md", number=str(len(matrix)), faults="\n\n".join(tables))
