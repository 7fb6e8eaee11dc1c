# SPDX-License-Identifier: Apache-2.0
"""The cost of a preemption by the share of the state that one VM has: ``python -m bench.large_states``.

It simulates evacuations as :mod:`bench.evacuations` does, with the schedule of the daemon on a virtual clock.
Only the share counts: 100 GB over 8 VMs cost as much as 12.5 GB on one.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

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
SHARES = (1e9, 4e9, 12.5e9, 25e9, 50e9, 100e9)


@dataclass(frozen=True)
class Share:
    """The share of one VM.

    Attributes:
        size_bytes: of all its files.
        changed: the part of its chunks that differ from the last checkpoint.
    """

    size_bytes: float
    changed: float = 1.0

    @property
    def job(self) -> Job:
        return Job(
            f"{self.size_bytes / 1e9:g} GB",
            save_s=self.size_bytes / STAGE_BYTES_S,
            send_s=self.changed * self.size_bytes / SEND_BYTES_S,
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.large_states", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="evacuations for each figure")
    count = parser.parse_args().count
    aws, gcp, _ = NOTICES
    print(
        "| share | interval | no notice | GCP, 30 s | AWS, 120 s"
        " | AWS, a tenth changes | down | down with a handover |\n" + "| --- " * 8 + "|"
    )
    for size_bytes in SHARES:
        share = Share(size_bytes)
        load_s = size_bytes / SNAPSHOT_BYTES_S + STEP_S
        cells = [
            share.interval_s,
            share.age_s,
            share.redone_s(gcp, count),
            share.redone_s(aws, count),
            Share(size_bytes, changed=0.1).redone_s(aws, count),
            BOOT_S + size_bytes / FETCH_BYTES_S + load_s,
            load_s,
        ]
        print(f"| {share.job.name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
