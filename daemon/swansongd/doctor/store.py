# SPDX-License-Identifier: Apache-2.0
"""Checks of the object store: credentials, every kind of request that a commit needs, clock, speed."""

from __future__ import annotations

import json
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import unquote, urlsplit

import requests

from swansongd.config import Config
from swansongd.doctor.clock import judge_skew, skew_s
from swansongd.doctor.findings import (
    Check,
    Judgement,
    failure,
    of_error,
    ok,
    skipped,
    warning,
)
from swansongd.errors import ConfigError, Exists, NotFound, Permanent, StoreError
from swansongd.keys import RunKeys
from swansongd.stores.base import ObjectStore, bucket_and_prefix
from swansongd.stores.configured import open_configured
from swansongd.stores.gcs import GcsStore
from swansongd.stores.s3 import S3Store
from swansongd.threads import parallel

FAMILY = "store"

_LIMIT_S = 10.0
_LIMIT_CREDENTIALS_S = 25.0
"""Loads the SDK, which takes seconds where the disk is cold."""
_DATE_TIMEOUT_S = 5.0
_SPEED_PART_BYTES = 32 * 2**20
_SPEED_LIMIT_S = 120.0
_FIRST, _SECOND = b"swansong doctor", b"swansong doctor, again"


def checks(config: Config, edit: str, *, grace_s: float, speed: bool) -> Iterator[Check]:
    """All of them, in the order in which they need one another.

    Args:
        edit: the command that opens the configuration.
        grace_s: what a notice of this cloud leaves.
        speed: measure the bandwidth, too.
    """
    try:
        where = open_configured(config.store, connections=config.flush.connections)
    except ConfigError as error:
        unusable = of_error(error, edit)
        yield Check(family=FAMILY, name="bucket", ask=lambda: unusable)
        return
    probe = _Probe(where, config, edit)
    if isinstance(where, (S3Store, GcsStore)):
        yield probe.check("credentials", probe.credentials, limit_s=_LIMIT_CREDENTIALS_S)
        yield probe.check("bucket", probe.reach, needs="credentials")
    else:
        yield probe.check("bucket", probe.reach)
    yield probe.check("write", probe.write, needs="bucket")
    yield probe.check("create-if-absent", probe.create_again, needs="write")
    yield probe.check("read back", probe.read_back, needs="write")
    yield probe.check("delete", probe.delete, needs="write")
    yield probe.check("multipart upload", probe.multipart, needs="bucket")
    if isinstance(where, (S3Store, GcsStore)):
        yield probe.check("lifecycle rule", probe.lifecycle, needs="bucket")
    if isinstance(where, (S3Store, GcsStore)):
        yield probe.check("clock (store)", probe.clock, needs="bucket")
    if speed:
        usable_s = max(0.0, grace_s - config.deadline.reserve_s)
        yield probe.check(
            "speed", lambda: probe.speed(usable_s), needs="multipart upload", limit_s=_SPEED_LIMIT_S
        )


class _Probe:
    """One small object below ``<run>/probes/``, through its life."""

    def __init__(self, store: ObjectStore, config: Config, edit: str) -> None:
        self._store = store
        self._config = config
        self._edit = edit
        self._key = RunKeys(config.run.name).probe(f"doctor-{secrets.token_hex(8)}")
        self._holds = _FIRST

    def check(
        self,
        name: str,
        ask: Callable[[], Judgement],
        *,
        needs: str = "",
        limit_s: float = _LIMIT_S,
    ) -> Check:
        def look() -> Judgement:
            try:
                return ask()
            except StoreError as error:
                return of_error(error, mending(self._config, error))

        return Check(
            family=FAMILY,
            name=name,
            ask=look,
            needs=needs,
            limit_s=limit_s,
            mend=f"curl -sSI {shlex.quote(_address(self._config) or 'localhost')}",
        )

    def credentials(self) -> Judgement:
        assert isinstance(self._store, (S3Store, GcsStore))
        try:
            self._store.renew_credentials()
        except StoreError as error:
            return of_error(error, _mend_credentials(self._config))
        return ok("there are some")

    def reach(self) -> Judgement:
        self._store.check()
        return ok(f"{self._store.url} answers, and may be listed")

    def write(self) -> Judgement:
        self._store.put(self._key, _FIRST, if_absent=True)
        return ok(f"{self._key} written, {len(_FIRST)} bytes")

    def create_again(self) -> Judgement:
        try:
            self._store.put(self._key, _SECOND, if_absent=True)
        except Exists:
            return ok("a second create of the same name was refused, as it must be")
        self._holds = _SECOND
        return failure(
            f"{self._store.url} ignores create-if-absent: a second create of {self._key} went "
            "through, so two VMs could overwrite each other's commits. Set store.url to a store "
            "that honours If-None-Match",
            self._edit,
        )

    def read_back(self) -> Judgement:
        got = self._store.get(self._key)
        if got != self._holds:
            return failure(
                f"{self._key} came back with other bytes ({len(got)} instead of {len(self._holds)})",
                self._edit,
            )
        return ok(f"the same {len(got)} bytes came back")

    def delete(self) -> Judgement:
        try:
            self._store.delete(self._key)
        except Permanent:
            return ok(f"no right to delete, which is fine: {self._key} stays behind")
        return ok(f"{self._key} deleted")

    def multipart(self) -> Judgement:
        part_bytes = max(self._store.part_size_bytes_min, self._config.flush.part_size_bytes)
        upload = self._store.begin(self._key + "-multipart", part_bytes, part_bytes)
        self._store.abort(upload.key, upload.upload_id)
        return ok("begun and aborted")

    def lifecycle(self) -> Judgement:
        assert isinstance(self._store, (S3Store, GcsStore))
        try:
            aborts = self._store.aborts_incomplete_uploads()
        except StoreError as error:
            return skipped(f"may not be read, or not now: {error}")
        if aborts:
            return ok("incomplete multipart uploads are aborted by a rule of the bucket")
        bucket, prefix = bucket_and_prefix(self._store.url)
        problem = (
            "no rule of the bucket aborts incomplete multipart uploads: those of VMs that lost their "
            "power cost money for ever (the command replaces the rules that there are)"
        )
        if isinstance(self._store, GcsStore):
            action = {"type": "AbortIncompleteMultipartUpload"}
            rules = json.dumps({"rule": [{"action": action, "condition": {"age": 3}}]})
            return warning(
                problem,
                f"echo {shlex.quote(rules)} | gcloud storage buckets update gs://{bucket} "
                "--lifecycle-file=/dev/stdin",
            )
        rule = json.dumps(
            {
                "Rules": [
                    {
                        "ID": "swansong",
                        "Status": "Enabled",
                        "Filter": {"Prefix": prefix},
                        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3},
                    }
                ]
            }
        )
        return warning(
            problem,
            f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket} "
            f"--lifecycle-configuration {shlex.quote(rule)}",
        )

    def clock(self) -> Judgement:
        # Any answer will do, a refusal as well; it needs no credential and gets none.
        asked_wall_s = time.time()
        try:
            answer = requests.head(
                _address(self._config), timeout=_DATE_TIMEOUT_S, allow_redirects=False
            )
        except requests.RequestException as error:
            return skipped(f"its Date cannot be asked for ({type(error).__name__})")
        date = answer.headers.get("Date", "")
        return judge_skew(skew_s(date, asked_wall_s, time.time()), "the store")

    def speed(self, usable_s: float) -> Judgement:
        connections = self._config.flush.connections
        size_bytes = connections * _SPEED_PART_BYTES
        upload = self._store.begin(self._key + "-speed", size_bytes, _SPEED_PART_BYTES)
        # A slow store ends it at half the limit: what was sent by then is measured just as well.
        begun_mono_s = time.monotonic()
        sent: list[int] = []
        lock = threading.Lock()

        def send(number: int) -> None:
            if time.monotonic() - begun_mono_s < _SPEED_LIMIT_S / 2:
                self._store.put_part(upload, number, _Zeros(_SPEED_PART_BYTES))
                with lock:
                    sent.append(_SPEED_PART_BYTES)

        try:
            parallel(range(1, connections + 1), send, threads=connections)
            took_s = time.monotonic() - begun_mono_s
        finally:
            self._store.abort(upload.key, upload.upload_id)
        return judge_speed(sum(sent), took_s, usable_s)


class _Zeros:
    """A part of nothing but zeros."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def rewind(self) -> None:
        pass

    def read_into(self, window: memoryview) -> None:
        window[:] = bytes(window.nbytes)


def judge_speed(sent_bytes: int, took_s: float, usable_s: float) -> Judgement:
    """The planner's view: how much fits into the grace period at this bandwidth.

    Args:
        usable_s: grace period less reserve.
    """
    bandwidth = sent_bytes / max(took_s, 1e-9)
    return ok(
        f"{sent_bytes / 1e6:.0f} MB in {took_s:.2f} s, {bandwidth / 1e6:.0f} MB/s: "
        f"{bandwidth * usable_s / 1e9:.3g} GB fit into the {usable_s:g} s that a notice leaves"
    )


def mending(config: Config, error: StoreError) -> str:
    """The command for what the store refused, by the kind of the error."""
    scheme, _, rest = config.store.url.partition("://")
    if scheme == "file":
        path = shlex.quote(unquote(urlsplit(config.store.url).path))
        return f"install -d -m 0700 -o swansong {path}"
    bucket = rest.partition("/")[0]
    if isinstance(error, NotFound):
        return (
            f"aws s3 mb s3://{bucket}"
            if scheme == "s3"
            else (f"gcloud storage buckets create gs://{bucket}")
        )
    if error.retryable:
        return f"curl -sSI {shlex.quote(_address(config))}"
    if scheme == "s3":
        return (
            "aws iam put-role-policy --role-name ROLE --policy-name swansong "
            "--policy-document file://aws-vm.json  # the policy is in packer/permissions"
        )
    return (
        f"gcloud storage buckets add-iam-policy-binding gs://{bucket} "
        "--member=serviceAccount:EMAIL --role=projects/PROJECT/roles/swansongVm"
        "  # the role is packer/permissions/gcp-vm.yaml"
    )


def _mend_credentials(config: Config) -> str:
    if config.store.url.startswith("s3://"):
        return (
            "aws ec2 associate-iam-instance-profile --instance-id ID "
            "--iam-instance-profile Name=PROFILE"
        )
    return (
        "gcloud compute instances set-service-account VM --service-account=EMAIL "
        "--scopes=cloud-platform"
    )


def _address(config: Config) -> str:
    """Where the store answers; empty for a directory."""
    if config.store.endpoint:
        return config.store.endpoint
    if config.store.url.startswith("s3://"):
        region = config.store.region
        return f"https://s3.{region}.amazonaws.com" if region else "https://s3.amazonaws.com"
    return "https://storage.googleapis.com" if config.store.url.startswith("gs://") else ""
