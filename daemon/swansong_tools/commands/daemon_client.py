# SPDX-License-Identifier: Apache-2.0
"""Client of the daemon on this VM, over the daemon's socket."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, TypeVar

from swansong.bounds import BoundsError
from swansong.fields import ProtocolError
from swansong.protocol import (
    DEFAULT_SOCKET,
    MAX_MESSAGE_BYTES,
    Message,
    Refused,
    Restored,
    RestoreQuery,
    Restoring,
    Status,
    StatusQuery,
    decode,
    encode,
)
from swansong_bucket.errors import Unreachable
from swansongd.observe.status import DaemonStatus, from_json
from swansongd.util import unix

TIMEOUT_S = 5.0
RESTORE_TIMEOUT_S = 120.0
"""Longer than the daemon waits for the store before it reports progress or an error."""
_RETRY_S = 0.05
_POLL_S = 0.1
_NOT_ALLOWED = "Run the command as root, or as one of trainer.users"

Reply = TypeVar("Reply", bound=Message)


class DaemonClient:
    """A connection to the daemon.

    Args:
        path: socket of the daemon.

    Raises:
        Unreachable: from all methods; the daemon does not run, does not reply or refuses.
    """

    def __init__(self, path: Path) -> None:
        self.last_status: DaemonStatus | None = None
        self._path = path
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(TIMEOUT_S)
        try:
            with self._explained():
                self._connect()
        except Unreachable:
            self.close()
            raise

    def _connect(self) -> None:
        deadline_mono_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self._channel.connect(str(self._path))
                return
            except BlockingIOError:  # the kernel's queue of connections is full
                if time.monotonic() > deadline_mono_s:
                    raise
                time.sleep(_RETRY_S)

    def request(
        self,
        message: Message,
        answered_by: type[Reply],
        *,
        timeout_s: float = TIMEOUT_S,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> Reply:
        """Send a request and wait for its reply; other messages are skipped.

        Args:
            timeout_s: limit of the wait; a report of progress starts it again.
            progress: takes the bytes done and the total of a download.
        """
        deadline_mono_s = time.monotonic() + timeout_s
        self._channel.settimeout(timeout_s)
        with self._explained():
            with suppress(BrokenPipeError):  # the daemon's last message is still to be received
                self._channel.send(encode(message))
            while data := self._received(deadline_mono_s):
                reply = decode(data)
                if isinstance(reply, answered_by):
                    return reply
                if isinstance(reply, Refused):
                    # The reason names who may send the request.
                    raise Unreachable(f"the request failed: the daemon refused it: {reply.reason}")
                if isinstance(reply, Restoring):
                    progress(reply.bytes_done, reply.bytes_total)
                    deadline_mono_s = time.monotonic() + timeout_s
        raise Unreachable(
            f"the request failed: the daemon at {self._path} closed the connection",
            hint=_not_running(self._path),
        )

    def restored(self, progress: Callable[[int, int], None]) -> Restored:
        """Ask for the checkpoint that a trainer would get, and wait while the daemon downloads it."""
        query = RestoreQuery(secrets.token_hex(8))
        return self.request(query, Restored, timeout_s=RESTORE_TIMEOUT_S, progress=progress)

    def _received(self, deadline_mono_s: float) -> bytes:
        left_s = deadline_mono_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._channel.settimeout(left_s)
        return self._channel.recv(MAX_MESSAGE_BYTES + 1)

    def status(self) -> DaemonStatus:
        report = self.request(StatusQuery(), Status).report
        with self._explained():
            self.last_status = from_json(report)
        return self.last_status

    def until(self, is_seen: Callable[[DaemonStatus], object]) -> DaemonStatus:
        """The daemon's state once its decision loop has acted on our message."""
        deadline_mono_s = time.monotonic() + TIMEOUT_S
        while not is_seen(status := self.status()):
            if time.monotonic() > deadline_mono_s:
                raise Unreachable(
                    "notifying the daemon failed: it accepted the message but did not act on it "
                    f"within {TIMEOUT_S:g} s",
                    hint="Check its state with: swansong status",
                )
            time.sleep(_POLL_S)
        return status

    def peer_uid(self) -> int:
        """The user that listens on the socket, as the kernel reports it."""
        return unix.peer_credentials(self._channel)[1]

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        path, timeout_s = self._path, self._channel.gettimeout()
        try:
            yield
        except PermissionError:
            raise Unreachable(
                f"connecting to the daemon at {path} failed: permission denied", hint=_NOT_ALLOWED
            ) from None
        except TimeoutError:
            raise Unreachable(
                f"the request failed: the daemon at {path} did not reply within {timeout_s:g} s",
                hint=_not_running(path),
            ) from None
        except OSError as error:
            raise Unreachable(
                f"connecting to the daemon at {path} failed: {error.strerror}",
                hint=_not_running(path),
            ) from None
        except (ProtocolError, BoundsError) as error:
            raise Unreachable(
                f"the request failed: {path} returned an invalid message ({error})",
                hint="Restart the daemon after an upgrade",
            ) from None


def _not_running(socket: Path) -> str:
    is_job = socket.parent.parent == Path(DEFAULT_SOCKET).parent
    unit = f"swansongd@{socket.parent.name}" if is_job else "swansongd"
    return f"Check the daemon with: systemctl status {unit}"
