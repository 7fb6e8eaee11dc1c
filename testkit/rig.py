# SPDX-License-Identifier: Apache-2.0
"""A spot VM as processes: ``swansongd`` with its staging, and a trainer; for the tests and the demo.

Only the cloud is emulated: sockets, signals and files are real.  A power cut is SIGKILL to all processes and
an empty disk.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from swansong_bucket.errors import Unreachable
from swansong_tools.commands.daemon_client import DaemonClient
from swansongd.observe.status import to_json

from testkit import EXAMPLES
from testkit.waiting import until
from testkit.warm import WarmProcess, descendants, kill

BIN = Path(sys.executable).parent
WITH_CONSTANTS = Path(__file__).with_name("with_constants.py")
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def environment(**more: str) -> dict[str, str]:
    """The environment of the VM's processes: of the caller's only the variables that Python and CUDA need."""
    inherited = ("PATH", "HOME", "PYTHONPATH", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    # A warm Python has chosen its kernels by the caller's variables, and others sum in another order.
    base = {
        name: value
        for name, value in os.environ.items()
        if name in inherited or name.startswith("OPENBLAS_")
    }
    return {**base, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **more}


def control(url: str, order: str, **body: Any) -> Any:
    """Send an order to an emulator: ``control(imds.url, "notice", action="terminate", in_s=120)``."""
    request = urllib.request.Request(
        f"{url}/_control/{order}", data=json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content = answer.read()
    return json.loads(content) if content else None


class Lines:
    """The JSON lines that a process writes to a pipe, until its end."""

    def __init__(self, pipe: int) -> None:
        self._changed = threading.Condition()
        self._lines: list[dict[str, Any]] = []
        self.raw: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: int) -> None:
        with open(pipe, errors="replace") as stream:
            for raw in stream:
                with self._changed:
                    self.raw.append(raw.rstrip("\n"))
                    try:
                        self._lines.append(json.loads(raw))
                    except ValueError:
                        pass
                    self._changed.notify_all()

    def all(self, **facts: Any) -> list[dict[str, Any]]:
        """All lines so far with these fields."""
        with self._changed:
            return [line for line in self._lines if facts.items() <= line.items()]

    def wait(self, timeout_s: float = 60.0, *, after: int = 0, **facts: Any) -> dict[str, Any]:
        """The first line with these fields, of those after the first ``after`` lines; waits for it."""
        seen = after

        def found() -> dict[str, Any] | None:
            nonlocal seen
            new, seen = self._lines[seen:], len(self._lines)
            return next((line for line in new if facts.items() <= line.items()), None)

        with self._changed:
            line = self._changed.wait_for(found, timeout_s)
        if line is None:
            newest = "\n".join(self.raw[-30:])
            raise AssertionError(
                f"no line with {facts} in {timeout_s} s; the newest lines are\n{newest}"
            )
        return line

    def drained(self) -> None:
        """Wait until the process has closed the stream."""
        self._thread.join(60)


class Process:
    """A process with JSON lines on one of its streams, or on both.

    Args:
        warm: path of a warm Python that forks the process, if the command is one of Python.
    """

    def __init__(
        self, command: list[str], *, lines_on: str = "stderr", warm: str | None = None, **env: str
    ) -> None:
        reads, writes = os.pipe()
        with open(os.devnull, "r+b") as null, open(writes, "wb") as pipe:
            nowhere, lines = null.fileno(), pipe.fileno()
            streams = {
                "stdout": (nowhere, lines, 2),
                "stderr": (nowhere, nowhere, lines),
                "both": (nowhere, lines, lines),
            }[lines_on]
            self.popen = _start(command, streams, environment(**env), warm)
        self.pid = self.popen.pid
        self.lines = Lines(reads)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; after SIGKILL, wait for the end."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
            if number == signal.SIGKILL:
                self.popen.wait(60)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code."""
        code = self.popen.wait(timeout_s)
        self.lines.drained()
        return code


def safe_steps(daemon: Process) -> list[int]:
    """The steps of the reported verdicts, all of which are SAFE."""
    verdicts = daemon.lines.all(event="verdict")
    assert {verdict["verdict"] for verdict in verdicts} <= {"SAFE"}
    return [verdict["step"] for verdict in verdicts]


def newest_step(trainer: Process) -> int:
    return max(int(line["step"]) for line in trainer.lines.all() if "step" in line)


def _threads(pid: int) -> str:
    """The state of each thread of a process that does not do what a test waits for, from the kernel."""
    facts = []
    for thread in sorted(Path(f"/proc/{pid}/task").glob("*")):
        for name in ("comm", "stat", "wchan", "stack"):
            with suppress(OSError):
                facts.append(f"{thread.name} {name}: {(thread / name).read_text().strip()}")
    return "\n".join(facts) or f"process {pid} has ended"


def _start(
    command: list[str], streams: tuple[int, int, int], env: dict[str, str], warm: str | None
) -> subprocess.Popen[bytes] | WarmProcess:
    arguments = python_arguments(command)
    if warm and arguments:
        return WarmProcess(warm, arguments, env=env, streams=streams)
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=True
    )


def python_arguments(command: list[str]) -> list[str]:
    """The command without the Python that runs it; empty if that is not the Python of this process."""
    if command[0] == sys.executable:
        return command[1:]
    return command if Path(command[0]).parent == BIN else []


class Vm:
    """One VM: a directory for its disk, the daemon, and optionally a trainer.

    Args:
        disk: an existing directory for all files of this VM.
        store: table ``[store]`` of the configuration.
        metadata: cloud and URL of its metadata service, None for no cloud; with a URL of None the daemon uses
            the address of real clouds.
        settings: further tables of the configuration, which override the default ones.
        warm: path of a warm Python, which forks the processes of Python; see ``testkit/warm.py``.
        constants: other values for constants of the daemon and of its commands, by ``MODULE.NAME``.
    """

    def __init__(
        self,
        disk: Path,
        store: dict[str, str],
        *,
        run: str = "run",
        metadata: tuple[str, str | None] | None = None,
        settings: dict[str, dict[str, Any]] | None = None,
        warm: str | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        self.disk = disk
        self.warm = warm
        self.constants = constants
        self.staging = disk / "staging"
        self.staging.mkdir(exist_ok=True)
        self.run_directory = self.staging / run
        self.socket = disk / "trainer.sock"
        self.pid_file = disk / "trainer.pid"
        self.config = disk / "swansong.toml"
        cloud, url = metadata or ("none", "http://127.0.0.1:9")
        tables: dict[str, dict[str, Any]] = {
            "run": {"name": run},
            "staging": {"path": str(self.staging)},
            "store": store,
            "sources": {
                "cloud": cloud,
                **({"metadata_url": url} if url else {}),
                "poll_interval_s": 0.2,
                "system_bus": f"unix:path={disk}/no-bus",
            },
            "trainer": {"socket": str(self.socket), "settle_s": 1.0},
            "deadline": {"reserve_s": 1.0},
        }
        for name, table in (settings or {}).items():
            tables[name] = {**tables.get(name, {}), **table}
        self.config.write_text(_toml(tables))
        self.processes: list[Process] = []
        self.daemon: Process | None = None
        self.trainer: Process | None = None

    def start_daemon(self, *, ready: bool = True, **env: str) -> Process:
        """Start ``swansongd``; with ``ready``, wait until it has started."""
        self.daemon = self.spawn(self._command("swansongd"), **{**CREDENTIALS, **env})
        if ready:
            try:
                self.daemon.lines.wait(event="started")
            except AssertionError as error:
                error.add_note(_threads(self.daemon.pid))
                raise
        return self.daemon

    def start_trainer(self, *arguments: str, script: str = "char_lm.py", **env: str) -> Process:
        """Start an example trainer; its progress is JSON lines."""
        command = [sys.executable, "-u", str(EXAMPLES / script), *arguments]
        env = {"SWANSONG_SOCKET": str(self.socket), **env}
        self.trainer = self.spawn(command, lines_on="stdout", **env)
        return self.trainer

    def spawn(self, command: list[str], *, lines_on: str = "stderr", **env: str) -> Process:
        process = Process(command, lines_on=lines_on, warm=self.warm, **env)
        self.processes.append(process)
        return process

    def _command(self, program: str) -> list[str]:
        """The command line of a program of this VM."""
        command = [str(BIN / program), "--config", str(self.config)]
        if self.constants:
            changed = [str(WITH_CONSTANTS), json.dumps(self.constants)]
            return [sys.executable, *changed, *command]
        return command

    def swansong(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run one command of ``swansong`` on this VM."""
        command = self._command("swansong")
        if self.warm:
            command = [self.warm, *python_arguments(command)]
        return subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=environment(**{**CREDENTIALS, **env}),
        )

    def status(self) -> dict[str, Any]:
        """The daemon's report, as ``swansong status --json`` prints it, without a process for each call."""

        def asked() -> dict[str, Any] | None:
            try:
                with DaemonClient(self.socket) as daemon:
                    report: dict[str, Any] = json.loads(json.dumps(to_json(daemon.status())))
            except Unreachable as error:
                if "query less often" not in str(error):
                    raise
                return None
            return report

        answer = until(asked, every_s=0.1, what="a status")
        assert answer is not None
        return answer

    def commits(self) -> list[dict[str, Any]]:
        """The output of ``swansong ls --json``, newest first."""
        answer = self.swansong("ls", "--json")
        assert answer.returncode == 0, answer.stderr
        listing: list[dict[str, Any]] = json.loads(answer.stdout)
        return listing

    def status_words(self) -> str:
        """The output of ``swansong status`` without its line breaks: a long row wraps."""
        return " ".join(self.swansong("status").stdout.split())

    def power_off(self, *, keep_disk: bool = False) -> None:
        """Cut the power: all processes die at the same time, and the files on the disk are lost."""
        self._kill_all()
        if not keep_disk:
            self.lose_staging()

    def lose_staging(self) -> None:
        """Remove the staging directory at one moment, whatever still writes to it."""
        lost = self.staging.with_name("lost")
        self.staging.rename(lost)
        shutil.rmtree(lost, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()

    def _kill_all(self) -> None:
        """Kill all processes with their descendants: the workers of torchrun would outlive it."""
        live = [process for process in self.processes if process.popen.poll() is None]
        kill(pid for process in live for pid in descendants(process.pid))
        for process in live:
            process.kill()


def _toml(tables: dict[str, dict[str, Any]]) -> str:
    def lines() -> Iterator[str]:
        for name, table in tables.items():
            yield f"[{name}]"
            for key, value in table.items():
                # A JSON string, number, list of strings or boolean is valid TOML as well.
                yield f"{key} = {json.dumps(value)}"

    return "\n".join(lines()) + "\n"
