# SPDX-License-Identifier: Apache-2.0
"""Starts emulators as processes, for the tests and the demo.

Every emulator is a module (``python -m testkit.emulators.aws_imds --port 0``).  Once it listens, it prints
one JSON object as its first line (``{"url": "http://127.0.0.1:40001"}``).  It exits when it is killed, and
when its standard input closes, so that no emulator outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Self

from testkit import REPOSITORY


class EmulatorProcess:
    """A running emulator.  ``ready`` is its announcement, ``url`` its address.

    Args:
        module: for example ``testkit.emulators.aws_imds``.
        arguments: its command line.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{module} exited before it listened: status {self._process.wait()}")
        self.ready: dict[str, object] = json.loads(line)
        self.url = str(self.ready["url"])
        self.pid = self._process.pid

    def kill(self) -> None:
        """SIGKILL, as when its machine is terminated."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def announce(url: str, **facts: object) -> None:
    """For the emulator: announce its address, and exit when standard input closes."""
    print(json.dumps({"url": url, **facts}), flush=True)

    def end_with_starter() -> None:
        # A separate file object: a buffered read of sys.stdin would hold a lock at interpreter exit.
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=end_with_starter, daemon=True).start()
