# SPDX-License-Identifier: Apache-2.0
"""The cost of a preemption by the share of the state that one VM has.

    python -m bench.large_states --plot docs/performance/large-states.svg

It simulates evacuations as :mod:`bench.evacuations` does, with the schedule of the daemon on a virtual clock.
Only the share counts: 100 GB over 8 VMs cost as much as 12.5 GB on one.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from swansongd.core import cadence

from bench.evacuations import MTBF_S, NOTICES, Job, Notice, simulate

SNAPSHOT_BYTES_S = 10e9
"""From the GPUs into pinned memory, for which training stops."""
STAGE_BYTES_S = 2e9
"""Writing the files to a local NVMe disk."""
SEND_BYTES_S = 1.2e9
"""One process on two cores, see docs/performance/transfer.md; more cores and a faster network send more."""
FETCH_BYTES_S = 0.6e9
BOOT_S = 60.0
"""From the power cut to the first import on the next VM."""
STEP_S = 2.0
COPY_BYTES_S = 5e9
"""To the staging directory of another VM over 100 Gb/s, which Swansong does not do."""
SHARES = (1e9, 4e9, 12.5e9, 25e9, 50e9, 100e9)
COLUMNS = (
    "interval",
    "no notice",
    "GCP, 30 s",
    "AWS, 120 s",
    "AWS, a tenth changes",
    "no notice, copies on other VMs",
    "down",
    "down with a handover",
)
REDONE = COLUMNS[1:6]


@dataclass(frozen=True)
class Share:
    """The share of one VM.

    Attributes:
        size_bytes: of all its files.
        changed: the part of its chunks that differ from the last checkpoint.
        send_bytes_s: rate at which they leave the VM.
    """

    size_bytes: float
    changed: float = 1.0
    send_bytes_s: float = SEND_BYTES_S

    @property
    def job(self) -> Job:
        return Job(
            f"{self.size_bytes / 1e9:g} GB",
            save_s=self.size_bytes / STAGE_BYTES_S,
            send_s=self.changed * self.size_bytes / self.send_bytes_s,
            stall_s=self.size_bytes / SNAPSHOT_BYTES_S,
            step_s=STEP_S,
        )

    @property
    def data_s(self) -> float:
        """Time from the state of a checkpoint to its last stored byte."""
        return self.job.save_s + self.job.send_s

    @property
    def interval_s(self) -> float:
        """The interval that the daemon chooses."""
        return cadence.interval_s(save_cost_s=self.job.stall_s, store_s=self.data_s, mtbf_s=MTBF_S)

    @property
    def age_s(self) -> float:
        """Mean age of the newest commit at a random moment."""
        return self.interval_s / 2 + self.data_s

    def redone_s(self, notice: Notice, count: int) -> float:
        """Mean training that is repeated after a notice."""
        done = simulate(self.job, notice, count, follow_ups=True)
        # A checkpoint that is not in time leaves the newest periodic one.
        lost_s = (each.redone_s + self.age_s * (not each.is_saved) for each in done)
        return sum(lost_s) / count


def figures(size_bytes: float, count: int) -> dict[str, float]:
    """Seconds by column for this share, from ``count`` evacuations for each."""
    aws, gcp, _ = NOTICES
    share = Share(size_bytes)
    load_s = size_bytes / SNAPSHOT_BYTES_S + STEP_S
    cells = (
        share.interval_s,
        share.age_s,
        share.redone_s(gcp, count),
        share.redone_s(aws, count),
        Share(size_bytes, changed=0.1).redone_s(aws, count),
        Share(size_bytes, send_bytes_s=COPY_BYTES_S).age_s,
        BOOT_S + size_bytes / FETCH_BYTES_S + load_s,
        load_s,
    )
    return dict(zip(COLUMNS, cells, strict=True))


def plot(rows: dict[float, dict[str, float]], path: Path) -> None:
    """Draw the repeated training, and the time without training, by the share."""
    import matplotlib as mpl  # noqa: PLC0415 - only for the picture

    mpl.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.rcParams.update({"svg.hashsalt": "swansong", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    shares = [size_bytes / 1e9 for size_bytes in rows]
    drawn = ("training that is repeated", REDONE), ("time without training", COLUMNS[6:])
    for axis, (title, columns) in zip(axes, drawn, strict=True):
        for column in columns:
            style = "--" if "copies" in column else "o-"
            axis.plot(shares, [row[column] for row in rows.values()], style, label=column)
        axis.set(title=title, xlabel="GB of state on each VM", xscale="log", yscale="log")
        axis.set_xticks(shares, [f"{share:g}" for share in shares], minor=False)
        axis.tick_params(axis="x", which="minor", labelbottom=False)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("seconds, mean")
    axes[0].set_yticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.large_states", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="evacuations for each figure")
    parser.add_argument("--plot", type=Path, help="draw this SVG file; needs matplotlib")
    options = parser.parse_args()
    print(f"| share | {' | '.join(COLUMNS)} |\n" + "| --- " * (len(COLUMNS) + 1) + "|")
    rows: dict[float, dict[str, float]] = {}
    for size_bytes in SHARES:
        row = rows[size_bytes] = figures(size_bytes, options.count)
        print(f"| {size_bytes / 1e9:g} GB | {' | '.join(f'{s:.0f}' for s in row.values())} |")
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
