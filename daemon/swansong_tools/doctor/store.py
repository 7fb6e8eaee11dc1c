# SPDX-License-Identifier: Apache-2.0
"""Checks of the object store: credentials, rehearsal of a checkpoint and its restore, clock, speed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from swansong_bucket.errors import ConfigError, Permanent, StoreError
from swansong_bucket.retention import locks
from swansong_bucket.runs import signing
from swansong_bucket.runs.signing import SigningKey, signed
from swansong_bucket.stores.azure.store import AzureStore
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.file import mounts
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.stores.gcs.store import GcsStore
from swansong_bucket.stores.http.client import Wire
from swansong_bucket.stores.opening import open_store
from swansong_bucket.stores.s3.store import S3Store
from swansong_bucket.util.threads import parallel
from swansongd.config.config import Config
from swansongd.config.notify import is_encrypted_or_local
from swansongd.flush.claim_record import expect_recorded_store
from swansongd.staging.scan import OWN_DIRECTORY

from swansong_tools.doctor import disks, fixes, staging, store_fixes
from swansong_tools.doctor.accounts import Account
from swansong_tools.doctor.bucket import BucketChecks
from swansong_tools.doctor.clock import judge_skew, skew_s
from swansong_tools.doctor.configuration import set_key
from swansong_tools.doctor.findings import (
    Check,
    Judgement,
    Level,
    failure,
    of_error,
    ok,
    skipped,
    warning,
)
from swansong_tools.doctor.rehearsal import FLUSH_S, SET_BYTES, Rehearsal, RetryingBriefly

FAMILY = "store"

_LIMIT_S = 10.0
_LIMIT_CREDENTIALS_S = 25.0
"""Includes the import of the SDK, which takes seconds from a cold disk."""
_LIMIT_STEP_S = 30.0
"""Time limit of a step with a few requests, each retried."""
_LIMIT_DATA_S = FLUSH_S + 15
_DATE_TIMEOUT_S = 5.0
_SPEED_OBJECTS = 2
"""Objects of each connection."""
_SPEED_LIMIT_S = 120.0
_AZURE_SETTINGS = (
    "Azure reports versions, soft delete and lifecycle rules to its management interface only; "
    "docs/operations/stores.md has the commands that show them"
)


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
    """The checks of the store, in order of their dependencies.  They must run as the daemon.

    Args:
        path: configuration file.
        daemon: the user of the daemon, and of this process.
        grace_s: grace period of a notice of this cloud.
        speed: also measure the bandwidth.
        trial: report a store that is lost with the VM as a warning.
        operator_file: credentials in an operator's home, which the daemon does not read.
    """
    key_file = config.store.signing_key_file
    if key_file is not None:
        yield Check(
            family=FAMILY, name="signing key", judge=lambda: judge_signing_key(key_file, daemon)
        )
    edit = fixes.edit(path)
    try:
        where = open_store(
            config.store, connections=config.flush.connections, lock=locks.of(config.store)
        )
    except ConfigError as error:
        unusable = of_error(error, edit)
        yield Check(family=FAMILY, name="bucket", judge=lambda: unusable)
        return
    own = config.staging.path / config.run.name / OWN_DIRECTORY
    expect_recorded_store(where, own, config.run.name)
    probe = _Probe(where, config, path, _signing_key(config), operator_file)
    if isinstance(where, (S3Store, GcsStore, AzureStore)):
        yield probe.check(
            "credentials", probe.credentials, needs="network", limit_s=_LIMIT_CREDENTIALS_S
        )
        yield probe.check("clock (store)", probe.clock, needs="network")
        yield probe.check("bucket", probe.reach, needs="credentials")
    else:
        yield probe.check("store disk", lambda: probe.disk(trial=trial))
        yield probe.check("bucket", probe.reach)
        yield probe.check("store space", probe.space, needs="bucket", limit_s=_LIMIT_STEP_S)
    try:
        yield from probe.rehearsal_checks()
    finally:
        probe.rehearsal.close()
    if isinstance(where, (S3Store, GcsStore)):
        settings = BucketChecks(config, probe.store, where.settings)
        for name, judge in settings.checks().items():
            yield probe.check(name, judge, needs="bucket")
    if isinstance(where, AzureStore):
        unreadable = skipped(f"unknown: {_AZURE_SETTINGS}")
        yield probe.check("container settings", lambda: unreadable, needs="bucket")
    if speed:
        usable_s = max(0.0, grace_s - config.deadline.reserve_s)
        yield probe.check(
            "speed", lambda: probe.speed(usable_s), needs="upload", limit_s=_SPEED_LIMIT_S
        )


class _Probe:
    """The code of the checks, with the store and the rehearsal that they share."""

    def __init__(
        self,
        store: ObjectStore,
        config: Config,
        path: Path,
        key: SigningKey | None,
        operator_file: Path | None,
    ) -> None:
        self._backend = store
        self.store = RetryingBriefly(signed(store, key))
        self._config = config
        self._path = path
        self._edit = fixes.edit(path)
        self._operator_file = operator_file
        self.rehearsal = Rehearsal(self.store, config.run.name)
        self._honours_if_absent = False
        self._clock_fix = ""
        """Set if clock skew explains why the store refuses requests."""

    def check(
        self,
        name: str,
        judge: Callable[[], Judgement],
        *,
        needs: str = "",
        limit_s: float = _LIMIT_S,
    ) -> Check:
        def judge_or_explain() -> Judgement:
            try:
                return judge()
            except StoreError as error:
                fix = store_fixes.of_refusal(self._config, self._path, error, self._operator_file)
                return of_error(error, self._clock_fix or fix)

        return Check(
            family=FAMILY,
            name=name,
            judge=judge_or_explain,
            needs=needs,
            limit_s=limit_s,
            fix=store_fixes.request_by_hand(self._config),
        )

    def credentials(self) -> Judgement:
        assert isinstance(self._backend, (S3Store, GcsStore, AzureStore))
        try:
            self._backend.renew_credentials()
        except StoreError as error:
            return of_error(error, store_fixes.of_credentials(self._config, self._operator_file))
        return ok("found; the next check shows whether the store accepts them")

    def disk(self, *, trial: bool) -> Judgement:
        root = store_fixes.directory_of(self._config)
        reason, where = disks.dies_with_vm(root, mounts.mounted())
        return judge_disk(root, reason, where, trial=trial, path=self._path)

    def space(self) -> Judgement:
        root = store_fixes.directory_of(self._config)
        newest = staging.newest(self._config.staging.path / self._config.run.name)
        return staging.judge_space(root, staging.free(root), newest)

    def reach(self) -> Judgement:
        if (
            isinstance(self._backend, FileStore)
            and not (root := store_fixes.directory_of(self._config)).is_dir()
        ):
            _check_access(root)
            return failure(
                f"the directory {root} of store.url does not exist: not created, or not mounted",
                store_fixes.mount(root)
                or fixes.then(fixes.directory(root, "0700"), fixes.restart()),
            )
        self.store.check()
        return judge_transport(self.store.url, store_fixes.address(self._config), self._edit)

    # ------------------------------------------------------------ the rehearsal

    def rehearsal_checks(self) -> Iterator[Check]:
        def step(name: str, judge: Callable[[], Judgement], needs: str, limit_s: float) -> Check:
            return self.check(name, judge, needs=needs, limit_s=limit_s)

        yield step("write", self._claim, "bucket", _LIMIT_STEP_S)
        yield step("create-if-absent", self._create_again, "write", _LIMIT_STEP_S)
        yield step("upload", self._send, "write", _LIMIT_DATA_S)
        yield step("commit", self._commit, "upload", _LIMIT_STEP_S)
        yield step("read back", self._restore, "commit", _LIMIT_DATA_S)
        yield step("delete", self._delete, "bucket", _LIMIT_STEP_S)

    def _claim(self) -> Judgement:
        """A generation is claimed."""
        self._honours_if_absent = self.rehearsal.claim()
        return ok(f"claimed a generation of the rehearsal {self.rehearsal.keys.run}")

    def _create_again(self) -> Judgement:
        """The second create of the claim is refused."""
        if self._honours_if_absent:
            return ok("the store refused the second create of one key, as it must")
        return failure(
            f"{self.store.url} ignores create-if-absent: a second create of one key succeeded, so two "
            "VMs could overwrite each other's commits. Set store.url to a store that honours If-None-Match",
            self._edit,
        )

    def _send(self) -> Judgement:
        """A set of two files, of 4 KiB and 2 MiB, is flushed."""
        self.rehearsal.send()
        return ok(f"uploaded a set of {SET_BYTES} bytes")

    def _commit(self) -> Judgement:
        """The manifest is created, listed and read back."""
        self.rehearsal.commit()
        return ok("created, listed and read back a manifest")

    def _restore(self) -> Judgement:
        """The commit is found as a reader finds it, restored to a directory, and compared byte by byte."""
        size_bytes = self.rehearsal.restore()
        return ok(f"restored the commit: {size_bytes} bytes, identical to those sent")

    def _delete(self) -> Judgement:
        """Everything is deleted."""
        run = self.rehearsal.keys.run
        done = self.rehearsal.clean_up()
        if not done.objects:
            return skipped("nothing was stored")
        if not done.left:
            return ok(f"deleted {done.objects} objects below {run}")
        return ok(
            f"no right to delete, as recommended: {done.left} objects with {done.left_bytes} bytes stay "
            f"below {run}"
        )

    # ------------------------------------------------------------ the bucket

    def clock(self) -> Judgement:
        # Any answer has a Date, also a refusal; so the request carries no credentials.
        wire = Wire(
            store_fixes.address(self._config),
            connections=1,
            ca_bundle=store_fixes.trusted(self._config),
            first_byte_s=_DATE_TIMEOUT_S,
        )
        asked_wall_s = time.time()
        try:
            answer = wire.request("HEAD", "/", {})
        except StoreError as error:
            return skipped(f"reading the Date header failed: {error}")
        finally:
            wire.close()
        date = answer.headers.get("date", "")
        judged = judge_skew(skew_s(date, asked_wall_s, time.time()), "the store")
        if judged.level is Level.FAILURE:
            self._clock_fix = judged.fix
        return judged

    def speed(self, usable_s: float) -> Judgement:
        connections = self._config.flush.connections
        # At half the time limit no further object starts; the ones sent until then are enough to measure.
        begun_mono_s = time.monotonic()
        zeros = memoryview(bytes(self._config.flush.chunk_bytes))
        sent: list[int] = []
        lock = threading.Lock()

        def send(number: int) -> None:
            if time.monotonic() - begun_mono_s < _SPEED_LIMIT_S / 2:
                key = f"{self.rehearsal.keys.run}/speed-{number}"
                self.store.create(key, zeros)
                with lock:
                    sent.append(zeros.nbytes)

        try:
            parallel(range(_SPEED_OBJECTS * connections), send, threads=connections)
            took_s = time.monotonic() - begun_mono_s
        finally:
            left_bytes = self.rehearsal.clean_up().left_bytes
        return judge_speed(sum(sent), took_s, usable_s, left_bytes)


def judge_speed(sent_bytes: int, took_s: float, usable_s: float, left_bytes: int = 0) -> Judgement:
    """The amount of data that fits into the grace period at this bandwidth.

    Args:
        usable_s: grace period minus reserve.
        left_bytes: size of the objects that the role may not delete.
    """
    bandwidth = sent_bytes / max(took_s, 1e-9)
    stay = f"; without the right to delete, {left_bytes / 1e6:.0f} MB stay" if left_bytes else ""
    return ok(
        f"{sent_bytes / 1e6:.0f} MB in {took_s:.2f} s, {bandwidth / 1e6:.0f} MB/s: "
        f"{bandwidth * usable_s / 1e9:.3g} GB fit into the {usable_s:g} s of a notice{stay}"
    )


def judge_disk(root: Path, reason: str, where: str, *, trial: bool, path: Path) -> Judgement:
    """Whether the directory of a ``file://`` store outlives the VM.

    Args:
        reason: why the directory is lost with the VM; empty if it is not.
        where: file system with its device or server.
        trial: report a store that is lost with the VM as a warning.
        path: configuration file.
    """
    if not reason:
        return ok(f"{root} is {where}")
    found = f"{root} is lost with the VM: {reason} ({where})"
    fix = set_key(path, "url", "s3://BUCKET/PREFIX")
    if trial:
        return warning(f"{found}; accepted for a trial", fix)
    return failure(
        f"{found}. Use a bucket, a file server or a disk that outlives the VM. To accept this store for a "
        "trial: swansong doctor --trial",
        fix,
    )


def judge_transport(url: str, server: str, fix: str) -> Judgement:
    """Whether a host on the path to the store, which can be listed, could read or change the bytes.

    Args:
        server: address of its server; empty for a directory.
    """
    if not server or is_encrypted_or_local(server):
        return ok(f"{url} can be listed")
    return warning(
        f"{url} can be listed, but {server} has no TLS: a host on the path can read checkpoints and forge "
        "answers. Set store.endpoint to an https:// address",
        fix,
    )


def _signing_key(config: Config) -> SigningKey | None:
    """The daemon's key; None without a key or with an invalid one, which another check reports."""
    try:
        return signing.load(config.store.signing_key_file)
    except ConfigError:
        return None


def judge_signing_key(path: Path, account: Account) -> Judgement:
    """Whether the daemon accepts the signing key; it does not start otherwise."""
    key = fixes.quoted(path)
    own = fixes.as_root(f"chown {account.name}: {key}")
    fix = fixes.then(own, fixes.as_root(f"chmod 0400 {key}"), fixes.restart())
    try:
        signing.load(path)
    except ConfigError as error:
        return failure(str(error), fix)
    if not account.may("r", path):
        return failure(f"{account.name} may not read {path}", fix)
    return ok(f"{path} is private; the daemon signs manifests and claims with it")


def _check_access(root: Path) -> None:
    """Raise Permanent if a directory above ``root`` is not accessible, so that ``root`` seems missing."""
    for place in reversed(root.parents):
        if place.is_dir() and not os.access(place, os.X_OK, effective_ids=True):
            raise Permanent(
                f"reading {root} failed: {place} is not accessible for the daemon's user",
                hint=f"Open the directory with `chmod a+x {fixes.quoted(place)}`",
            )
