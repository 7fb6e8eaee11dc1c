# SPDX-License-Identifier: Apache-2.0
"""One checkpoint of a job over many VMs, with a real daemon for each: time until it is whole, and requests.

    python -m bench.many_vms [--vms 2 16 64]

Each VM has a staging directory and one scripted rank, which saves 1 MB.  The store is one S3 emulator, which
waits 30 ms before each response.  It answers about a thousand requests a second, which limits large jobs here
and not at S3.  The agreement of the ranks takes no time: the tests of the hooks show it.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from swansong import protocol
from swansong_bucket.util.threads import parallel

from testkit.clouds import Bucket
from testkit.emulators.process import EmulatorProcess
from testkit.rig import Vm
from testkit.scripted_rank import ScriptedRank
from testkit.waiting import in_threads, until

LATENCY_S = 0.030
SIZE_BYTES = 1_000_000
NOTICE_S = 100.0
STARTS_AT_ONCE = 4


def _start(vm: Vm) -> None:
    vm.start_daemon()


class Job:
    """A job over ``count`` VMs, each with its daemon and its rank."""

    def __init__(self, count: int, place: Path, url: str, stack: ExitStack) -> None:
        self._bucket = Bucket(url, f"vms-{count}")
        self.count = count
        self.vms = []
        for node in range(count):
            (place / str(node)).mkdir()
            self.vms.append(stack.enter_context(Vm(place / str(node), self._bucket.store)))
        parallel(self.vms, _start, threads=STARTS_AT_ONCE)
        self.ranks = [
            stack.enter_context(ScriptedRank(vm, node, count)) for node, vm in enumerate(self.vms)
        ]

    def start(self) -> None:
        """Begin the training: one daemon claims a generation, and the others find the claim."""
        self._clear()
        began = time.monotonic()
        in_threads(self.count, lambda node: self.ranks[node].begin("first"))
        for vm in self.vms:
            until(lambda vm=vm: vm.status()["generation"] == 1, timeout_s=60)
        self._show("claim", [time.monotonic() - began])

    def save(self, step: int, request_id: str = "") -> None:
        """Seal the shares of one checkpoint on all VMs, and wait until each daemon reports it as whole."""
        self._clear()

        def saved(node: int) -> float:
            rank = self.ranks[node]
            if request_id:
                self._forward(rank, request_id, step)
            rank.seal(step, request_id, size_bytes=SIZE_BYTES)
            sealed = time.monotonic()
            while rank.receive_a(protocol.Committed).step != step:
                pass
            return time.monotonic() - sealed

        times_s = sorted(in_threads(self.count, saved))
        self._show("notice" if request_id else "periodic", times_s)

    def notify(self) -> str:
        """Give the first VM a notice; returns the id of its request."""
        assert not self.vms[0].swansong("notify", "--in", f"{NOTICE_S:g}s").returncode
        return self.ranks[0].receive_a(protocol.Request).id

    def _forward(self, rank: ScriptedRank, request_id: str, step: int) -> None:
        if rank is not self.ranks[0]:
            rank.send(protocol.PeerRequest(request_id, "notice", NOTICE_S))
            rank.receive_a(protocol.Request)
        rank.send(protocol.Agreed(request_id, step))

    def _clear(self) -> None:
        self._bucket.order("clear")
        self._bucket.order("pace", latency_s=LATENCY_S)

    def _show(self, what: str, times_s: list[float]) -> None:
        found: Counter[str] = Counter()
        for method, target in self._bucket.order("requests"):
            kind = re.search(r"/(generations|commits|data|farewells)(?:/|$)", target)
            found["LIST" if "list-type" in target else f"{method} {kind[1] if kind else '?'}"] += 1
        median_s = times_s[len(times_s) // 2]
        requests = ", ".join(f"{name} {count}" for name, count in sorted(found.items()))
        print(
            f"{self.count} VMs, {what}: {median_s:.2f} s, the last VM {times_s[-1]:.2f} s; {requests}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.many_vms", description=__doc__)
    parser.add_argument("--vms", type=int, nargs="+", default=[2, 16, 64])
    options = parser.parse_args()
    arguments = ("--port", "0", "--bucket", "ckpt")
    with EmulatorProcess("testkit.emulators.s3_strict", *arguments) as s3:
        for count in options.vms:
            with ExitStack() as stack:
                place = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
                job = Job(count, Path(place), s3.url, stack)
                job.start()
                job.save(5)
                job.save(9, job.notify())


if __name__ == "__main__":
    main()
