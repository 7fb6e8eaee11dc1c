# SPDX-License-Identifier: Apache-2.0
"""Checks of the object store: credentials, every kind of request that a commit needs, clock, speed."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import requests

from swansongd import signing
from swansongd.clerk import expect_recorded_store
from swansongd.config import Config
from swansongd.doctor import disks, fixes
from swansongd.doctor.accounts import DAEMON_USER, Account, account
from swansongd.doctor.clock import judge_skew, skew_s
from swansongd.doctor.configuration import set_key
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
from swansongd.staging.scan import OWN_DIRECTORY
from swansongd.stores import mounts
from swansongd.stores.base import ObjectStore, bucket_and_prefix
from swansongd.stores.configured import open_configured
from swansongd.stores.files import FileStore
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
_AWS_FILES = (
    ("AWS_SHARED_CREDENTIALS_FILE", "/etc/swansong/aws/credentials"),
    ("AWS_CONFIG_FILE", "/etc/swansong/aws/config"),
)
_GCP_FILES = (
    (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "/etc/swansong/gcloud/application_default_credentials.json",
    ),
)
"""Variable of the unit and the file that it names; the first takes the operator's own."""
_FIRST, _SECOND = b"swansong doctor", b"swansong doctor, again"


def checks(
    config: Config,
    path: Path,
    daemon: Account,
    *,
    grace_s: float,
    speed: bool,
    trial: bool,
    operator_file: Path | None = None,
) -> Iterator[Check]:
    """All of them, in the order in which they need one another.  They must run as the daemon.

    Args:
        path: of the configuration.
        daemon: the user that the daemon runs as, and this process.
        grace_s: what a notice of this cloud leaves.
        speed: measure the bandwidth, too.
        trial: a store that dies with the VM is no failure.
        operator_file: credentials in a home, which the daemon does not read.
    """
    key_file = config.store.signing_key_file
    if key_file is not None:
        yield Check(
            family=FAMILY, name="signing key", ask=lambda: judge_signing_key(key_file, daemon)
        )
    edit = fixes.edit(path)
    try:
        where = open_configured(config.store, connections=config.flush.connections)
    except ConfigError as error:
        unusable = of_error(error, edit)
        yield Check(family=FAMILY, name="bucket", ask=lambda: unusable)
        return
    own = config.staging.path / config.run.name / OWN_DIRECTORY
    expect_recorded_store(where, own, config.run.name)
    probe = _Probe(where, config, path, operator_file)
    if isinstance(where, (S3Store, GcsStore)):
        yield probe.check(
            "credentials", probe.credentials, needs="network", limit_s=_LIMIT_CREDENTIALS_S
        )
        yield probe.check("bucket", probe.reach, needs="credentials")
    else:
        yield probe.check("store disk", lambda: probe.disk(trial=trial))
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

    def __init__(
        self, store: ObjectStore, config: Config, path: Path, operator_file: Path | None
    ) -> None:
        self._store = store
        self._config = config
        self._path = path
        self._edit = fixes.edit(path)
        self._operator_file = operator_file
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
            mend=_ask_by_hand(self._config),
        )

    def credentials(self) -> Judgement:
        assert isinstance(self._store, (S3Store, GcsStore))
        try:
            self._store.renew_credentials()
        except StoreError as error:
            return of_error(error, mend_credentials(self._config, self._operator_file))
        return ok("there are some")

    def disk(self, *, trial: bool) -> Judgement:
        root = directory_of(self._config)
        reason, where = disks.dies_with_vm(root, disks.mounts(disks.MOUNTS.read_text()))
        return judge_disk(root, reason, where, trial=trial, path=self._path)

    def reach(self) -> Judgement:
        if isinstance(self._store, FileStore) and not directory_of(self._config).is_dir():
            root = directory_of(self._config)
            _expect_way(root)
            return failure(
                f"the directory {root} of store.url does not exist: not made, or not mounted",
                _mount(root) or fixes.then(fixes.directory(root, "0700"), fixes.restart()),
            )
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
                address(self._config), timeout=_DATE_TIMEOUT_S, allow_redirects=False
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


def judge_disk(root: Path, reason: str, where: str, *, trial: bool, path: Path) -> Judgement:
    """Whether a store of files outlives the VM.

    Args:
        reason: why it does not, empty if it does.
        where: its file system, with its device or server.
        trial: it need not.
        path: of the configuration.
    """
    if not reason:
        return ok(f"{root} is {where}")
    found = f"{root} dies with the VM: {reason} ({where})"
    mend = set_key(path, "url", "s3://BUCKET/PREFIX")
    if trial:
        return warning(f"{found}; accepted for a trial", mend)
    return failure(
        f"{found}. Name a bucket, a file server or a disk that outlives the VM; to try Swansong out "
        "all the same: swansong doctor --trial",
        mend,
    )


def judge_signing_key(path: Path, account: Account) -> Judgement:
    """Whether the daemon will accept the key: it does not start otherwise."""
    key = fixes.quoted(path)
    own = fixes.as_root(f"chown {account.name}: {key}")
    mend = fixes.then(own, fixes.as_root(f"chmod 0400 {key}"), fixes.restart())
    try:
        signing.load(path, owners={0, account.uid})
    except ConfigError as error:
        return failure(str(error), mend)
    if not account.may("r", path):
        return failure(f"{account.name} may not read {path}", mend)
    return ok(f"{path} is private, and manifests and claims are signed with it")


def directory_of(config: Config) -> Path:
    """The directory of a ``file://`` store."""
    return Path(os.path.normpath(unquote(urlsplit(config.store.url).path)))


def _expect_way(root: Path) -> None:
    """Raises Permanent where a directory above cannot be entered, so that nothing below it is seen."""
    for place in reversed(root.parents):
        if place.is_dir() and not os.access(place, os.X_OK, effective_ids=True):
            raise Permanent(
                f"{place} cannot be entered by the daemon's user",
                hint=f"Open it with `chmod a+x {fixes.quoted(place)}`",
            )


def mending(config: Config, error: StoreError) -> str:
    """The command for what the store refused, by the kind of the error."""
    scheme, _, rest = config.store.url.partition("://")
    if scheme == "file":
        return _mend_directory(directory_of(config), error)
    bucket = rest.partition("/")[0]
    if isinstance(error, NotFound):
        return (
            f"aws s3 mb s3://{bucket}"
            if scheme == "s3"
            else (f"gcloud storage buckets create gs://{bucket}")
        )
    if error.retryable:
        return _ask_by_hand(config)
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


def _mend_directory(root: Path, error: StoreError) -> str:
    if mount := _mount(root):
        return mount
    number = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
    if number == errno.EROFS:
        point = disks.mount_of(root, disks.mounts(disks.MOUNTS.read_text())).point
        if point in ("/", str(root)):  # not of the file system, but of the sandbox
            return fixes.drop_in("store", f"ReadWritePaths={root}")
        return fixes.as_root(f"mount -o remount,rw {fixes.quoted(point)}")
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"df -h {fixes.quoted(root)}"
    if account(DAEMON_USER) is None:
        return fixes.directory(root, "0700")
    owner = fixes.as_root(f"chown -R {DAEMON_USER}: {fixes.quoted(root)}")
    return fixes.then(owner, fixes.as_root(f"chmod u+rwx {fixes.quoted(root)}"), fixes.restart())


def _mount(root: Path) -> str:
    """The command that mounts the file system of the store; empty where no mount target is bare."""
    missing = mounts.missing_mount(str(root))
    return fixes.as_root(f"mount {fixes.quoted(missing)}") if missing else ""


def _ask_by_hand(config: Config) -> str:
    """Asks the store without Swansong, with the only tool that is certainly there."""
    where = address(config) or "http://localhost"
    program = f"import urllib.request as u; print(u.urlopen({where!r}, timeout=9).headers)"
    return f"{fixes.quoted(sys.executable)} -c {shlex.quote(program)}"


def mend_credentials(config: Config, operator_file: Path | None) -> str:
    """Hands the daemon credentials: files that it cannot read, those of the operator, or an identity.

    Args:
        operator_file: credentials in a home, which the daemon does not read.
    """
    is_s3 = config.store.url.startswith("s3://")
    files = _AWS_FILES if is_s3 else _GCP_FILES
    for variable, default in files:
        path = Path(os.environ.get(variable) or default)
        if _is_there(path) and not os.access(path, os.R_OK, effective_ids=True):
            own = fixes.as_root(f"chown {DAEMON_USER}: {fixes.quoted(path)}")
            enter = fixes.as_root(f"chmod a+x {fixes.quoted(path.parent)}")
            read = fixes.as_root(f"chmod 0400 {fixes.quoted(path)}")
            return fixes.then(own, read, enter, fixes.restart())
    if operator_file is not None:
        _, target = files[0]
        put = f"install -m 0400 -o {DAEMON_USER} {fixes.quoted(operator_file)} {target}"
        above = fixes.as_root(f"install -d {Path(target).parent}")
        return fixes.then(above, fixes.as_root(put), fixes.restart())
    if is_s3:
        return (
            "aws ec2 associate-iam-instance-profile --instance-id ID "
            "--iam-instance-profile Name=PROFILE"
        )
    return (
        "gcloud compute instances set-service-account VM --service-account=EMAIL "
        "--scopes=cloud-platform"
    )


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except PermissionError:  # in a directory that cannot be entered: it may well be
        return True
    except OSError:
        return False
    return True


def address(config: Config) -> str:
    """Where the store answers; empty for a directory."""
    if config.store.endpoint:
        return config.store.endpoint
    if config.store.url.startswith("s3://"):
        region = config.store.region
        return f"https://s3.{region}.amazonaws.com" if region else "https://s3.amazonaws.com"
    return "https://storage.googleapis.com" if config.store.url.startswith("gs://") else ""
