# SPDX-License-Identifier: Apache-2.0
"""Every backend, ready to be held to the contract: the fixtures of the store tests."""

from __future__ import annotations

import json
import threading
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from emulators.fault_proxy import FaultProxy
from emulators.process import EmulatorProcess
from swansongd.stores.base import ObjectStore, PartReceipt, Upload
from swansongd.stores.files import FileStore
from swansongd.stores.gcs import GcsStore
from swansongd.stores.retry import Retrying
from swansongd.stores.s3 import S3Store

BUCKET = "checkpoints"
MIB = 2**20
PART = 5 * MIB


@dataclass(frozen=True)
class Cloud:
    """An emulated store and how to open it."""

    kind: str
    server: EmulatorProcess
    prefix: str
    """New for each test."""

    def open(
        self,
        endpoint: str | None = None,
        *,
        bucket: str = BUCKET,
        read_timeout_s: float = 8.0,
    ) -> ObjectStore:
        where = f"{bucket}/{self.prefix}"
        endpoint = endpoint or self.server.url
        if self.kind == "s3":
            return S3Store(f"s3://{where}", endpoint, read_timeout_s=read_timeout_s)
        return GcsStore(f"gs://{where}", endpoint, read_timeout_s=read_timeout_s)

    def order(self, name: str, **query: object) -> None:
        """Control the emulator, see emulators/store_control.py."""
        url = f"{self.server.url}/_control/{name}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST")):
            pass

    def requests(self) -> list[tuple[str, str]]:
        with urllib.request.urlopen(f"{self.server.url}/_control/requests") as answer:
            return [(method, target) for method, target in json.load(answer)]


@pytest.fixture(scope="session")
def cloud_environment() -> Iterator[None]:
    """Credentials for the emulators, and no look-ups of real ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield


@pytest.fixture(scope="session")
def s3_process(cloud_environment: None) -> Iterator[EmulatorProcess]:
    with EmulatorProcess("emulators.s3_server", "--bucket", BUCKET) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_process(cloud_environment: None) -> Iterator[EmulatorProcess]:
    with EmulatorProcess("emulators.gcs_server", "--bucket", BUCKET) as server:
        yield server


@pytest.fixture
def s3_server(s3_process: EmulatorProcess) -> EmulatorProcess:
    """In good health, whatever the test before ordered."""
    Cloud("s3", s3_process, "").order("clear")
    return s3_process


@pytest.fixture
def gcs_server(gcs_process: EmulatorProcess) -> EmulatorProcess:
    """In good health, whatever the test before ordered."""
    Cloud("gcs", gcs_process, "").order("clear")
    return gcs_process


@pytest.fixture
def open_cloud(request: pytest.FixtureRequest) -> Callable[[str], Cloud]:
    def opened(kind: str) -> Cloud:
        return Cloud(kind, request.getfixturevalue(f"{kind}_server"), uuid.uuid4().hex)

    return opened


@pytest.fixture(params=["s3", "gcs"])
def cloud(request: pytest.FixtureRequest, open_cloud: Callable[[str], Cloud]) -> Cloud:
    """Both emulated clouds, one after the other, in good health."""
    return open_cloud(request.param)


@pytest.fixture
def proxy(cloud: Cloud) -> Iterator[FaultProxy]:
    with FaultProxy(cloud.server.url) as proxy:
        yield proxy


def retrying(store: ObjectStore, **options: Any) -> Retrying:
    return Retrying(store, **{"give_up_mono_s": lambda: None, "stop": threading.Event(), **options})


@pytest.fixture(params=["file", "s3", "gcs"])
def bare_store(
    request: pytest.FixtureRequest, tmp_path: Path, open_cloud: Callable[[str], Cloud]
) -> ObjectStore:
    """Every backend as it is."""
    if request.param == "file":
        (tmp_path / "a store").mkdir()
        return FileStore((tmp_path / "a store").as_uri())
    return open_cloud(request.param).open()


@pytest.fixture(params=["bare", "retrying"])
def store(request: pytest.FixtureRequest, bare_store: ObjectStore) -> ObjectStore:
    """Every backend, as it is and with the wrapper around it: nobody must see a difference."""
    return bare_store if request.param == "bare" else retrying(bare_store)


def send_parts(store: ObjectStore, upload: Upload, content: bytes) -> list[PartReceipt]:
    step = upload.part_size_bytes
    pieces = [content[start : start + step] for start in range(0, len(content), step)]
    return [store.put_part(upload, n, memoryview(piece)) for n, piece in enumerate(pieces, 1)]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(0..count-1)`` at once; raises the first error of any."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            barrier.wait(timeout=20)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def staged_upload(store: ObjectStore, content: bytes) -> tuple[Upload, list[PartReceipt]]:
    """An upload of one part that wants only its completion."""
    upload = store.begin("shard", len(content), PART)
    return upload, [store.put_part(upload, 1, memoryview(content))]
