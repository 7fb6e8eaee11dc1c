# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that five commits of a LoRA-like run send: ``make bench-frozen``.

A real ``swansongd`` stores into the strict S3 emulator through a proxy, which counts the bytes.  Each set
contains the same frozen weights and a new adapter.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import tempfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from testkit.emulators.process import EmulatorProcess
from testkit.rig import Vm
from testkit.staged import seal_files
from testkit.store_tap import StoreTap
from testkit.strict_bucket import ACCOUNT, Strict

MB = 10**6


class CountingTap(StoreTap):
    """Counts the bytes of the bodies that are sent to the store."""

    sent_bytes = 0

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        with self.lock:
            self.sent_bytes += int(handler.headers.get("Content-Length") or 0)
        super().forward(handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frozen-mb", type=int, default=200)
    parser.add_argument("--adapter-mb", type=int, default=2)
    parser.add_argument("--commits", type=int, default=5)
    options = parser.parse_args()
    os.environ.update(ACCOUNT)
    frozen = random.Random(1).randbytes(options.frozen_mb * MB)
    with (
        EmulatorProcess(
            "testkit.emulators.s3_strict", "--port", "0", "--bucket", "ckpt"
        ) as emulator,
        CountingTap(emulator.url) as tap,
        tempfile.TemporaryDirectory() as disk,
    ):
        bucket = Strict(emulator.url, secrets.token_hex(4))
        with Vm(Path(disk), bucket.table(tap.url)) as vm:
            daemon = vm.start_daemon(**ACCOUNT)
            daemon.lines.wait(event="health", source="store", health="ok")
            total_bytes, set_bytes = tap.sent_bytes, 0
            print("| commit | bytes of the set | bytes sent |\n| --- | --- | --- |")
            for step in range(1, options.commits + 1):
                before_bytes = tap.sent_bytes
                adapter = random.Random(-step).randbytes(options.adapter_mb * MB)
                content = seal_files(
                    vm.run_directory, step, {"model.bin": frozen, "adapter.bin": adapter}
                )
                daemon.lines.wait(event="committed", step=step, timeout_s=120)
                size_bytes = sum(map(len, content.values()))
                set_bytes += size_bytes
                print(f"| {step} | {size_bytes:,} | {tap.sent_bytes - before_bytes:,} |")
            total_bytes = tap.sent_bytes - total_bytes
            print(f"| all | {set_bytes:,} | {total_bytes:,} |")
            restored = bucket.restored(Path(disk) / "restored")
            assert restored == content, "the newest commit differs from the last sealed set"


if __name__ == "__main__":
    main()
