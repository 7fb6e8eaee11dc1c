# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the store tests: every backend with every server of its protocol.

``LACKS`` lists the features that a foreign server does not have; a test of such a feature is skipped with
"does not apply".  docs/operations/stores.md has the same list for users.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.stores.azure.store import AzureStore
from swansong_bucket.stores.base import Body, ObjectStore
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.stores.gcs.store import GcsStore
from swansong_bucket.stores.opening import open_store
from swansong_bucket.stores.remote import WireLimits
from swansong_bucket.stores.retention import Lock
from swansong_bucket.stores.s3.store import S3Store
from swansong_bucket.stores.wrappers.retry import Retrying

from testkit.bodies import CountedSink
from testkit.emulators import tls
from testkit.emulators.process import EmulatorProcess
from testkit.foreign_servers import AZURE_ACCOUNT, AZURE_KEY, BUCKET, SERVE, ForeignServer
from testkit.memory_store import MemoryStore

MIB = 2**20

OURS = ("s3", "s3-tls", "gcs", "gcs-tls")
"""The strict emulators: they inject faults on order, and have every feature."""
ONE_EACH = ("s3-tls", "gcs")
"""One of them for each backend, and one of them with TLS."""
IN_CI = (*OURS, "rclone", "seaweedfs")
"""Servers that start within seconds, from packages of requirements/dev.in."""
SERVERS = (*IN_CI, *os.environ.get("SWANSONG_STORES", "").split())
"""``make test-stores`` adds servers of :data:`testkit.foreign_servers.SERVE`."""
LACKS = {
    "rclone": {
        "create if absent": "rclone ignores If-None-Match",
        "flat keys": "rclone stores keys as files and directories",
        "spent names": "rclone ignores If-None-Match",
        "conditional delete": "rclone ignores If-Match",
        "conditional deletes of many": "rclone ignores the ETags in a multi-object delete",
        "deletes beside puts": "rclone returns 500 where a put meets a directory that a delete has emptied",
    },
    "ceph": {
        "conditional delete": "Ceph 16 ignores If-Match in a delete",
        "conditional deletes of many": "Ceph 16 ignores the ETags in a multi-object delete",
        "spent names": "Ceph returns no checksum of an object, so the object is sent again",
    },
}  # fmt: skip


PATIENT = WireLimits(read_timeout_s=60.0)
"""Unless a test is about these limits: on a loaded machine a server may not answer for seconds."""


def lacks(server: str) -> dict[str, str]:
    """Missing features of the server, each with its reason."""
    return LACKS.get(server.removesuffix("-tls"), {})


def store_at(
    url: str,
    endpoint: str | None = None,
    *,
    limits: WireLimits | None = None,
    lock: Lock | None = None,
    **keys: Any,
) -> Any:
    """The store of a URL, with further ``keys`` of the configuration."""
    config = StoreAccess(url=url, endpoint=endpoint, **keys)
    if limits is None:
        return open_store(config, lock=lock)
    if url.startswith("az:"):
        return AzureStore(config, limits)
    return (GcsStore if url.startswith("gs:") else S3Store)(config, limits, lock=lock)


@dataclass(frozen=True)
class Cloud:
    """A server, and the way to open a store on it."""

    name: str
    server: EmulatorProcess | ForeignServer
    prefix: str
    """Another one for each test."""
    ca: Path | None = None

    @property
    def is_s3(self) -> bool:
        return "gcs" not in self.name and not self.is_azure

    @property
    def is_azure(self) -> bool:
        return self.name.startswith("azurite")

    def open(self, endpoint: str | None = None, *, bucket: str = BUCKET, **keys: Any) -> Any:
        scheme = "s3" if self.is_s3 else "az" if self.is_azure else "gs"
        account = f"{AZURE_ACCOUNT}/" if self.is_azure else ""
        url = f"{scheme}://{account}{bucket}/{self.prefix}"
        keys = {"region": "us-east-1", "ca_bundle": self.ca, "limits": PATIENT, **keys}
        return store_at(url, endpoint or self.server.url, **keys)

    @property
    def _control(self) -> str:
        assert isinstance(self.server, EmulatorProcess)
        return f"{self.server.ready.get('control', self.server.url)}/_control"

    def order(self, order: str, **query: object) -> None:
        """Send a control command to the emulator, see emulators/store_control.py."""
        url = f"{self._control}/{order}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60):
            pass

    def requests(self) -> list[tuple[str, str]]:
        with urllib.request.urlopen(f"{self._control}/requests", timeout=60) as answer:
            return [(method, target) for method, target in json.load(answer)]


# ---------------------------------------------------------------- servers


@pytest.fixture(scope="session")
def cloud_environment() -> Iterator[None]:
    """Credentials for the emulators; no SDK looks for other credentials."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        patch.setenv("AZURE_STORAGE_KEY", AZURE_KEY)
        # With a custom endpoint, requests are then anonymous.
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nonexistent")
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate of the authority, and key with certificate of a server on loopback."""
    return tls.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def store_servers(
    cloud_environment: None,
    certificates: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], EmulatorProcess | ForeignServer]]:
    """Start each server for the first test that needs it; later tests share it."""
    running: dict[str, EmulatorProcess | ForeignServer] = {}
    ends: list[Callable[[], object]] = []

    def server(name: str) -> EmulatorProcess | ForeignServer:
        if name not in running:
            process: EmulatorProcess | ForeignServer
            foreign = SERVE.get(name.removesuffix("-tls"))
            if foreign is not None:
                pem = certificates[1] if name.endswith("-tls") else None
                process = foreign(tmp_path_factory.mktemp(name), pem)
            else:
                module = {"s3": "s3_strict", "gcs": "gcs_server"}
                extra = ["--tls", str(certificates[1])] if name.endswith("-tls") else []
                process = EmulatorProcess(
                    f"testkit.emulators.{module[name.partition('-')[0]]}",
                    "--bucket",
                    BUCKET,
                    *extra,
                )
            running[name] = process
            ends.append(process.kill)
        return running[name]

    yield server
    for end in ends:
        end()


@pytest.fixture
def open_cloud(
    store_servers: Callable[[str], EmulatorProcess | ForeignServer], certificates: tuple[Path, Path]
) -> Callable[[str], Cloud]:
    def opened(name: str) -> Cloud:
        ca = certificates[0] if name.endswith("-tls") else None
        cloud = Cloud(name, store_servers(name), uuid.uuid4().hex, ca)
        if isinstance(cloud.server, EmulatorProcess):
            cloud.order("clear")
        return cloud

    return opened


@pytest.fixture(params=ONE_EACH)
def cloud(request: pytest.FixtureRequest, open_cloud: Callable[[str], Cloud]) -> Cloud:
    """A strict emulator without faults."""
    return open_cloud(request.param)


# ---------------------------------------------------------------- stores

_CREATING_ONLY = ("s3", "gcs-tls")
"""Servers that differ from another one in the way of the bytes: they run only the tests of create()."""


def is_wanted(item: pytest.Item) -> bool:
    """Whether this combination of test and server is tested."""
    chosen = getattr(item, "callspec", None)
    parameters: dict[str, object] = chosen.params if chosen is not None else {}
    is_creating = item.path.name == "test_store_create.py"
    return is_creating or parameters.get("server_name") not in _CREATING_ONLY


@pytest.fixture(params=["file", "memory", *SERVERS])
def server_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def requires(server_name: str) -> Callable[[str], None]:
    """Skip the test if the server lacks a feature."""

    def check(what: str) -> None:
        if what in lacks(server_name):
            pytest.skip(f"does not apply: {lacks(server_name)[what]}")

    return check


@pytest.fixture
def store(server_name: str, tmp_path: Path, open_cloud: Callable[[str], Cloud]) -> ObjectStore:
    """Every backend with every server."""
    if server_name == "file":
        (tmp_path / "a store").mkdir()
        return FileStore((tmp_path / "a store").as_uri())
    if server_name == "memory":
        return MemoryStore()
    made: ObjectStore = open_cloud(server_name).open()
    return made


def retrying(store: ObjectStore, **options: Any) -> Retrying:
    return Retrying(store, **{"give_up_mono_s": lambda: None, "stop": threading.Event(), **options})


# ---------------------------------------------------------------- what tests do with them


def get_range(store: ObjectStore, key: str, offset: int, size_bytes: int) -> bytes:
    sink = CountedSink()
    store.get_range(key, offset, size_bytes, sink)
    return sink.data


def every_call(store: ObjectStore, key: str = "key") -> dict[str, Callable[[], object]]:
    """The methods that raise an error of the store, by name; ``delete_many`` returns its errors."""
    return {
        "check": store.check,
        "warm": store.warm,
        "put": lambda: store.put(key, b"1"),
        "put if absent": lambda: store.put(key, b"1", if_absent=True),
        "create": lambda: store.create(key, Body(b"abc")),
        "get": lambda: store.get(key),
        "get_range": lambda: get_range(store, key, 0, 3),
        "head": lambda: store.head(key),
        "list": lambda: list(store.list("")),
        "folders": lambda: store.folders("", None),
        "delete": lambda: store.delete(key),
    }
