# SPDX-License-Identifier: Apache-2.0
"""Draws the results file: speed as a share of the bare reference.  Needs matplotlib."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

CASES = {
    "upload-large-direct": "upload, 1 x 4 GiB",
    "upload-small-direct": "upload, 2,000 x 256 KiB",
    "download-large-direct": "download, 1 x 4 GiB",
    "download-small-direct": "download, 2,000 x 256 KiB",
}


def shares(results: list[dict[str, object]], case: str) -> dict[str, list[float]]:
    """Ratios to ``bare`` in the same repetition, by contestant."""
    speeds = {
        (str(r["contestant"]), r["repeat"]): 1 / float(str(r["wall_s"]))
        for r in results
        if r["case"] == case and not r["problem"]
    }
    found: dict[str, list[float]] = {}
    for (name, repeat), speed in speeds.items():
        if name != "bare" and ("bare", repeat) in speeds:
            found.setdefault(name, []).append(speed / speeds["bare", repeat])
    return dict(sorted(found.items(), key=lambda item: statistics.median(item[1])))


def main() -> None:
    source, target = sys.argv[1:]
    results = [json.loads(line) for line in Path(source).read_text().splitlines()]
    mpl.rcParams.update({"svg.hashsalt": "swansong", "font.size": 9})
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, (case, title) in zip(axes.flat, CASES.items(), strict=True):
        found = shares(results, case)
        middle = [statistics.median(values) for values in found.values()]
        low = [m - min(v) for m, v in zip(middle, found.values(), strict=True)]
        high = [max(v) - m for m, v in zip(middle, found.values(), strict=True)]
        colours = ["tab:orange" if name.startswith("swansong") else "tab:blue" for name in found]
        axis.barh(list(found), middle, color=colours, xerr=[low, high], ecolor="0.3")
        axis.axvline(1, color="0.3", linewidth=1)
        axis.set_title(title)
        axis.set_xlim(left=0)
    figure.supxlabel(
        "speed, as a share of the bare reference in the same repetition (median, range)"
    )
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
