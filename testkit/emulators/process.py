# SPDX-License-Identifier: Apache-2.0
"""Starts emulators as processes, for the tests and the demo.  In tests they are forks of a warm Python.

Every emulator is a module (``python -m testkit.emulators.aws_imds --port 0``).  Once it listens, it prints
one JSON object as its first line (``{"url": "http://127.0.0.1:40001"}``).  It exits when it is killed, and
when its standard input closes, so that no emulator outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Self

from testkit import REPOSITORY
from testkit.warm import WarmProcess, python_of


class EmulatorProcess:
    """A running emulator.  ``ready`` is its announcement, ``url`` its address.

    Args:
        module: for example ``testkit.emulators.aws_imds``.
        arguments: its command line.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        command = ["-m", module, *arguments]
        stdin, held = os.pipe()
        lines, stdout = os.pipe()
        warm = os.environ.get("SWANSONG_TEST_WARM")
        self._process: subprocess.Popen[bytes] | WarmProcess
        if warm:
            python = python_of(warm, "emulators")
            self._process = WarmProcess(
                python, command, env=environment, streams=(stdin, stdout, 2)
            )
        else:
            self._process = subprocess.Popen(
                [sys.executable, *command], stdin=stdin, stdout=stdout, env=environment
            )
        os.close(stdin)
        os.close(stdout)
        self._held = [held, lines]  # without a reader, a later line would end the emulator
        with open(os.dup(lines)) as announced:
            line = announced.readline()
        if not line:
            self.kill()
            raise RuntimeError(f"{module} exited before it listened")
        self.ready: dict[str, object] = json.loads(line)
        self.url = str(self.ready["url"])
        self.pid = self._process.pid

    def kill(self) -> None:
        """SIGKILL, as when its machine is terminated."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        while self._held:
            os.close(self._held.pop())

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
