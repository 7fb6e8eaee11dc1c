# SPDX-License-Identifier: Apache-2.0
"""Draws the results file of ``make bench-preemption``.  Needs matplotlib."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

PARTS = {"stall_s": "tab:red", "redone_s": "tab:orange", "down_s": "tab:blue"}


def titled(size: str) -> str:
    """``32MB`` as ``32 MB``."""
    return f"{size[:-2]} {size[-2:]}"


def main() -> None:
    source, target = sys.argv[1:]
    results: list[dict[str, Any]] = [
        json.loads(line) for line in Path(source).read_text().splitlines()
    ]
    results = [result for result in results if not result["problem"]]
    sizes = list(dict.fromkeys(result["size"] for result in results))
    mpl.rcParams.update({"svg.hashsalt": "swansong", "font.size": 9})
    figure, axes = plt.subplots(
        1, len(sizes), figsize=(5 * len(sizes), 3.2), layout="constrained", squeeze=False
    )
    for axis, size in zip(axes.flat, sizes, strict=True):
        runs: dict[str, list[dict[str, Any]]] = {}
        for result in results:
            if result["size"] == size:
                runs.setdefault(result["contestant"], []).append(result)
        medians = {
            name: {part: statistics.median(r[part] for r in of_one) for part in PARTS}
            for name, of_one in runs.items()
        }
        names = sorted(medians, key=lambda name: -sum(medians[name].values()))
        left = [0.0] * len(names)
        for part, colour in PARTS.items():
            values = [medians[name][part] for name in names]
            axis.barh(names, values, left=left, color=colour, label=part.removesuffix("_s"))
            left = [a + b for a, b in zip(left, values, strict=True)]
        axis.set_title(f"{titled(size)} of state")
        axis.set_xlabel("seconds lost to one preemption (medians)")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
