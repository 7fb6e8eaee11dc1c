# SPDX-License-Identifier: Apache-2.0
"""systemd-logind on its own system bus: ``python -m testkit.emulators.fake_logind``.

The bus is a real dbus-daemon in a private directory; logind is emulated only for delay locks and shutdowns.
Control, in addition to :mod:`testkit.emulators.faults`, all by POST below ``/_control/``::

    state      {}                      {"bus": ADDRESS, "locks": 1, "taken": 3, "shutdown": "no"}, where
               shutdown is no, waiting (for the locks) or gone (no lock delays it any more)
    shutdown   {"type": "reboot"}      announce, then wait for the delay locks; "metadata": false omits
                                       the signal that systemd before 255 does not have
    cancel     {}                      cancel the announced shutdown
    delay      {"max_s": 24}           InhibitDelayMaxSec from now on
    deny       {"denied": true}        polkit refuses locks
    stop       {}                      logind leaves the bus
    start      {}                      and returns; existing locks remain, as in logind
    stop_bus   {}                      the dbus-daemon is killed
    start_bus  {}                      and returns at the same address, with logind
"""

from __future__ import annotations

import argparse
import os
import secrets
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from jeepney import (
    DBusAddress,
    HeaderFields,
    MessageType,
    new_error,
    new_method_call,
    new_method_return,
    new_signal,
)
from jeepney.bus import get_bus
from jeepney.bus_messages import message_bus
from jeepney.io.blocking import DBusConnection, prep_socket

from testkit.emulators.faults import ControlError, Emulator, Reply, Request, serve

NAME = "org.freedesktop.login1"
MANAGER = DBusAddress("/org/freedesktop/login1", NAME, f"{NAME}.Manager")
_CONFIG = Path(__file__).with_name("system_bus.conf")
# The bus exits when our end of the pipe closes, also if this process is killed.  The shell leaves the output
# to the bus, whose end is then seen, and waits until the address is free.
_TETHERED = '"$@" & exec >&-; read -r _; kill -KILL $!; { wait $!; } 2>/dev/null'


class FakeLogind(Emulator):
    """The bus and logind.

    Args:
        max_s: InhibitDelayMaxSec.
    """

    def __init__(self, *, max_s: float) -> None:
        super().__init__()
        self.address = f"unix:abstract=swansong-{secrets.token_hex(8)}"
        self._max_s = max_s
        self._denied = False
        self._locks: list[int] = []
        self._taken = 0
        self._shutdown = "no"
        self._give_up_mono_s = 0.0
        self._connection: Any = None
        self._daemon: subprocess.Popen[bytes] | None = None
        self._orders: dict[str, Callable[..., None]] = {
            "state": lambda: None,
            "shutdown": self._announce,
            "cancel": self._cancel,
            "delay": self._set_delay,
            "deny": self._set_denied,
            "stop": self._stop,
            "start": self._start,
            "stop_bus": self._stop_bus,
            "start_bus": self._start_bus,
        }
        self._start_bus()
        threading.Thread(target=self._work, name="logind", daemon=True).start()

    def respond(self, request: Request) -> Reply:
        return Reply(404, "orders only")

    def order(self, name: str, body: dict[str, Any]) -> Any:
        if name not in self._orders:
            return super().order(name, body)
        self._orders[name](**body)
        return {
            "bus": self.address,
            "locks": len(self._locks),
            "taken": self._taken,
            "shutdown": self._shutdown,
        }

    # ------------------------------------------------------------------ orders

    def _announce(self, type: str = "poweroff", metadata: bool = True) -> None:
        if self._shutdown == "waiting":
            raise ControlError("a shutdown is in progress")
        self._shutdown = "waiting"
        self._give_up_mono_s = time.monotonic() + self._max_s
        if metadata:
            self._tell("PrepareForShutdownWithMetadata", "ba{sv}", (True, {"type": ("s", type)}))
        self._tell("PrepareForShutdown", "b", (True,))

    def _cancel(self) -> None:
        self._shutdown = "no"
        self._tell("PrepareForShutdown", "b", (False,))

    def _set_delay(self, max_s: float) -> None:
        self._max_s = max_s

    def _set_denied(self, denied: bool) -> None:
        self._denied = denied

    def _start_bus(self) -> None:
        if shutil.which("dbus-daemon") is None:
            raise ControlError("no dbus-daemon here: apt-get install dbus-daemon")
        command = [
            "dbus-daemon",
            f"--config-file={_CONFIG}",
            f"--address={self.address}",
            "--nofork",
            "--print-address=1",
        ]
        # The first line of output is the address, once the bus listens.
        self._daemon = subprocess.Popen(
            ["sh", "-c", _TETHERED, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._daemon.stdout is not None
        if not self._daemon.stdout.readline():
            raise ControlError("dbus-daemon did not start")
        self._start()

    def _stop_bus(self) -> None:
        self._stop()
        if self._daemon is not None:
            self._daemon.communicate()  # closes its standard input
            self._daemon = None

    def _start(self) -> None:
        if self._connection is None:
            connection = DBusConnection(
                prep_socket(get_bus(self.address), enable_fds=True), enable_fds=True
            )
            connection.send_and_get_reply(message_bus.RequestName(NAME), timeout=5)
            self._connection = connection

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _tell(self, member: str, signature: str, body: tuple[Any, ...]) -> None:
        if self._connection is not None:
            self._connection.send(new_signal(MANAGER, member, signature, body))

    # ------------------------------------------------------------------ the service

    def _work(self) -> None:
        """Respond to calls, watch the locks, and continue the shutdown."""
        while True:
            with self.changed:
                connection = self._connection
                watched = [*self._locks, *([connection.sock] if connection else [])]
            with suppress(OSError, ValueError):  # closed meanwhile by a command
                select.select(watched, [], [], 0.02)
            with self.changed:
                if self._connection is not None:
                    self._hear()
                for lock_fd in list(self._locks):
                    if select.select([lock_fd], [], [], 0)[0] and not os.read(lock_fd, 1):
                        self._locks.remove(lock_fd)
                        os.close(lock_fd)
                late = time.monotonic() >= self._give_up_mono_s
                if self._shutdown == "waiting" and (late or not self._locks):
                    self._shutdown = "gone"

    def _hear(self) -> None:
        try:
            while True:
                message = self._connection.receive(timeout=0)
                if message.header.message_type is MessageType.method_call:
                    self._answer(message)
        except TimeoutError:
            return
        except OSError:
            self._stop()

    def _answer(self, call: Any) -> None:
        member = call.header.fields[HeaderFields.member]
        if member == "Get":
            value = {
                "InhibitDelayMaxUSec": ("t", int(self._max_s * 1e6)),
                "PreparingForShutdown": ("b", self._shutdown != "no"),
            }[call.body[1]]
            self._connection.send(new_method_return(call, "v", (value,)))
        elif member != "Inhibit":
            self._refuse(call, "org.freedesktop.DBus.Error.UnknownMethod", f"no {member} here")
        elif call.body[0] != "shutdown" or call.body[3] != "delay":
            self._refuse(call, "org.freedesktop.DBus.Error.InvalidArgs", "not played here")
        elif self._denied:
            self._refuse(call, "org.freedesktop.DBus.Error.AccessDenied", "Permission denied")
        elif self._shutdown != "no":
            words = "The operation inhibition has been requested for is already running"
            self._refuse(call, f"{NAME}.OperationInProgress", words)
        else:
            read_fd, write_fd = os.pipe()
            self._connection.send(new_method_return(call, "h", (write_fd,)))
            os.close(write_fd)
            self._locks.append(read_fd)
            self._taken += 1

    def _refuse(self, call: Any, error: str, words: str) -> None:
        self._connection.send(new_error(call, error, "s", (words,)))


def spoofed_shutdown(address: str, victim: str) -> None:
    """Send a shutdown signal that is not from logind, as any user of the bus can."""
    with DBusConnection(prep_socket(get_bus(address))) as connection:
        signal = new_signal(MANAGER, "PrepareForShutdown", "b", (True,))
        signal.header.fields[HeaderFields.destination] = victim
        connection.send(signal)
        connection.send_and_get_reply(message_bus.GetId(), timeout=5)  # the signal was delivered


def users_of(address: str) -> list[str]:
    """Unique names of the other connections to the bus."""
    with DBusConnection(prep_socket(get_bus(address))) as connection:
        reply = connection.send_and_get_reply(new_method_call(message_bus, "ListNames"), timeout=5)
        return [n for n in reply.body[0] if n.startswith(":") and n != connection.unique_name]


def main() -> None:
    parser = argparse.ArgumentParser(description="systemd-logind on a bus of its own")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--max-s", type=float, default=24.0, help="InhibitDelayMaxSec")
    args = parser.parse_args()
    serve(FakeLogind(max_s=args.max_s), args.host, args.port)


if __name__ == "__main__":
    main()
