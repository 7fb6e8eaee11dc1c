# SPDX-License-Identifier: Apache-2.0
"""Metrics over HTTP and as a textfile: formats, limits on clients, and failures that change nothing else."""

from __future__ import annotations

import gzip
import os
import random
import socket
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed
from swansong_bucket.config.values import ListenAddress
from swansongd.observe import exposition
from swansongd.observe.exposition import Exposition, Textfile, registry_of
from swansongd.observe.status import MetricsStatus

from testkit.waiting import until

LOOPBACK = ListenAddress(host="127.0.0.1", port=0)


class One:
    """A collector with one gauge, which may fail."""

    def __init__(self) -> None:
        self.value = 1.0
        self.help = "One value"
        self.error: Exception | None = None

    def collect(self) -> Iterable[Metric]:
        if self.error is not None:
            raise self.error
        return [GaugeMetricFamily("swansong_one", self.help, value=self.value)]


class Rig:
    """Expositions that end with the test."""

    def __init__(self) -> None:
        self.one = One()
        self.stop = threading.Event()

    def serve(self, address: ListenAddress = LOOPBACK) -> Exposition:
        served = Exposition(
            address, registry_of(self.one), key="metrics.listen", stop=self.stop, retry_s=0.05
        )
        served.start()
        return served

    def write(self, path: Path, *, interval_s: float = 0.02) -> Textfile:
        written = Textfile(
            path,
            registry_of(self.one),
            key="metrics.textfile",
            stop=self.stop,
            interval_s=interval_s,
        )
        written.start()
        return written


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.stop.set()


def connected(served: Exposition, data: bytes = b"") -> socket.socket:
    """A connection to the address, which has sent these bytes."""
    where = until(lambda: served.served_at, what="the metrics are served")
    if where.startswith("unix:"):
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(30)
        client.connect(where.removeprefix("unix:"))
    else:
        host, _, port = where.rpartition(":")
        client = socket.create_connection((host.strip("[]"), int(port)), timeout=30)
    client.sendall(data)
    return client


def scrape(served: Exposition, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one scrape."""
    connection = HTTPConnection("daemon", timeout=30)
    connection.sock = connected(served)
    connection.request("GET", "/metrics", headers=headers)
    answer = connection.getresponse()
    found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    connection.close()
    return found


@pytest.mark.parametrize("kind", ["ipv4", "ipv6", "unix"])
def test_a_scrape_gets_the_metrics(rig: Rig, kind: str, tmp_path: Path) -> None:
    """At each kind of address, in the text format by default."""
    address = {
        "ipv4": LOOPBACK,
        "ipv6": ListenAddress(host="::1", port=0),
        "unix": ListenAddress(path=tmp_path / "metrics.sock"),
    }[kind]
    status, headers, body = scrape(rig.serve(address))
    (family,) = parsed(body.decode())
    assert (status, family.name, family.samples[0].value) == (200, "swansong_one", 1.0)
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "Python" not in headers["server"]


def test_a_scraper_chooses_format_and_compression(rig: Rig) -> None:
    """As Prometheus asks: OpenMetrics, compressed."""
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    _, headers, body = scrape(rig.serve(), **{"Accept": accept, "Accept-Encoding": "gzip"})
    assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    (family,) = openmetrics(gzip.decompress(body).decode())
    assert family.name == "swansong_one"


def test_only_get_is_answered_with_metrics(rig: Rig) -> None:
    """Another method and a line that is not HTTP get an error, and the next scrape works."""
    served = rig.serve()
    for request in (b"POST /metrics HTTP/1.1\r\n\r\n", b"\x16\x03\x01\r\n\r\n"):
        with connected(served, request) as client:
            answer = client.recv(65536)
        assert b"swansong_one" not in answer
    assert scrape(served)[0] == 200


HOSTILE_WORDS = (
    *("application/openmetrics-text", "text/plain", "*/*", ";version=", ";escaping=allow-utf-8", ";q=0.5"),
    *(",", ";", "=", "1.0.0", "0.0.4", "2", "9" * 900, "x", "-1", "\r\n folded", "\xe9", "\0", " "),
)  # fmt: skip
HOSTILE_PATHS = (
    *("/metrics", "http://[", "//[", "/metrics?name[]=swansong_one", "/?name[]=x&name[]=", "/?" + "&" * 2000),
    *("/\xe9", "%", "*", "/?a=%ff%00", "http://\u2100@x/".encode().decode("latin-1")),
)  # fmt: skip


@pytest.mark.fault("OM01")
def test_every_request_gets_an_answer_and_none_is_a_fault(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any value of Accept, also several that contradict each other, any address, and each one twice."""
    faults: list[object] = []
    monkeypatch.setattr(exposition._Server, "fault", lambda _, error: faults.append(error))
    monkeypatch.setattr(exposition, "CONNECTIONS_PER_S", 1e6)
    monkeypatch.setattr(exposition, "CONNECTIONS_AT_ONCE", 1e6)
    served, chosen = rig.serve(), random.Random(27)
    for number in range(400):
        accepts = [
            "".join(chosen.choices(HOSTILE_WORDS, k=chosen.randrange(1, 6)))
            for _ in range(chosen.randrange(1, 4))
        ]
        path = "/metrics" if number % 2 else chosen.choice(HOSTILE_PATHS)
        head = "".join(f"Accept: {each}\r\n" for each in accepts)
        request = f"GET {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1")
        for _ in range(2):
            with connected(served, request) as client:
                answer = client.recv(65536)
            assert answer.startswith((b"HTTP/1.0 200", b"HTTP/1.0 4")), (request, answer)
            assert b"folded" not in answer.partition(b"\r\n\r\n")[0]
    assert faults == []
    assert scrape(served)[0] == 200


@pytest.mark.fault("OM01")
def test_slow_clients_hold_up_no_scrape(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more silent connections than the limit a scrape still succeeds, and the oldest one is closed."""
    monkeypatch.setattr(exposition, "CONNECTION_S_MAX", 1000.0)
    served = rig.serve()
    head, count = b"GET /metrics HTTP/1.1\r\nAccept: ", exposition.CONNECTIONS_MAX + 4
    silent = [connected(served, head) for _ in range(count)]
    assert scrape(served)[0] == 200
    assert silent[0].recv(1) == b""
    for each in silent:
        each.close()


@pytest.fixture
def server(rig: Rig) -> Iterator[exposition._Server]:
    made = exposition._Server(
        exposition.open_listener(LOOPBACK, key="metrics.listen"), registry_of(rig.one), rig.stop
    )
    made.socket.settimeout(0.02)
    thread = threading.Thread(target=made.serve_until_stop)
    thread.start()
    yield made
    rig.stop.set()
    thread.join(30)
    made.server_close()


def asked(server: exposition._Server) -> socket.socket:
    """A connection with a request."""
    client = socket.create_connection(server.socket.getsockname(), timeout=30)
    client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    return client


def outcome(client: socket.socket) -> bytes:
    """The first bytes of the reply; empty if the connection was closed without one."""
    with client, suppress(ConnectionResetError):
        return client.recv(4)
    return b""


@pytest.mark.fault("OM01")
def test_connections_are_refused_while_all_threads_wait_for_a_reply(
    server: exposition._Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that hangs costs no further thread for each scrape, and scrapes succeed after it."""
    monkeypatch.setattr(exposition, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(exposition, "CONNECTION_S_MAX", 1000.0)
    monkeypatch.setattr(exposition, "_ROOM_S", 0.01)
    with server.generating:
        waiting = [asked(server) for _ in range(3)]
        until(lambda: len(server._open) == 3, what="three threads")
        assert [outcome(asked(server)) for _ in range(2)] == [b"", b""]
        assert len(server._open) == 3
    assert [outcome(each) for each in waiting] == [b"", b"", b"HTTP"]
    assert outcome(asked(server)) == b"HTTP"
    until(lambda: not server._open and not server._ended, what="no connection is remembered")


@pytest.mark.fault("OM01")
def test_no_thread_waits_for_a_reply_without_end(
    server: exposition._Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is closed while the reply before it is still computed."""
    monkeypatch.setattr(exposition, "CONNECTION_S_MAX", 0.05)
    with server.generating:
        assert outcome(asked(server)) == b""
        until(lambda: not server._open, what="the end of the thread")


@pytest.mark.fault("OM01")
def test_a_client_that_reads_nothing_holds_up_no_scrape(rig: Rig) -> None:
    """Its reply is larger than all buffers, and another scrape succeeds meanwhile."""
    served = rig.serve()
    rig.one.help = "x" * 2**24
    with connected(served, b"GET /metrics HTTP/1.1\r\n\r\n") as deaf:
        assert deaf.recv(1) == b"H"
        assert scrape(served)[0] == 200


@pytest.mark.fault("OM01")
def test_a_connection_has_a_limited_life(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends one byte now and then is closed like one that sends nothing."""
    monkeypatch.setattr(exposition, "CONNECTION_S_MAX", 0.2)
    with connected(rig.serve(), b"GET / HT") as client:
        assert client.recv(1) == b""


@pytest.mark.fault("OM01")
def test_a_request_has_a_limited_size(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header without an end is not collected in memory: the connection is closed."""
    monkeypatch.setattr(exposition, "CONNECTION_S_MAX", 1000.0)
    served = rig.serve()
    head = b"X" * (exposition.HEAD_BYTES_MAX + 1)
    with connected(served, head) as client, suppress(ConnectionResetError):
        assert client.recv(1) == b""
    assert scrape(served)[0] == 200


@pytest.mark.fault("OM01")
def test_a_flood_of_connections_is_slowed_down(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of accepted connections is bounded, so scrapes take a bounded part of one core."""
    monkeypatch.setattr(exposition, "CONNECTIONS_AT_ONCE", 3.0)
    monkeypatch.setattr(exposition, "CONNECTIONS_PER_S", 2.0)
    served = rig.serve()
    clients = [connected(served) for _ in range(10)]
    for client in clients[:3]:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert client.recv(4) == b"HTTP"
    clients[9].sendall(b"GET / HTTP/1.0\r\n\r\n")
    clients[9].settimeout(0.3)
    with pytest.raises(TimeoutError):
        clients[9].recv(4)
    for client in clients:
        client.close()


@pytest.mark.fault("OM02")
def test_an_address_that_is_taken_is_tried_again(rig: Rig, tmp_path: Path) -> None:
    """The metrics start as soon as the other process has ended; until then the failure names it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = ListenAddress(host="127.0.0.1", port=other.getsockname()[1])
        served = rig.serve(address)
        until(lambda: served.failure, what="the failure")
        assert not served.served_at
        assert f"process {os.getpid()} (" in served.failure
        assert served.status() == MetricsStatus(address=str(address), failure=served.failure)
    assert scrape(served)[0] == 200
    assert served.status() == MetricsStatus(address=str(address))


def test_no_other_process_shares_the_port(rig: Rig) -> None:
    """Not at the same address, and not at an address that includes it."""
    served = rig.serve()
    port = int(until(lambda: served.served_at, what="the metrics").rpartition(":")[2])
    for family, host in (
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0"),
        (socket.AF_INET6, "::"),
    ):
        with socket.socket(family) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="Address already in use"):
                other.bind((host, port))


@pytest.mark.fault("OM02")
def test_a_fault_of_the_collector_is_an_error_of_one_scrape(rig: Rig) -> None:
    """The scraper gets HTTP 500, and the next scrape succeeds."""
    served = rig.serve()
    rig.one.error = ZeroDivisionError("a fault")
    assert scrape(served)[0] == 500
    rig.one.error = None
    assert scrape(served)[0] == 200


@pytest.mark.fault("OM02")
def test_a_server_that_fails_starts_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the loop of the server ends no more than the open connections."""
    failed = threading.Event()
    serve = exposition._Server.serve_until_stop

    def fail_once(server: exposition._Server) -> None:
        if failed.is_set():
            serve(server)
        failed.set()
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(exposition._Server, "serve_until_stop", fail_once)
    served = rig.serve()
    assert failed.wait(30)
    assert until(lambda: served.served_at, what="the next server")
    assert scrape(served)[0] == 200


def test_a_unix_socket_is_closed_to_others_and_removed(rig: Rig, tmp_path: Path) -> None:
    """A stale socket is replaced; the mode is 0660; the path is gone after the stop."""
    path = tmp_path / "metrics.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(os.fspath(path))
    served = rig.serve(ListenAddress(path=path))
    assert scrape(served)[0] == 200
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    rig.stop.set()
    served.close()
    assert not path.exists()


def test_the_textfile_is_whole_and_readable_and_removed_at_the_stop(
    rig: Rig, tmp_path: Path
) -> None:
    """Its mode is 0644 with any umask, a dead writer's rest is replaced, and a later value appears."""
    path = tmp_path / "swansong.prom"
    (tmp_path / ".swansong.prom.new").write_text("rest of a process that died")
    mask = os.umask(0o077)
    try:
        written = rig.write(path)
        until(path.exists, what="the textfile")
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        rig.one.value = 2.0
        until(lambda: "swansong_one 2.0\n" in path.read_text(), what="the next value")
    finally:
        os.umask(mask)
    rig.stop.set()
    assert written.removed(30)
    assert os.listdir(tmp_path) == []


@pytest.mark.fault("OM02")
def test_a_textfile_that_cannot_be_written_is_tried_again(rig: Rig, tmp_path: Path) -> None:
    """A directory that appears later gets the file."""
    path = tmp_path / "later" / "swansong.prom"
    written = rig.write(path)
    path.parent.mkdir()
    until(path.exists, what="the textfile")
    rig.stop.set()
    assert written.removed(30)


def test_a_textfile_of_another_daemon_stays(rig: Rig, tmp_path: Path) -> None:
    """A daemon that ends removes only the file that it wrote last."""
    path = tmp_path / "swansong.prom"
    ending = rig.write(path, interval_s=1000)
    until(path.exists, what="the textfile")
    rig.one.value = 2.0
    exposition.write_textfile(path, registry_of(rig.one))
    rig.stop.set()
    assert ending.removed(30)
    assert "swansong_one 2.0\n" in path.read_text()
