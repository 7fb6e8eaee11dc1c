# SPDX-License-Identifier: Apache-2.0
"""A conversation with the daemon of this VM over its socket, for the commands that need one."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from swansong.protocol import (
    MAX_MESSAGE_BYTES,
    Message,
    ProtocolError,
    Refused,
    Status,
    StatusQuery,
    decode,
    encode,
)

from swansongd.errors import Unreachable

TIMEOUT_S = 5.0
_RETRY_S = 0.05
_UCRED = struct.Struct("3i")
"""Process, user and group."""
_NOT_RUNNING = "Start it, or see why it ended: systemctl status swansongd"
_NOT_ALLOWED = "Ask as root, or as one of trainer.users"

Answer = TypeVar("Answer", bound=Message)


class Daemon:
    """The connected daemon.

    Args:
        path: of its socket.

    Raises:
        Unreachable: from all methods; no daemon, or it refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(TIMEOUT_S)
        with self._in_words():
            self._connect()

    def _connect(self) -> None:
        give_up_mono_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self._channel.connect(str(self._path))
                return
            except BlockingIOError:  # the kernel's queue of connections is full
                if time.monotonic() > give_up_mono_s:
                    raise
                time.sleep(_RETRY_S)

    def ask(self, question: Message, answered_by: type[Answer]) -> Answer:
        """Send, and wait at most :data:`TIMEOUT_S` for the answer, whatever else comes."""
        give_up_mono_s = time.monotonic() + TIMEOUT_S
        self._channel.settimeout(TIMEOUT_S)
        with self._in_words():
            self._channel.send(encode(question))
            while data := self._received(give_up_mono_s):
                answer = decode(data)
                if isinstance(answer, answered_by):
                    return answer
                if isinstance(answer, Refused):
                    raise Unreachable(f"the daemon refused: {answer.reason}", hint=_NOT_ALLOWED)
        raise Unreachable(f"the daemon at {self._path} closed the connection", hint=_NOT_ALLOWED)

    def _received(self, give_up_mono_s: float) -> bytes:
        left_s = give_up_mono_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._channel.settimeout(left_s)
        return self._channel.recv(MAX_MESSAGE_BYTES + 1)

    def report(self) -> dict[str, Any]:
        """Its state; docs/operations/status.md describes it."""
        return self.ask(StatusQuery(), Status).report

    def peer_uid(self) -> int:
        """The user that listens on the socket, as the kernel reports it."""
        credentials = self._channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return int(_UCRED.unpack(credentials)[1])

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        path = self._path
        try:
            yield
        except PermissionError:
            raise Unreachable(f"no right to ask the daemon at {path}", hint=_NOT_ALLOWED) from None
        except TimeoutError:
            raise Unreachable(
                f"the daemon at {path} did not answer within {TIMEOUT_S:g} s", hint=_NOT_RUNNING
            ) from None
        except OSError as error:
            raise Unreachable(
                f"no daemon answers at {path} ({error.strerror})", hint=_NOT_RUNNING
            ) from None
        except ProtocolError as error:
            raise Unreachable(
                f"what answers at {path} is no swansongd of this version ({error})",
                hint="Restart the daemon after an upgrade",
            ) from None
