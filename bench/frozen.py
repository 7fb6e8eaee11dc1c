# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that five commits of a LoRA-like run send: ``make bench-frozen``.

A real ``swansongd`` stores into the strict S3 emulator through a relay, which counts the bytes.  Each set
contains the same frozen weights and a new adapter.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import socket
import tempfile
import threading
from pathlib import Path

from testkit.emulators.process import EmulatorProcess
from testkit.rig import Vm
from testkit.staged import seal_files
from testkit.strict_bucket import ACCOUNT, Strict

MB = 10**6


class Relay:
    """Forwards connections to ``url`` and counts the bytes sent there in ``sent_bytes``."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self.sent_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._upstream)
            for way in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=way, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(2**18):
                target.sendall(data)
                if counts:
                    with self._lock:
                        self.sent_bytes += len(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return  # either end may close at any time


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
        tempfile.TemporaryDirectory() as disk,
    ):
        bucket = Strict(emulator.url, secrets.token_hex(4))
        relay = Relay(emulator.url)
        with Vm(Path(disk), bucket.table(relay.url)) as vm:
            daemon = vm.start_daemon(**ACCOUNT)
            daemon.lines.wait(event="health", source="store", health="ok")
            total_bytes, set_bytes = relay.sent_bytes, 0
            print("| commit | bytes of the set | bytes sent |\n| --- | --- | --- |")
            for step in range(1, options.commits + 1):
                before_bytes = relay.sent_bytes
                adapter = random.Random(-step).randbytes(options.adapter_mb * MB)
                content = seal_files(
                    vm.run_directory, step, {"model.bin": frozen, "adapter.bin": adapter}
                )
                daemon.lines.wait(event="committed", step=step, timeout_s=120)
                size_bytes = sum(map(len, content.values()))
                set_bytes += size_bytes
                print(f"| {step} | {size_bytes:,} | {relay.sent_bytes - before_bytes:,} |")
            total_bytes = relay.sent_bytes - total_bytes
            print(f"| all | {set_bytes:,} | {total_bytes:,} |")
            restored = bucket.restored(Path(disk) / "restored")
            assert restored == content, "the newest commit differs from the last sealed set"


if __name__ == "__main__":
    main()
