# SPDX-License-Identifier: Apache-2.0
"""The object store and its mirror: credentials, rehearsal of a checkpoint and its restore, clock, speed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from swansong_bucket.errors import ConfigError, Permanent, StoreError, SwansongError
from swansong_bucket.retention import locks
from swansong_bucket.runs import signing
from swansong_bucket.runs.signing import SigningKey, signed
from swansong_bucket.stores.azure.store import AzureStore
from swansong_bucket.stores.base import Body, ObjectStore
from swansong_bucket.stores.file import mounts
from swansong_bucket.stores.gcs.store import GcsStore
from swansong_bucket.stores.http.client import Wire
from swansong_bucket.stores.opening import open_mirror, open_store
from swansong_bucket.stores.s3.store import S3Store
from swansong_bucket.util.threads import parallel
from swansongd.config.config import Config
from swansongd.config.notify import is_encrypted_or_local
from swansongd.flush.claim_record import expect_recorded_store
from swansongd.staging.scan import OWN_DIRECTORY

from swansong_tools.doctor import disks, fixes, staging, store_fixes
from swansong_tools.doctor.bucket import BucketChecks
from swansong_tools.doctor.cloud import judge_skew, skew_s
from swansong_tools.doctor.findings import (
    Judgement,
    Level,
    Probe,
    failure,
    of_error,
    ok,
    skipped,
    warning,
)
from swansong_tools.doctor.installation import Installation, grace_s
from swansong_tools.doctor.rehearsal import SET_BYTES, Rehearsal, RetryingBriefly
from swansong_tools.units import counted

SPEED_LIMIT_S = 120.0
_DATE_TIMEOUT_S = 5.0
_SPEED_OBJECTS = 2
"""Objects of each connection."""
_AZURE_SETTINGS = (
    "Azure reports versions, soft delete and lifecycle rules to its management interface only; "
    "docs/operations/stores.md has the commands that show them"
)


def is_remote(vm: Installation) -> bool:
    """Whether the store is a bucket or a container, and could be opened."""
    return isinstance(vm.shared(StoreProbe).backend, (S3Store, GcsStore, AzureStore))


def has_settings(vm: Installation) -> bool:
    """Whether the store reports its settings to this role."""
    return isinstance(vm.shared(StoreProbe).backend, (S3Store, GcsStore))


def is_directory(vm: Installation) -> bool:
    return vm.config.store.url.startswith("file://")


def by_hand(vm: Installation) -> str:
    """The fix for an error that names no command: a request without Swansong."""
    return store_fixes.request_by_hand(vm.config)


def probed(judge: Callable[[StoreProbe], Judgement]) -> Probe:
    """A check of the store, with the fix for a refusal of the store."""

    def probe(vm: Installation) -> Judgement:
        return vm.shared(StoreProbe).explained(judge)

    return probe


def of_bucket(judge: Callable[[BucketChecks], Judgement], what: str) -> Probe:
    """A check of a setting of the bucket; "unknown" if it cannot be read."""

    def judge_or_unknown(store: StoreProbe) -> Judgement:
        assert isinstance(store.backend, (S3Store, GcsStore))
        settings = BucketChecks(store.config, store.store, store.backend.settings)
        try:
            return judge(settings)
        except StoreError as error:
            return skipped(f"unknown: reading the {what} of the bucket failed: {error}")

    return probed(judge_or_unknown)


class StoreProbe:
    """The checks of the store, with the store and the rehearsal that they share."""

    def __init__(self, vm: Installation) -> None:
        self.config = vm.config
        self.backend: ObjectStore | None = None
        """None if the configuration names no usable store."""
        self._vm = vm
        self._edit = fixes.edit(vm.path)
        self._honours_if_absent = False
        self._clock_fix = ""
        """Set if clock skew explains why the store refuses requests."""
        config = vm.config
        try:
            opened = open_store(
                config.store, connections=config.flush.connections, lock=locks.of(config.store)
            )
            expect_recorded_store(opened, vm.run / OWN_DIRECTORY, config.run.name)
        except (SwansongError, OSError) as error:
            self._problem = error
            return
        self.backend = opened
        self.store = RetryingBriefly(signed(self.backend, _signing_key(config)))
        self.rehearsal = Rehearsal(self.store, config.run.name)

    def explained(self, judge: Callable[[StoreProbe], Judgement]) -> Judgement:
        """The judgement, or the refusal of the store with its fix."""
        if self.backend is None:
            return of_error(self._problem, self._edit)
        try:
            return judge(self)
        except StoreError as error:
            file = self._vm.options.operator_file
            fix = store_fixes.of_refusal(self.config, self._vm.path, error, file)
            return of_error(error, self._clock_fix or fix)

    def close(self) -> None:
        """Remove the temporary files on this VM."""
        if self.backend is not None:
            self.rehearsal.close()

    def credentials(self) -> Judgement:
        assert isinstance(self.backend, (S3Store, GcsStore, AzureStore))
        try:
            self.backend.renew_credentials()
        except StoreError as error:
            return of_error(
                error, store_fixes.of_credentials(self.config, self._vm.options.operator_file)
            )
        return ok("found; the next check shows whether the store accepts them")

    def disk(self) -> Judgement:
        root = store_fixes.directory_of(self.config)
        reason, where = disks.dies_with_vm(root, mounts.mounted())
        return judge_disk(root, reason, where, trial=self._vm.options.trial, path=self._vm.path)

    def space(self) -> Judgement:
        root = store_fixes.directory_of(self.config)
        return staging.judge_space(root, staging.free(root), staging.newest(self._vm.run))

    def reach(self) -> Judgement:
        root = store_fixes.directory_of(self.config)
        if is_directory(self._vm) and not root.is_dir():
            _check_access(root)
            return failure(
                f"the directory {root} of store.url does not exist: not created, or not mounted",
                store_fixes.mount(root)
                or fixes.then(fixes.directory(root, "0700"), fixes.restart()),
            )
        self.store.check()
        return judge_transport(self.store.url, store_fixes.address(self.config), self._edit)

    # ------------------------------------------------------------ the rehearsal

    def write(self) -> Judgement:
        self._honours_if_absent = self.rehearsal.claim()
        return ok(f"claimed a generation of the rehearsal {self.rehearsal.keys.run}")

    def create_again(self) -> Judgement:
        if self._honours_if_absent:
            return ok("the store refused the second create of one key, as it must")
        return failure(
            f"{self.store.url} ignores create-if-absent: a second create of one key succeeded, so two "
            "VMs could overwrite each other's commits. Set store.url to a store that honours If-None-Match",
            self._edit,
        )

    def upload(self) -> Judgement:
        self.rehearsal.send()
        return ok(f"uploaded a set of {SET_BYTES} bytes")

    def commit(self) -> Judgement:
        self.rehearsal.commit()
        return ok("created, listed and read back a manifest")

    def read_back(self) -> Judgement:
        size_bytes = self.rehearsal.restore()
        return ok(f"restored the commit: {size_bytes} bytes, identical to those sent")

    def delete(self) -> Judgement:
        run = self.rehearsal.keys.run
        done = self.rehearsal.clean_up()
        if not done.objects:
            return skipped("nothing was stored")
        if not done.left:
            return ok(f"deleted {counted(done.objects, 'object')} below {run}")
        left = f"{counted(done.left, 'object')} of {done.left_bytes} bytes"
        return ok(f"no right to delete, as recommended: {left} stay below {run}")

    # ------------------------------------------------------------ the bucket

    def clock(self) -> Judgement:
        # Any answer has a Date, also a refusal; so the request carries no credentials.
        wire = Wire(
            store_fixes.address(self.config),
            connections=1,
            ca_bundle=store_fixes.trusted(self.config),
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

    def speed(self) -> Judgement:
        connections = self.config.flush.connections
        grace = grace_s(self.config, self._vm.cloud)
        usable_s = max(0.0, grace - self.config.deadline.reserve_s)
        # At half the time limit no further object starts; the ones sent until then are enough to measure.
        begun_mono_s = time.monotonic()
        zeros = memoryview(bytes(self.config.flush.chunk_bytes))
        sent: list[int] = []
        lock = threading.Lock()

        def send(number: int) -> None:
            if time.monotonic() - begun_mono_s < SPEED_LIMIT_S / 2:
                key = f"{self.rehearsal.keys.run}/speed-{number}"
                self.store.create(key, Body(zeros))
                with lock:
                    sent.append(zeros.nbytes)

        try:
            parallel(range(_SPEED_OBJECTS * connections), send, threads=connections)
            took_s = time.monotonic() - begun_mono_s
        finally:
            left_bytes = self.rehearsal.clean_up().left_bytes
        return judge_speed(sum(sent), took_s, usable_s, left_bytes)


def azure_settings(_: Installation) -> Judgement:
    return skipped(f"unknown: {_AZURE_SETTINGS}")


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
    fix = fixes.set_key(path, "url", "s3://BUCKET/PREFIX")
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


def signing_key(vm: Installation) -> Judgement:
    """Whether the daemon accepts the signing key; it does not start otherwise."""
    path, account = vm.config.store.signing_key_file, vm.user
    assert path is not None
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


# ---------------------------------------------------------------- the mirror


def mirror(vm: Installation) -> Judgement:
    """Claim a generation of a rehearsal in the mirror, and delete it.

    No checkpoint depends on the mirror, so its failures are warnings.
    """
    config, edit = vm.config, fixes.edit(vm.path)
    try:
        opened = open_mirror(config.mirror, connections=1)
        assert opened is not None
        return _rehearsed(opened, config.run.name, edit)
    except (ConfigError, StoreError) as error:
        found = of_error(error, edit)
        return warning(f"commits have one copy only: {found.found}", found.fix)


def _rehearsed(mirror: ObjectStore, run: str, edit: str) -> Judgement:
    store = RetryingBriefly(mirror)
    rehearsal = Rehearsal(store, run)
    try:
        store.check()
        honours_if_absent = rehearsal.claim()
        rehearsal.clean_up()
    finally:
        rehearsal.close()
    if honours_if_absent:
        return ok(f"{store.url} can be listed and written, and honours create-if-absent")
    return warning(
        f"{store.url} ignores create-if-absent: after a promotion two VMs could overwrite each other's"
        " commits. Set mirror.url to a store that honours If-None-Match",
        edit,
    )
