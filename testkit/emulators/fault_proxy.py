# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that injects faults of networks; runs in the process of the tests.

A new fault closes the open connections and applies to later ones.  ``up`` is the direction to the server,
``down`` the direction to the client; ``times`` is the number of connections with the fault.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from dataclasses import dataclass, replace
from typing import Literal, Self
from urllib.parse import urlsplit

Way = Literal["up", "down"]
_WAKE_S = 0.02


@dataclass(frozen=True)
class _Fault:
    kind: Literal["none", "reset", "stall"] = "none"
    way: Way = "up"
    after_bytes: int = 0
    times: int | None = None
    bytes_per_s: float = float("inf")


class FaultProxy:
    """Listens on loopback at ``url`` and forwards to ``upstream_url``.

    ``hits`` counts the connections that had a fault.
    """

    def __init__(self, upstream_url: str) -> None:
        parts = urlsplit(upstream_url)
        self._upstream = (parts.hostname or "", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.settimeout(_WAKE_S)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.hits = 0
        self._lock = threading.Lock()
        self._closed = False
        self._epoch = 0
        self._fault = _Fault()
        self._free_mono_s = 0.0
        """When a slow link has sent what was given to it."""
        self._relays: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def forward(self) -> None:
        """Forward without faults."""
        self._begin(_Fault())

    def reset(self, way: Way, after_bytes: int, *, times: int | None = None) -> None:
        """Send a TCP reset to the client after ``after_bytes`` bytes in that direction."""
        self._begin(_Fault("reset", way, after_bytes, times))

    def stall(self, way: Way, after_bytes: int) -> None:
        """Stop after ``after_bytes`` bytes, and keep the connection open."""
        self._begin(_Fault("stall", way, after_bytes))

    def pace(self, bytes_per_s: float) -> None:
        """Forward both directions of all connections together at this rate."""
        self._begin(_Fault(bytes_per_s=bytes_per_s))

    def close(self) -> None:
        self._closed = True
        self._acceptor.join()
        self._begin(_Fault())
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, fault: _Fault) -> None:
        with self._lock:
            self._fault = fault
            self._epoch += 1
            relays, self._relays = self._relays, []
        for relay in relays:
            relay.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                continue
            with self._lock:
                fault = self._fault
                if fault.times is not None:
                    left = fault.times - 1
                    self._fault = replace(fault, times=left) if left else _Fault()
                relay = threading.Thread(
                    target=self._relay, args=(client, fault, self._epoch), daemon=True
                )
                self._relays.append(relay)
                relay.start()

    def _relay(self, client: socket.socket, fault: _Fault, epoch: int) -> None:
        client.setblocking(True)
        with client, socket.socket() as server:
            try:
                server.connect(self._upstream)
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pump(client, server, fault, epoch)
            except OSError:
                return  # either peer may close at any time

    def _pump(
        self, client: socket.socket, server: socket.socket, fault: _Fault, epoch: int
    ) -> None:
        passed_bytes = 0  # in the direction of the fault
        while self._epoch == epoch:
            ready, _, _ = select.select([client, server], [], [], _WAKE_S)
            for source in ready:
                data = source.recv(65536)
                if not data:
                    return
                target = server if source is client else client
                way = "up" if source is client else "down"
                if fault.kind != "none" and way == fault.way:
                    room = fault.after_bytes - passed_bytes
                    passed_bytes += len(data)
                    if 0 <= room < len(data):
                        target.sendall(data[:room])
                        self._strike(client, fault, epoch)
                        return
                self._wait_for_link(len(data), fault, epoch)
                target.sendall(data)

    def _wait_for_link(self, size_bytes: int, fault: _Fault, epoch: int) -> None:
        with self._lock:
            self._free_mono_s = max(self._free_mono_s, time.monotonic())
            self._free_mono_s += size_bytes / fault.bytes_per_s
            due_mono_s = self._free_mono_s
        waiting = threading.Event()
        while self._epoch == epoch and (left_s := due_mono_s - time.monotonic()) > 0:
            waiting.wait(min(left_s, _WAKE_S))

    def _strike(self, client: socket.socket, fault: _Fault, epoch: int) -> None:
        self.hits += 1
        if fault.kind == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        waiting = threading.Event()
        while self._epoch == epoch:
            waiting.wait(_WAKE_S)
