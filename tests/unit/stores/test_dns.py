# SPDX-License-Identifier: Apache-2.0
"""A name that resolved once still resolves when the resolver fails."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from swansong_bucket.stores.http.dns import AddressMemory


class Resolver:
    """A resolver that can fail."""

    def __init__(self) -> None:
        self.is_dead = False
        self.address = "192.0.2.1"

    def __call__(self, host: str, port: int, *_: object, **__: object) -> list[object]:
        if self.is_dead:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.address, port))]


@pytest.mark.fault("O16")
def test_cached_addresses_replace_a_failed_resolver() -> None:
    """A known name has its newest addresses; an unknown name is an error."""
    resolver = Resolver()
    memory = AddressMemory(resolver)
    memory("bucket.example", 443, proto=6)
    resolver.address = "192.0.2.2"
    memory("bucket.example", 443, proto=6)
    resolver.is_dead = True
    assert memory("bucket.example", 443, proto=6)[0][4] == ("192.0.2.2", 443)
    with pytest.raises(socket.gaierror):
        memory("other.example", 443, proto=6)


def test_the_libraries_use_the_cache() -> None:
    """Connections of urllib3, and so of boto3 and requests, use the cache."""
    program = """
import socket, urllib3
from swansong_bucket.stores.http import dns
dns.remember(); dns.remember()
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
memory = socket.getaddrinfo
real = memory._resolve
asked = []
memory._resolve = lambda *a, **k: (asked.append(a[0]), real("127.0.0.1", *a[1:], **k))[1]
urllib3.util.connection.create_connection(("store.example", port), 5).close()
def dead(*a, **k): raise socket.gaierror(-3, "dead")
memory._resolve = dead
urllib3.util.connection.create_connection(("store.example", port), 5).close()
assert asked == ["store.example"], asked
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
