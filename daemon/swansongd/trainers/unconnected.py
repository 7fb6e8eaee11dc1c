# SPDX-License-Identifier: Apache-2.0
"""Processes that probably train and are not known to the daemon, for ``swansong doctor`` and ``status``.

A process counts if it holds a GPU device file, or is the process of ``trainer.pid_file`` or ``trainer.unit``.
Trainers, their ancestors and their descendants do not count: data loaders inherit the device files.

The commands search, not the daemon: its unit lacks the right to read ``/proc/PID/fd`` of other users.
Everything here is read from processes that may be hostile, so number, size and time are limited.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swansong.protocol import SOCKET_ENV
from swansong_bucket.config.values import signal_number
from swansong_bucket.errors import ConfigError
from swansong_bucket.util.printable import printable

from swansongd.config.config import TrainerConfig
from swansongd.observe.status import DaemonStatus
from swansongd.trainers import peers, signals, users

FOUND_MAX = 20
LIMIT_S = 2.0
DEVICES = Path("/dev")
_DEVICE = re.compile(r"nvidia[0-9]+|nvidia-uvm|kfd|dri/renderD[0-9]+")
_NOT_TRAINERS = frozenset(
    ("Xorg", "Xwayland", "nvidia-persistenced", "nvidia-smi", "nv-hostengine", "dcgm-exporter")
)
_PROCESSES_MAX = 20_000
_FDS_MAX = 10_000
_PROGRAM_CHARS_MAX = 60


@dataclass(frozen=True, slots=True)
class Unconnected:
    """A process that is not connected to the daemon."""

    pid: int
    uid: int
    program: str
    """Name of its program or Python script, as the process shows it."""
    seen: str
    """Why it counts: ``holds /dev/nvidia0``, or ``is the process of trainer.unit``."""
    fix: str

    @property
    def line(self) -> str:
        """The observation, in one line."""
        name = f" ({self.program})" if self.program else ""
        return f"process {self.pid}{name} of user {self.uid} {self.seen} and is not connected to the daemon"


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search."""

    found: tuple[Unconnected, ...] = ()
    is_complete: bool = False
    """Every process was examined; otherwise there may be more."""

    def facts(self) -> dict[str, object]:
        """The result for JSON; ``processes`` is None if nothing is known."""
        names = ("pid", "uid", "program", "seen", "fix")
        listed = [{name: getattr(each, name) for name in names} for each in self.found]
        return {
            "processes": listed if listed or self.is_complete else None,
            "complete": self.is_complete,
        }


def search(
    config: TrainerConfig,
    status: DaemonStatus,
    daemon_uid: int,
    *,
    devices: Path = DEVICES,
    limit_s: float = LIMIT_S,
) -> Search:
    """Search for processes that are not connected.  Raises nothing, and returns within ``limit_s``.

    Args:
        config: of the trainer.
        status: of the daemon.
        daemon_uid: the user that listens on the daemon's socket.
        devices: directory of the device files.
    """
    found: list[Unconnected] = []
    results: queue.SimpleQueue[bool] = queue.SimpleQueue()
    until_mono_s = time.monotonic() + limit_s

    def work() -> None:
        is_complete = False
        with suppress(OSError, ValueError):  # the daemon, or a process that ended
            is_complete = _Walk(config, status, daemon_uid, devices, until_mono_s).run(found)
        results.put(is_complete)

    # A daemon thread: a process can block its reader, with a FUSE mount for example.
    threading.Thread(target=work, name="unconnected", daemon=True).start()
    is_complete = False
    with suppress(queue.Empty):
        is_complete = results.get(timeout=limit_s)
    return Search(tuple(found), is_complete)


class _Walk:
    """One walk over ``/proc``."""

    def __init__(
        self,
        config: TrainerConfig,
        status: DaemonStatus,
        daemon_uid: int,
        devices: Path,
        until_mono_s: float,
    ) -> None:
        self._config = config
        self._daemon = status.pid
        if os.stat(f"/proc/{self._daemon}").st_uid != daemon_uid or status.trainers_not_shown:
            # The daemon has other process ids than this process, or more trainers than it reports.
            raise ValueError("the trainers of the daemon are unknown")
        self._connected = {each.pid for each in status.trainers if each.connected}
        self._allowed_uids = self._users(daemon_uid)
        self._prefix = f"{devices}/"
        self._until_mono_s = until_mono_s

    def _users(self, daemon_uid: int) -> frozenset[int]:
        uids: frozenset[int] = frozenset()
        with suppress(ConfigError):  # another check reports it
            uids = users.uids_of(self._config.users)
        return users.may_be_signalled(uids, daemon_uid)

    def run(self, found: list[Unconnected]) -> bool:
        """Fill ``found``; whether every process was examined."""
        configured = self._configured()
        known = {self._daemon, *self._connected}
        if configured and self._is_signalled(configured):
            known.add(configured)
        above: set[int] = set()
        for pid in known - {self._daemon}:
            with suppress(OSError, ValueError):  # the trainer has just ended
                above |= peers.lineage(pid)
        is_complete = True
        for count, pid in enumerate(_pids()):
            if (
                count == _PROCESSES_MAX
                or len(found) == FOUND_MAX
                or time.monotonic() > self._until_mono_s
            ):
                return False
            try:
                seen = self._seen(pid, is_configured=pid == configured)
                if seen and pid not in above and not peers.lineage(pid) & known:
                    each = self._described(pid, seen, is_configured=pid == configured)
                    if each.program not in _NOT_TRAINERS:
                        found.append(each)
            except (FileNotFoundError, ProcessLookupError, ValueError):
                continue  # it has ended
            except OSError:
                is_complete = False
        # hidepid= hides the processes of other users without an error.
        return is_complete and os.geteuid() == 0

    def _configured(self) -> int:
        with suppress(signals.SignalRefusal, OSError):
            return signals.configured_process(self._config, self._allowed_uids)
        return 0

    def _is_signalled(self, pid: int) -> bool:
        number = signal_number(self._config.signal)
        with suppress(OSError, ValueError):
            return number is not None and peers.catches_signal(pid, number)
        return False

    def _seen(self, pid: int, *, is_configured: bool) -> str:
        if is_configured:
            key = "unit" if self._config.pid_file is None else "pid_file"
            return f"is the process of trainer.{key}"
        with os.scandir(f"/proc/{pid}/fd") as fds:
            for count, fd in enumerate(fds):
                if count == _FDS_MAX or time.monotonic() > self._until_mono_s:
                    raise OSError("the process has too many open files")
                with suppress(FileNotFoundError):  # closed meanwhile
                    target = os.readlink(fd.path)
                    name = target.removeprefix(self._prefix)
                    if name != target and _DEVICE.fullmatch(name):
                        return f"holds {target}"
        return ""

    def _described(self, pid: int, seen: str, *, is_configured: bool) -> Unconnected:
        name = signals.program(peers.command_line(pid))[:_PROGRAM_CHARS_MAX]
        uid = os.stat(f"/proc/{pid}").st_uid
        fix = self._fix(pid)
        if is_configured and self._config.signal != "none":
            fix = f"install a handler for {self._config.signal} in its training script"
        return Unconnected(pid, uid, str(printable(name)), seen, fix)

    def _fix(self, pid: int) -> str:
        socket = self._config.socket
        try:
            named = peers.environment_of(pid).get(SOCKET_ENV, "")
            if _is_same(pid, named or str(socket), socket):
                return (
                    "call swansong.attach() in its training script, or set trainer.signal and "
                    "trainer.pid_file"
                )
            if _is_same(pid, str(socket), socket):
                return (
                    f"set {SOCKET_ENV}={socket} in its environment, instead of {printable(named)}"
                )
        except OSError:
            return (
                f"call swansong.attach() in its training script, with {SOCKET_ENV}={socket}, and mount "
                f"{socket.parent} if it runs in a container"
            )
        return f"mount {socket.parent} into its container, and call swansong.attach() in its script"


def _pids() -> Iterator[int]:
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal():
                yield int(entry.name)


def _is_same(pid: int, path: str, socket: Path) -> bool:
    """Whether the path leads that process to the daemon's socket."""
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/root/{path}"), os.stat(socket))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except ValueError:  # the path contains a zero byte
        return False
