# SPDX-License-Identifier: Apache-2.0
"""The metadata service of a simulated VM: the emulators and their faults, on the simulated clock.

The daemon's sources, their HTTP client and its parser are the production code.  Only the connection is
replaced, by a pair of sockets whose reads wait in the schedule.  The service has its own wall clock.
"""

from __future__ import annotations

import select
import socket
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from testkit.emulators.aws_imds import AwsImds
from testkit.emulators.azure_imds import AzureImds
from testkit.emulators.faults import Emulator, Handler
from testkit.emulators.gcp_metadata import GcpMetadata
from testkit.simulation.schedule import Schedule

if TYPE_CHECKING:
    from testkit.simulation.production import Vm

EMULATORS: dict[str, type[Emulator]] = {"aws": AwsImds, "gcp": GcpMetadata, "azure": AzureImds}
SOURCES = {"aws": "aws.spot", "gcp": "gcp.preempted", "azure": "azure.deletion"}
DETECTED_S = {"aws": 17.0, "gcp": 34.0, "azure": 13.0}
"""Longest time until the daemon has a notice of a service that responds.  One poll interval, and a backoff
of 2 s, after two exchanges at the longest timeout; on AWS with an exchange for a token."""
_EVENT = "EVENT-1"
_BODIES = ("", "{", "null", "[]", "\0\N{SNOWMAN}", "[" * 3000, '{"Events": 1}', "x" * 70_000)
_STATUSES = (400, 401, 403, 429, 500, 503)
_FAULTS: tuple[dict[str, Any], ...] = (
    *({"kind": kind} for kind in ("hang", "stall", "truncate", "reset", "refuse-put")),
    *({"kind": "delay", "value": value} for value in (0.9, 4.0, 30.0)),
    {"kind": "slow", "value": 0.02},
    {"kind": "redirect", "value": "http://192.0.2.1/"},
    {"kind": "status", "value": 503, "count": 3},
)


class _Socket(socket.socket):
    """One end of a connection.  A read waits in the schedule."""

    schedule: Schedule
    limit_s: float | None = None

    def settimeout(self, value: float | None) -> None:
        self.limit_s = value

    def setsockopt(self, *_: Any) -> None:
        """Accept the options that the client sets for TCP."""

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        poll = select.poll()
        poll.register(self, select.POLLIN | select.POLLHUP)
        with self.schedule.outside():
            ready = poll.poll
        if not self.schedule.wait(lambda: bool(ready(0)), self.limit_s):
            raise TimeoutError("timed out")
        return super().recv_into(buffer, nbytes, flags)


@dataclass
class Shown:
    """A notice that the service shows."""

    at_s: float
    end_s: float
    """The end of the VM, on the clock of the schedule."""


class Cloud:
    """The metadata service of one VM.

    Args:
        vm: the VM.
        kind: of the cloud.
    """

    def __init__(self, vm: Vm, kind: str) -> None:
        self._vm, self._kind = vm, kind
        self._schedule, self._random = vm.world.schedule, vm.world.random
        self._group = f"{vm.name}-metadata"
        self._emulator = EMULATORS[kind]()
        self._connections: list[_Socket] = []
        self._shown: Shown | None = None
        self._past: list[Shown] = []
        self._withdrawn_s = 0.0
        """Time of the last withdrawal, of which the daemon may learn after the next notice is shown."""
        self._changes = 0
        """Number of the changes of notices and of faults."""
        self._schedule.skews_s[self._group] = self._random.choice([0.0, 0.0, 40.0, -40.0, 7200.0])

    def connect(self) -> socket.socket:
        """In place of a TCP connection."""
        self._schedule.sleep(self._random.uniform(0, 0.002))
        ours, theirs = (_Socket(fileno=each.detach()) for each in socket.socketpair())
        ours.schedule = theirs.schedule = self._schedule
        self._connections.append(ours)
        server = cast("Any", SimpleNamespace(emulator=self._emulator))
        self._schedule.start(self._serve, (theirs, server), group=self._group, name="metadata")
        return ours

    def disconnect(self) -> None:
        """The daemon was killed."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def _serve(self, connection: _Socket, server: Any) -> None:
        try:
            Handler(connection, ("vm", 0), server)
        except OSError:
            pass  # the client has closed the connection
        finally:
            connection.close()

    def _order(self, name: str, **body: Any) -> None:
        """As a request to ``/_control/``."""

        def order() -> None:
            with self._emulator.changed:
                self._emulator.order(name, body)
                self._emulator.changed.notify_all()

        self._schedule.start(order, group=self._group, name=name)
        self._changes += 1
        self._schedule.start(self._expect, (self._changes,), group=self._group, name="detection")

    def show(self, seconds: float) -> None:
        """Show a notice of the end in this time, perhaps as an end that has passed."""
        now_s = self._schedule.now_s
        if self._kind == "aws":
            self._order("notice", action="terminate", in_s=seconds)
        elif self._kind == "gcp":
            self._order("set", key="instance/preempted", value="TRUE")
            seconds = 120.0
        else:
            self._order("event", type="Preempt", in_s=seconds, id=_EVENT)
        self._shown = Shown(now_s, now_s + seconds)
        self._past.append(self._shown)

    def withdraw(self) -> None:
        """Show no notice any more."""
        if self._kind == "aws":
            self._order("withdraw")
        elif self._kind == "gcp":
            self._order("set", key="instance/preempted", value="FALSE")
        elif self._shown is not None:
            self._order("end", id=_EVENT)
        self._shown = None
        self._withdrawn_s = self._schedule.now_s

    def disturb(self) -> None:
        """Withdraw the notice, or let the service fail for some time."""
        if self._shown is not None and self._random.random() < 0.5:
            self._vm.world.count("notice withdrawn")
            self.withdraw()
            return
        self._vm.world.count("metadata fault")
        self._spoil()
        self._schedule.sleep(self._random.uniform(0, 15))
        self._order("clear")

    def rehearse(self) -> None:
        """Notices and faults, one after the other: without a trainer this costs little time."""
        for _ in range(4):
            self._schedule.sleep(self._random.uniform(1, 8))
            if self._shown is None:
                self.show(self._random.uniform(20, 110))
                self._schedule.sleep(self._random.uniform(1, 8))
            self.disturb()
            if self._random.random() < 0.5:
                self._schedule.sleep(DETECTED_S[self._kind] + 1)
        self._schedule.sleep(DETECTED_S[self._kind] + 1)

    def _spoil(self) -> None:
        random = self._random
        own = {"aws": ["tokens"], "azure": ["another VM"] * 2}.get(self._kind, [])
        match random.choice(["status", "status", "connection", "body", "clock", *own]):
            case "tokens":
                self._order("invalidate-tokens")
            case "another VM":
                self._order(
                    "event", type="Preempt", in_s=60, id="EVENT-2", resources=["another-vm"]
                )
            case "clock":
                self._schedule.skews_s[self._group] += random.choice([-3600.0, 3600.0])
            case "status":
                self._order("fault", kind="status", value=random.choice(_STATUSES))
            case "connection":
                self._order("fault", **random.choice(_FAULTS))
            case "body":
                # Any body of the spot notice or of a recommendation is a notice.
                path = {"aws": "*/api/token", "gcp": "*/preempted"}.get(self._kind, "*")
                self._order("fault", kind="body", value=random.choice(_BODIES), path=path)

    # ------------------------------------------------------------ what must hold

    def _expect(self, changes: int) -> None:
        """The daemon knows of a change in time, if it and the service run without faults."""
        service = self._vm.service
        self._schedule.sleep(DETECTED_S[self._kind])
        if service is None or service is not self._vm.service or service._stop.is_set():
            return
        if self._changes != changes:
            return
        sources = [notice.source for notice in service._state.notices.live.values()]
        if (SOURCES[self._kind] in sources) != (self._shown is not None):
            self._report(f"{sources} are live")

    def check_log(self, event: dict[str, Any]) -> None:
        """The daemon reports only what was shown, and no deadline after the end of the VM."""
        is_late = self._schedule.now_s < self._withdrawn_s + DETECTED_S[self._kind]
        if event["event"] == "notice_withdrawn" and self._shown is not None and not is_late:
            self._report(str(event))
        if event["event"] != "notice" or not event["source"].startswith(tuple(EMULATORS)):
            return
        latest_s = max((each.end_s for each in self._past), default=0.0) + 1.5
        is_late = self._schedule.now_s + event["seconds_left"] > latest_s
        is_assumed = event["deadline_quality"] == "assumed"
        if event["source"] != SOURCES[self._kind] or (is_late and not is_assumed):
            self._report(str(event))

    def _report(self, what: str) -> None:
        shown = f"{self._kind} shows {self._shown}, and has shown {self._past}"
        self._vm.world.problems.append(f"{self._vm.name}: {what}, but {shown}")
