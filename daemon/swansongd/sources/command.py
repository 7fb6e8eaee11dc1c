# SPDX-License-Identifier: Apache-2.0
"""``command``: an operator's program that watches another cloud, and prints one JSON line for each notice.

The program runs in its own unit and as its own user.  systemd, as root, connects the program's output to the
socket of this source, which other users cannot open.  So the daemon starts no program, and the program gets
none of the daemon's rights.

========================  =============================================================================
``id``                    the notice; the same for each line about it
``deadline`` or ``in_s``  end of the VM, as a time with its zone or in seconds; both may be missing
``reason``                text for the log and the farewell
``withdrawn``             true: the notice is over
``error``                 instead of all others: the program is blind for now; the next notice, or a line
                          ``{}``, ends that
========================  =============================================================================
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from swansong import bounds
from swansong.bounds import BoundsError
from swansong_bucket.config.values import InvalidValue, utc_instant
from swansong_bucket.errors import SwansongError
from swansong_bucket.model import DeadlineQuality, Notice, Severity
from swansong_bucket.util.forms import FLAG, Form, Kind, Named, optional, or_else, text

from swansongd.core.events import NoticeRaised, NoticeWithdrawn
from swansongd.observe.health import HealthTracker
from swansongd.sources.manual import SOON_S
from swansongd.sources.metadata import shortened
from swansongd.sources.source import Clocks, Post, must_post
from swansongd.util import unix

NAME = "command"
KEY = "sources.command_socket"
LINE_BYTES_MAX = 4096
NOTICES_MAX = 16

_TURN_S = 0.5
_PAUSE_S = 0.1
"""Between two reads: a program that prints without end waits, and causes at most one event in this time."""
_BLIND_AFTER_S = 10.0
"""More than a restart of the program or of the daemon takes."""
_ID_CHARACTERS_MAX = 100
_SECONDS_MAX = 366 * 86400.0
FIELDS = ("id", "deadline", "in_s", "reason", "withdrawn", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the program."""

    id: str = ""
    """Empty: the line is about the program itself."""
    left_s: float | None = None
    """Time to the end of the VM; None if it is not stated."""
    reason: str = ""
    withdrawn: bool = False
    error: str = ""


_LINE = Form(
    Line,
    id=or_else(text(_ID_CHARACTERS_MAX), ""),
    in_s=Named("left_s", optional(Kind(partial(bounds.number, low=0.0, high=_SECONDS_MAX)))),
    reason=or_else(text(), ""),
    withdrawn=or_else(FLAG, False),
    error=or_else(text(), ""),
)


def parse(data: bytes, *, now_wall_s: float) -> Line:
    """Read a line.

    Raises:
        BoundsError: it is not a JSON object of the fields above.
    """
    body = bounds.json_object(data, "the line", LINE_BYTES_MAX)
    if unknown := sorted(body.keys() - set(FIELDS)):
        raise BoundsError(f"unknown field {shortened(unknown[0], 40)}; known: {', '.join(FIELDS)}")
    found = _LINE.read(body, "the line")
    if not found.id and body.keys() - {"error"}:
        raise BoundsError("id: is missing")
    if found.error and body.keys() - {"error"}:
        raise BoundsError("error: stands alone in its line")
    if "deadline" not in body:
        return found
    if found.left_s is not None:
        raise BoundsError("in_s: give it or deadline, not both")
    try:
        return replace(found, left_s=utc_instant(body["deadline"]).timestamp() - now_wall_s)
    except (InvalidValue, OverflowError) as error:
        raise BoundsError(f"deadline: {error}") from None


class CommandSource:
    """Reads the lines of one connected program at a time.

    The earliest of its notices is in force.  Its notices outlive the program: after a start it prints those
    that are in force again, and withdraws the others.

    Args:
        path: of the socket.
        assumed_grace_s: time to the end of the VM if a notice does not state it.
        clocks: of this VM.
    """

    name = NAME

    def __init__(self, path: Path, *, assumed_grace_s: float, clocks: Clocks) -> None:
        self._path = path
        self._assumed_grace_s = assumed_grace_s
        self._clocks = clocks
        self._notices: dict[str, Notice] = {}
        self._posted: Notice | None = None
        self._has_changed = False
        """Whether a line was about a notice since the last event."""

    def run(self, post: Post, stop: threading.Event) -> None:
        """Watch until ``stop`` is set."""
        health = HealthTracker(
            NAME, blind_after_s=_BLIND_AFTER_S, monotonic=self._clocks.monotonic, post=post
        )
        while not stop.is_set():
            try:
                with unix.listen(
                    self._path, socket.SOCK_STREAM, key=KEY, backlog=1, mode=0o600
                ) as listener:
                    listener.settimeout(_TURN_S)
                    self._accept(listener, health, post, stop)
            except SwansongError as error:
                health.failed(error.line())
            except OSError as error:
                health.failed(f"{self._path}: {error.strerror}")
            stop.wait(_TURN_S)

    def _accept(
        self, listener: socket.socket, health: HealthTracker, post: Post, stop: threading.Event
    ) -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                health.failed("no program is connected")
                continue
            with connection:
                connection.settimeout(_TURN_S)
                self._read(connection, health, post, stop)

    def _read(
        self, connection: socket.socket, health: HealthTracker, post: Post, stop: threading.Event
    ) -> None:
        """Read lines until the program ends."""
        buffer, problem = b"", ""
        who = f"the program of process {unix.peer_credentials(connection)[0]}"
        while not stop.is_set():
            if problem:
                health.failed(f"{who}: {problem}")
            else:
                health.ok(f"{who} is connected")
            stop.wait(_PAUSE_S)
            try:
                data = connection.recv(LINE_BYTES_MAX)
            except TimeoutError:
                continue
            except OSError:
                return
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            if len(buffer) > LINE_BYTES_MAX:
                lines, buffer = [*lines, buffer], b""
            for line in filter(None, map(bytes.strip, lines)):
                problem = self._record(line)
            self._post_earliest(post)

    def _record(self, data: bytes) -> str:
        """Record one line; returns the problem of the line, or of the program."""
        if len(data) > LINE_BYTES_MAX:
            return f"a line has over {LINE_BYTES_MAX} bytes"
        try:
            line = parse(data, now_wall_s=self._clocks.wall())
        except BoundsError as error:
            return str(error)
        if not line.id:
            return shortened(line.error)
        self._notices.pop(line.id, None)
        self._has_changed = True
        if not line.withdrawn:
            if len(self._notices) >= NOTICES_MAX:
                return f"over {NOTICES_MAX} notices are in force: withdraw one"
            self._notices[line.id] = self._notice_of(line)
        return ""

    def _notice_of(self, line: Line) -> Notice:
        left_s = self._assumed_grace_s if line.left_s is None else line.left_s
        return Notice(
            source=NAME,
            kind=NAME,
            identity=f"{NAME}:{shortened(line.id)}",
            severity=Severity.IMMINENT if left_s <= SOON_S else Severity.SCHEDULED,
            deadline_mono_s=self._clocks.monotonic() + left_s,
            deadline_quality=DeadlineQuality.ASSUMED
            if line.left_s is None
            else DeadlineQuality.STATED,
            detail=shortened(line.reason),
        )

    def _post_earliest(self, post: Post) -> None:
        if not self._has_changed:
            return
        self._has_changed = False
        earliest = min(
            self._notices.values(), key=lambda notice: notice.deadline_mono_s, default=None
        )
        if earliest is None:
            self._posted = None
            post(NoticeWithdrawn(NAME, "the program withdrew it"))
        elif must_post(self._posted, earliest, self._clocks.monotonic()):
            self._posted = earliest
            post(NoticeRaised(earliest))
