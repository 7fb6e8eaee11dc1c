# SPDX-License-Identifier: Apache-2.0
"""A warm store depends on no other service: credentials are from emulated metadata servers that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from botocore.credentials import RefreshableCredentials
from swansong_bucket.errors import Transient
from swansong_bucket.stores.credentials import CredentialCache
from swansong_bucket.stores.s3 import access
from swansong_bucket.stores.warm import Warmer

from testkit.emulators.process import REPOSITORY, EmulatorProcess
from testkit.source_run import control
from testkit.store_backends import BUCKET, Cloud
from testkit.waiting import until

ROLE = "/latest/meta-data/iam/security-credentials/swansong"
ACCESS_KEY = "ASIAEMULATED00000001"
TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"

# The SDKs read the environment when they are imported, so each store has its own process.
CLIENT = """
import sys
import threading
from pathlib import Path
import structlog
from swansong_bucket.config.sections import StoreConfig
from swansong_bucket.errors import StoreError
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.opening import open_store
from swansong_bucket.stores.wrappers.retry import Retrying
from swansong_bucket.util.threads import parallel

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
url, endpoint, ca_bundle = sys.argv[1:]
store = open_store(
    StoreConfig(url=url, endpoint=endpoint, region="us-east-1", ca_bundle=Path(ca_bundle))
)
# On a loaded machine a connection that is far slower than the others is cut.
tried = Retrying(store, give_up_mono_s=lambda: None, budget_s=30.0, stop=threading.Event())
content = b"x" * (2 * 2**20)
count = 12


def send():
    def create(number):
        tried.create(f"data/{number}", Body(content))

    parallel(range(count), create, threads=8)


def storm():
    parallel(range(8), lambda _: store.check(), threads=8)


for line in sys.stdin:
    try:
        {"warm": store.warm, "send": send, "storm": storm}[line.strip()]()
        print("done", flush=True)
    except StoreError as error:
        print(type(error).__name__, error, flush=True)
"""


class Rig:
    """A store in a process, with credentials from a metadata server that can be stopped."""

    def __init__(self, kind: str, metadata: EmulatorProcess, cloud: Cloud, **env: str) -> None:
        self.kind = kind
        self.metadata = metadata
        self._path = {"s3": ROLE, "gs": TOKEN}[kind]
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        inherited = {"PATH": os.environ["PATH"], "PYTHONPATH": path}
        where = f"{kind}://{BUCKET}/{uuid.uuid4().hex}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, where, cloud.server.url, str(cloud.ca)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, "NO_PROXY": "127.0.0.1", **env},
        )

    def __call__(self, order: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(order, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def live(self, life_s: float) -> None:
        """Set the lifetime of credentials that are fetched from now on."""
        if self.kind == "gs":
            control(self.metadata.url, "token", life_s=life_s)
            return
        body = {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "LastUpdated": "2026-01-01T00:00:00Z",
            "Expiration": f"{datetime.now(UTC) + timedelta(seconds=life_s):%Y-%m-%dT%H:%M:%SZ}",
            "AccessKeyId": ACCESS_KEY,
            "SecretAccessKey": "emulated",
            "Token": "emulated",
        }
        control(self.metadata.url, "clear")
        control(self.metadata.url, "fault", path=ROLE, kind="body", value=json.dumps(body))

    @property
    def fetched(self) -> int:
        """Number of requests for credentials."""
        counts = control(self.metadata.url, "requests")
        return sum(
            outcomes["total"]
            for request, outcomes in counts.items()
            if request.endswith(self._path.rpartition("/")[2])
        )

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


@pytest.fixture(params=["s3", "gs"])
def rig(
    request: pytest.FixtureRequest, open_cloud: Callable[[str], Cloud], tmp_path: Path
) -> Iterator[Rig]:
    """Both clouds over TLS, which tokens require, each with its own metadata server."""
    kind = request.param
    cloud = open_cloud({"s3": "s3-tls", "gs": "gcs-tls"}[kind])
    if kind == "s3":
        cloud.order(
            "credentials", access_key=ACCESS_KEY, secret_key="emulated", session_token="emulated"
        )
    module = {"s3": "testkit.emulators.aws_imds", "gs": "testkit.emulators.gcp_metadata"}[kind]
    with EmulatorProcess(module) as metadata:
        host = metadata.url.removeprefix("http://")
        env: dict[str, dict[str, str]] = {
            "s3": {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url + "/"},
            "gs": {"GCE_METADATA_HOST": host, "GCE_METADATA_IP": host},
        }
        made = Rig(kind, metadata, cloud, HOME=str(tmp_path), **env[kind])
        yield made
        made.close()


@pytest.mark.fault("N01")
@pytest.mark.parametrize("life_s", [3600, 120])
def test_flush_outlives_the_metadata_server(rig: Rig, life_s: float) -> None:
    """A warm store flushes many chunks without a metadata server until the credentials expire."""
    rig.live(life_s)
    assert rig("warm") == "done"
    control(rig.metadata.url, "dead", after_s=0)
    before = rig.fetched
    assert rig("send") == "done"
    assert rig.fetched == before


def test_no_storm(rig: Rig) -> None:
    """Eight threads of a cold store fetch the credentials about once, those of a warm store not at all."""
    rig.live(3600)
    assert rig("storm") == "done"
    assert 1 <= rig.fetched <= 2
    before = rig.fetched
    for _ in range(5):
        assert rig("warm") == "done"
    assert rig.fetched == before


@pytest.mark.parametrize("rig", ["gs"], indirect=True)
def test_renewed_before_it_is_needed(rig: Rig) -> None:
    """``warm`` replaces a token that expires soon, while it is still valid."""
    rig.live(120)
    assert rig("warm") == "done"
    rig.live(3600)
    before = rig.fetched
    assert rig("warm") == "done"
    assert rig.fetched > before
    before = rig.fetched
    assert rig("warm") == "done"
    assert rig.fetched == before


@pytest.mark.parametrize("rig", ["gs"], indirect=True)
def test_a_failed_warm_keeps_the_credentials(rig: Rig) -> None:
    """Without a metadata server ``warm`` raises an error of the contract; the old credentials still work."""
    rig.live(120)
    assert rig("warm") == "done"
    control(rig.metadata.url, "fault", path="*/token", kind="status", value=404)
    assert rig("warm").partition(" ")[0] in ("Transient", "Permanent")
    assert rig("send") == "done"


def test_credentials_are_used_until_they_expire() -> None:
    """``renew`` renews them in their last 15 minutes, as botocore does; ``get`` only after them."""
    calls: list[datetime] = []
    now = datetime.now(UTC)
    answers = iter([timedelta(minutes=8), None, timedelta(hours=1)])

    def fetch() -> dict[str, str]:
        calls.append(now)
        life = next(answers)
        if life is None:
            raise OSError("the metadata service does not respond")
        expiry = (now + life).isoformat()
        return {"access_key": "a", "secret_key": "b", "token": "c", "expiry_time": expiry}

    found = RefreshableCredentials(
        "a", "b", "c", now - timedelta(hours=1), fetch, "test", time_fetcher=lambda: now
    )
    cache = CredentialCache(
        "S3", load=lambda: found, fetch=access._aws_credentials, has_expired=access._has_expired
    )
    first = cache.get()
    assert len(calls) == 1, "expired credentials are replaced"
    assert cache.get() == first
    assert len(calls) == 1, "valid credentials are used"
    with pytest.raises(Transient, match="does not respond"):
        cache.renew()
    assert cache.get() == first
    cache.renew()
    cache.renew()
    assert len(calls) == 3, "credentials that last are not renewed"


# ---------------------------------------------------------------- the thread


def test_warmer_calls_at_the_start_and_on_request(cloud: Cloud) -> None:
    """The first call is at the start, the next one at a notice, long before the interval ends."""
    stop = threading.Event()
    warmer = Warmer(cloud.open(), stop=stop, interval_s=3600)
    warmer.start()
    until(lambda: len(cloud.requests()) == 1, what="the first time")
    warmer.now()
    until(lambda: len(cloud.requests()) == 2, what="the second time")
    stop.set()
    warmer.now()


def test_warmer_survives_an_outage(cloud: Cloud) -> None:
    """After failures it retries soon, and returns to its interval after a success."""
    stop = threading.Event()
    cloud.order("outage", seconds=3600)
    warmer = Warmer(cloud.open(), stop=stop, interval_s=3600, retry_s=0.1)
    warmer.start()
    until(lambda: len(cloud.requests()) >= 3, what="more than one time")
    cloud.order("clear")
    until(cloud.requests, what="the time that works")
    stop.set()
    warmer.now()
