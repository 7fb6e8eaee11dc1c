# SPDX-License-Identifier: Apache-2.0
"""Compares the forecast of each evacuation with the time that it took: ``python -m bench.plans``.

A real ``swansongd`` and a trainer with the hooks run against an S3 emulator.  The emulator limits the rate of
all bodies together.  Each VM makes one periodic checkpoint and then a few evacuations.  The next VM continues
the run with an empty disk, and plans with the figures of the last manifest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from swansong import protocol
from swansong_bucket.errors import Unreachable
from swansong_bucket.model import Verdict
from swansong_tools.commands.daemon_client import DaemonClient
from swansongd.observe.status import DaemonStatus

from bench.transfer.results import write_page
from testkit.emulators.s3_strict import S3
from testkit.emulators.store_control import StoreControl
from testkit.emulators.store_server import StoreServer
from testkit.rig import Vm
from testkit.waiting import until

MIB = 2**20
NOTICE_S = 100.0


@dataclass(frozen=True, slots=True)
class Size:
    """One size of the state."""

    name: str
    size_bytes: int
    files: int
    save_s: float
    link_bytes_per_s: float


SIZES = (
    Size("6 MiB in 3 files, saved in 0.5 s, 4 MiB/s", 6 * MIB, 3, 0.5, 4 * MIB),
    Size("24 MiB in 6 files, saved in 4 s, 6 MiB/s", 24 * MIB, 6, 4.0, 6 * MIB),
    Size("64 MiB in 4 files, saved in 2 s, 6 MiB/s", 64 * MIB, 4, 2.0, 6 * MIB),
)
"""Small sizes and low rates: the limit of the store must dominate, not the processor."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One evacuation."""

    expected_s: float
    pessimistic_s: float
    took_s: float
    is_first: bool
    """The first one of its VM."""

    @property
    def error(self) -> float:
        return abs(self.took_s / self.expected_s - 1)


class EmptiedS3(S3):
    """A store that can be emptied."""

    def drop_data(self) -> None:
        """Forget the shards, so that the memory stays bounded."""
        with self._lock:
            for bucket in self._buckets.values():
                for key in [key for key in bucket.objects if "/data/" in key]:
                    del bucket.objects[key]


def measured(size: Size, evacuations: int, evacuations_per_vm: int) -> list[Outcome]:
    """The outcomes of one size."""
    s3 = EmptiedS3(["ckpt"])
    control = StoreControl(s3.respond, (), s3.order)
    control.total_bytes_per_s = size.link_bytes_per_s
    outcomes: list[Outcome] = []
    with StoreServer(("127.0.0.1", 0), control) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = {"url": "s3://ckpt/bench", "endpoint": server.url, "region": "us-east-1"}
        while len(outcomes) < evacuations:
            wanted = min(evacuations_per_vm, evacuations - len(outcomes))
            outcomes += _one_vm(size, store, s3, wanted, from_step=1000 * len(outcomes))
            print(f"{size.name}: {len(outcomes)} of {evacuations}", file=sys.stderr)
        server.shutdown()
    return outcomes


def _one_vm(
    size: Size, store: dict[str, str], s3: EmptiedS3, evacuations: int, *, from_step: int
) -> list[Outcome]:
    outcomes = []
    with _running_vm(size, store, from_step=from_step) as client:
        for number in range(evacuations):
            outcomes.append(_evacuate(client, is_first=not number))
            s3.drop_data()
    return outcomes


@contextmanager
def _running_vm(size: Size, store: dict[str, str], *, from_step: int) -> Iterator[DaemonClient]:
    """A VM with an empty disk, after its periodic checkpoint: a client of its daemon."""
    # Chunks of 5 MiB give the files of these sizes several chunks, as 16 MiB does to larger ones.
    settings = {"flush": {"chunk_bytes": "5MiB", "connections": 8}}
    with (
        tempfile.TemporaryDirectory() as directory,
        Vm(Path(directory), store, settings=settings) as vm,
    ):
        daemon = vm.start_daemon(ready=True)
        until(vm.socket.exists, what="the socket")
        facts = {
            "--size-bytes": size.size_bytes,
            "--files": size.files,
            "--save-s": size.save_s,
            "--from-step": from_step,
        }
        arguments = [str(word) for pair in facts.items() for word in pair]
        vm.start_trainer(*arguments, script=str(Path(__file__).with_name("plans_trainer.py")))
        daemon.lines.wait(event="committed", timeout_s=120)
        yield DaemonClient(vm.socket)


def _evacuate(client: DaemonClient, *, is_first: bool) -> Outcome:
    """One manual notice, until its verdict."""
    before = _status_of(client).last_verdict
    client.request(
        protocol.Notify(nonce=secrets.token_hex(8), seconds_left=NOTICE_S), protocol.Noted
    )
    pessimistic_s = 0.0
    while True:
        status = _status_of(client)
        evacuation, last = status.evacuation, status.last_verdict
        if evacuation and evacuation.pessimistic_s:
            pessimistic_s = evacuation.pessimistic_s
        if last and (before is None or last.evacuation != before.evacuation):
            break
        time.sleep(0.05)
    client.request(protocol.NotifyWithdrawn(), protocol.Noted)
    until(lambda: _status_of(client).evacuation is None, what="the withdrawal")
    if last.expected_s is None:
        raise SystemExit(f"the evacuation had no forecast: {last}")
    took_s = math.inf if last.took_s is None or last.verdict is not Verdict.SAFE else last.took_s
    return Outcome(last.expected_s, pessimistic_s, took_s, is_first)


def _status_of(client: DaemonClient) -> DaemonStatus:
    """The daemon's status; a loaded machine may delay it."""
    for _ in range(9):
        with suppress(Unreachable):
            return client.status()
    return client.status()


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """The Markdown table."""
    heads = (
        "state", "evacuations", "time to SAFE", "error, median", "error, 9 of 10", "first of a VM, 9 of 10",
        "within the pessimistic time",
    )  # fmt: skip
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    everything = [each for found in outcomes.values() for each in found]
    for name, found in [*outcomes.items(), ("all", everything)]:
        times = sorted(each.took_s for each in found)
        errors = [each.error for each in found]
        first = [each.error for each in found if each.is_first]
        kept = sum(each.took_s <= each.pessimistic_s for each in found)
        cells = (
            name,
            f"{len(found)}",
            f"{times[0]:.1f} to {times[-1]:.1f} s",
            *(f"{share:.1%}" for share in (_quantile(errors, 0.5), _quantile(errors, 0.9))),
            f"{_quantile(first, 0.9):.1%}",
            f"{kept} of {len(found)}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _quantile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(100 * share) // 100) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evacuations", type=int, default=50, help="number over all sizes")
    parser.add_argument("--per-vm", type=int, default=4, help="evacuations of one VM")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--write", action="store_true", help="write the table into docs/")
    options = parser.parse_args()
    results: dict[str, list[Outcome]] = {}
    for index, size in enumerate(SIZES):
        share = (options.evacuations + len(SIZES) - 1 - index) // len(SIZES)
        results[size.name] = measured(size, share, options.per_vm)
        if options.json:
            plain = {name: [asdict(each) for each in found] for name, found in results.items()}
            options.json.write_text(json.dumps(plain))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    text = (
        f"{table(results)}\n\nLoad (1, 5, 15 minutes) of {os.cpu_count()} cores at the end: {load}."
    )
    print(text)
    if options.write:
        write_page("python -m bench.plans", text)


if __name__ == "__main__":
    main()
