# SPDX-License-Identifier: Apache-2.0
"""Counts wrong plans for deadlines that are near the needed time: ``python -m bench.plans_edge``.

The store, the trainer and the sizes are those of :mod:`bench.plans`.  The time to the deadline is 0.9 to 1.1
times the needed time that the daemon stated last.  Everything is committed before each notice.  So a
checkpoint that does not fit by the plan is attempted all the same, and the outcome shows whether it would
have fit: its data is stored the reserve before the deadline, and its manifest before the deadline.

- A *wrong start*: the plan said that the checkpoint fits, and it was not committed in time.
- A *wrong refusal*: the plan said that it does not fit, and it was committed in time.
"""

from __future__ import annotations

import itertools
import random
import re
import secrets
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from swansong import protocol
from swansongd.cli.client import DaemonClient

from bench.plans import NOTICE_S, EmptiedS3, Size, command, report_of, running_vm
from testkit.emulators.store_control import StoreControl
from testkit.emulators.store_server import StoreServer
from testkit.rig import Process
from testkit.waiting import until

RESERVE_S = 3.0
FACTORS = (0.9, 1.1)
BANDS_S = (0.1, 0.3, 1.0)
"""Bounds of the distance between the deadline and the needed time."""
_SETTLED_S = 0.5
_NEEDED = re.compile(r"needs ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Judgement:
    """One plan, and its outcome."""

    needed_s: float
    """By the plan, with the reserve."""
    left_s: float
    """From the notice to the deadline."""
    fits: bool
    """By the plan."""
    is_safe: bool
    """Whether the checkpoint was committed before the deadline."""

    @property
    def is_wrong(self) -> bool:
        return self.fits != self.is_safe

    @property
    def distance_s(self) -> float:
        """Between the deadline and the needed time of the plan."""
        return abs(self.left_s - self.needed_s)


def judged(size: Size, evacuations: int, evacuations_per_vm: int) -> list[Judgement]:
    """The judgements of one size; the factors are evenly spread, in a shuffled order."""
    low, high = FACTORS
    factors = [low + (high - low) * (i + 0.5) / evacuations for i in range(evacuations)]
    random.Random(size.name).shuffle(factors)
    s3 = EmptiedS3(["ckpt"])
    control = StoreControl(s3.respond, s3.corrupt, (), s3.order)
    control.total_bytes_per_s = size.link_bytes_per_s
    found: list[Judgement] = []
    with StoreServer(("127.0.0.1", 0), control) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = {"url": "s3://ckpt/bench", "endpoint": server.url, "region": "us-east-1"}
        while len(found) < evacuations:
            wanted = factors[len(found) : len(found) + evacuations_per_vm]
            found += _one_vm(size, store, s3, wanted, from_step=1000 * len(found))
            print(f"{size.name}: {len(found)} of {evacuations}", file=sys.stderr)
        server.shutdown()
    return found


def _one_vm(
    size: Size, store: dict[str, str], s3: EmptiedS3, factors: list[float], *, from_step: int
) -> list[Judgement]:
    """One periodic checkpoint, one evacuation with ample time, and one for each factor."""
    found = []
    deadline = {"reserve_s": RESERVE_S}
    with running_vm(size, store, from_step=from_step, deadline=deadline) as (client, daemon):
        needed_s = _evacuate(client, daemon, size, NOTICE_S).needed_s
        for factor in factors:
            found.append(_evacuate(client, daemon, size, factor * needed_s))
            needed_s = found[-1].needed_s
            s3.drop_data()
    return found


def _evacuate(client: DaemonClient, daemon: Process, size: Size, left_s: float) -> Judgement:
    """One manual notice, until SAFE or the deadline; then everything that is sealed is committed."""
    before = len(_notices(daemon))
    ends_mono_s = time.monotonic() + left_s
    client.request(protocol.Notify(nonce=secrets.token_hex(8), seconds_left=left_s), protocol.Noted)
    line = until(lambda: _notices(daemon)[before:], what="the notice")[0]
    needed = _NEEDED.search(line["why"])
    if needed is None:
        raise SystemExit(f"the plan has no figures: {line}")
    is_safe = False
    while not is_safe and time.monotonic() < ends_mono_s:
        time.sleep(0.05)
        is_safe = (report_of(client)["evacuation"] or {}).get("phase") == "SAFE"
    client.request(protocol.NotifyWithdrawn(), protocol.Noted)
    until(lambda: report_of(client)["evacuation"] is None, what="the withdrawal")
    if not is_safe:
        time.sleep(size.save_s)  # of a set that the trainer may still write
    time.sleep(_SETTLED_S)
    until(lambda: _is_settled(report_of(client)), what="the commits of all sealed sets")
    fits = line["plan"] == "TAKE" and "attempted" not in line["why"]
    return Judgement(float(needed[1]), line["seconds_left"], fits, is_safe)


def _notices(daemon: Process) -> list[dict[str, Any]]:
    return daemon.lines.all(event="evacuation", phase="notice")


def _is_settled(report: dict[str, Any]) -> bool:
    return not report["flush"] and not report["pending_bytes"]


def table(judgements: dict[str, list[Judgement]]) -> str:
    """The wrong plans by size, then by the distance of the deadline."""
    heads = (
        "state", "evacuations", "needed", "said to fit", "wrong starts", "said not to fit",
        "wrong refusals", "largest distance of a wrong plan",
    )  # fmt: skip
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    everything = [each for found in judgements.values() for each in found]
    for name, found in [*judgements.items(), ("all", everything)]:
        needed = sorted(each.needed_s for each in found)
        cells = [name, f"{len(found)}", f"{needed[0]:.1f} to {needed[-1]:.1f} s"]
        for fits in (True, False):
            said = [each for each in found if each.fits is fits]
            wrong = sorted(each.distance_s for each in said if each.is_wrong)
            cells += [f"{len(said)}", _counted(wrong)]
        farthest_s = max((each.distance_s for each in found if each.is_wrong), default=None)
        cells.append("" if farthest_s is None else f"{farthest_s:.1f} s")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n\n" + _by_distance(everything)


def _counted(distances_s: list[float]) -> str:
    if not distances_s:
        return "0"
    return f"{len(distances_s)}: {', '.join(f'{each:.1f}' for each in distances_s)} s"


def _by_distance(found: list[Judgement]) -> str:
    rows = ["| deadline and needed time differ by | plans | wrong |", "| --- | --- | --- |"]
    bounds_s = (0.0, *BANDS_S, float("inf"))
    for low, high in itertools.pairwise(bounds_s):
        band = [each for each in found if low <= each.distance_s < high]
        name = f"{low:g} to {high:g} s" if high != float("inf") else f"{low:g} s or more"
        rows.append(f"| {name} | {len(band)} | {sum(each.is_wrong for each in band)} |")
    return "\n".join(rows)


def main() -> None:
    command("python -m bench.plans_edge", __doc__, judged, table, evacuations=51, per_vm=6)


if __name__ == "__main__":
    main()
