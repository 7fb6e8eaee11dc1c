# SPDX-License-Identifier: Apache-2.0
"""The object store and its mirror: credentials, rehearsal of a checkpoint, settings, clock, speed."""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Unpack

from swansong_bucket.config.values import directory_of
from swansong_bucket.errors import ConfigError, NotFound, Permanent, StoreError, SwansongError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.retention import locks
from swansong_bucket.runs import signing
from swansong_bucket.runs.signing import SigningKey, signed
from swansong_bucket.stores.azure.store import AzureStore
from swansong_bucket.stores.base import Body, ObjectStore
from swansong_bucket.stores.file import mount_points
from swansong_bucket.stores.gcs.settings import GcsSettings
from swansong_bucket.stores.gcs.store import GcsStore
from swansong_bucket.stores.http.client import Wire
from swansong_bucket.stores.opening import open_mirror, open_store
from swansong_bucket.stores.s3.settings import S3Settings
from swansong_bucket.stores.s3.store import S3Store
from swansong_bucket.util.threads import parallel
from swansongd.config.config import Config
from swansongd.config.notify import is_encrypted_or_local
from swansongd.flush.claim_record import expect_recorded_store
from swansongd.staging.scan import OWN_DIRECTORY

from swansong_tools.doctor import bucket_policy, fixes, staging, store_fixes
from swansong_tools.doctor.cloud import judge_skew, skew_s
from swansong_tools.doctor.findings import (
    CheckFields,
    Checklist,
    Judgement,
    Level,
    failure,
    of_error,
    ok,
    skipped,
    warning,
)
from swansong_tools.doctor.installation import Installation, grace_s
from swansong_tools.doctor.rehearsal import SET_BYTES, Rehearsal, retried_briefly
from swansong_tools.units import counted
from swansong_tools.upkeep import lifecycle_rules

_SPEED_LIMIT_S = 120.0
_DATA_LIMIT_S = 60.0
"""2 MiB over a link of 500 kbit/s, and more."""
_DATE_TIMEOUT_S = 5.0
_SPEED_OBJECTS = 2
"""Objects of each connection."""
_DELETE = "storage.objects.delete"


def is_remote(vm: Installation) -> bool:
    """Whether the store is a bucket or a container, and could be opened."""
    return isinstance(vm.shared(StoreProbe).backend, (S3Store, GcsStore, AzureStore))


def is_directory(vm: Installation) -> bool:
    return directory_of(vm.config.store.url) is not None


CHECKS = Checklist(family="store", fix=lambda vm: store_fixes.request_by_hand(vm.config))
"""An error that names no command is fixed by a request without Swansong."""
SETTINGS = Checklist(family="store", needs=("bucket",), applies=is_remote)
StoreJudge = Callable[["StoreProbe"], Judgement]


def _check(
    name: str, checks: Checklist = CHECKS, *, setting: str = "", **fields: Unpack[CheckFields]
) -> Callable[[StoreJudge], StoreJudge]:
    """Declare a check of the opened store, with the fix for a refusal of the store.

    Args:
        setting: the setting of the bucket that the check reads; it is unknown if the store refuses.
    """

    def declare(judge: StoreJudge) -> StoreJudge:
        @checks.add(name, **fields)
        @wraps(judge)
        def probe(vm: Installation) -> Judgement:
            return vm.shared(StoreProbe).explained(judge, setting)

        return judge

    return declare


@CHECKS.add("signing key", applies=lambda vm: vm.config.store.signing_key_file)
def signing_key(vm: Installation) -> Judgement:
    """The daemon can read the key and accepts it.

    It does not start otherwise.
    """
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


class StoreProbe:
    """The checks of the store, with the store and the rehearsal that they share."""

    def __init__(self, vm: Installation) -> None:
        self.config = vm.config
        self.backend: ObjectStore | None = None
        """None if the configuration names no usable store."""
        self._vm = vm
        self._edit = fixes.edit(vm.path)
        self._root = directory_of(vm.config.store.url) or Path()
        """The directory of a ``file://`` store."""
        self._keys = RunKeys(vm.config.run.name)
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
        self.store = retried_briefly(signed(self.backend, _signing_key(config)))
        self.rehearsal = Rehearsal(self.store, config.run.name)

    def explained(self, judge: StoreJudge, setting: str) -> Judgement:
        """The judgement, or the refusal of the store with its fix."""
        if self.backend is None:
            return of_error(self._problem, self._edit)
        if setting and isinstance(self.backend, AzureStore):
            return skipped(
                f"unknown: Azure reports the {setting} to its management interface only; "
                "docs/operations/stores.md has the command that shows them"
            )
        try:
            return judge(self)
        except StoreError as error:
            if setting:
                return skipped(f"unknown: reading the {setting} of the bucket failed: {error}")
            file = self._vm.options.operator_file
            fix = store_fixes.of_refusal(self.config, self._vm.path, error, file)
            return of_error(error, self._clock_fix or fix)

    @_check("credentials", needs=("network",), applies=is_remote)
    def credentials(self) -> Judgement:
        """Credentials for the store exist."""
        assert isinstance(self.backend, (S3Store, GcsStore, AzureStore))
        try:
            self.backend.renew_credentials()
        except StoreError as error:
            return of_error(
                error, store_fixes.of_credentials(self.config, self._vm.options.operator_file)
            )
        return ok("found; the next check shows whether the store accepts them")

    @_check("clock (store)", needs=("network",), applies=is_remote)
    def clock(self) -> Judgement:
        """This VM's clock against the store."""
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

    @_check("store disk", applies=is_directory)
    def disk(self) -> Judgement:
        """The directory of the store outlives the VM."""
        root = self._root
        reason, where = staging.dies_with_vm(root, mount_points.mounted())
        if not reason:
            return ok(f"{root} is {where}")
        found = f"{root} is lost with the VM: {reason} ({where})"
        fix = fixes.set_key(self._vm.path, 'url = "s3://BUCKET/PREFIX"')
        if self._vm.options.trial:
            return warning(f"{found}; accepted for a trial", fix)
        return failure(
            f"{found}. Use a bucket, a file server or a disk that outlives the VM. To accept this store for "
            "a trial: swansong doctor --trial",
            fix,
        )

    @_check("bucket", needs=("credentials",))
    def reach(self) -> Judgement:
        """The store can be listed, over TLS."""
        root = self._root
        if is_directory(self._vm) and not root.is_dir():
            _check_access(root)
            return failure(
                f"the directory {root} of store.url does not exist: not created, or not mounted",
                store_fixes.mount(root)
                or fixes.then(fixes.directory(root, "0700"), fixes.restart()),
            )
        self.store.check()
        return judge_transport(self.store.url, store_fixes.address(self.config), self._edit)

    @_check("store space", needs=("bucket",), applies=is_directory)
    def space(self) -> Judgement:
        """The store has room for two checkpoints."""
        free = staging.free(self._root)
        return staging.judge_space(self._root, free, staging.newest(self._vm.run))

    # ------------------------------------------------------------ the rehearsal

    @_check("write", needs=("bucket",))
    def write(self) -> Judgement:
        """A generation is claimed."""
        self._honours_if_absent = self.rehearsal.claim()
        return ok(f"claimed a generation of the rehearsal {self.rehearsal.keys.run}")

    @_check("create-if-absent", needs=("write",))
    def create_again(self) -> Judgement:
        """The second create of the claim is refused."""
        if self._honours_if_absent:
            return ok("the store refused the second create of one key, as it must")
        return failure(
            f"{self.store.url} ignores create-if-absent: a second create of one key succeeded, so two "
            "VMs could overwrite each other's commits. Set store.url to a store that honours If-None-Match",
            self._edit,
        )

    @_check("upload", needs=("write",), limit_s=_DATA_LIMIT_S)
    def upload(self) -> Judgement:
        """A set of two files, of 4 KiB and 2 MiB, is uploaded."""
        self.rehearsal.send()
        return ok(f"uploaded a set of {SET_BYTES} bytes")

    @_check("commit", needs=("upload",))
    def commit(self) -> Judgement:
        """The manifest is created, listed and read back."""
        self.rehearsal.commit()
        return ok("created, listed and read back a manifest")

    @_check("read back", needs=("commit",), limit_s=_DATA_LIMIT_S)
    def read_back(self) -> Judgement:
        """The commit is found as a reader finds it, restored, and compared byte by byte."""
        size_bytes = self.rehearsal.restore()
        return ok(f"restored the commit: {size_bytes} bytes, identical to those sent")

    @_check("delete", needs=("bucket",))
    def delete(self) -> Judgement:
        """Everything is deleted."""
        run = self.rehearsal.keys.run
        done = self.rehearsal.clean_up()
        if not done.objects:
            return skipped("nothing was stored")
        if not done.left:
            return ok(f"deleted {counted(done.objects, 'object')} below {run}")
        left = f"{counted(done.left, 'object')} of {done.left_bytes} bytes"
        return ok(f"no right to delete, as recommended: {left} stay below {run}")

    @_check("speed", needs=("upload",), applies=lambda vm: vm.options.speed, limit_s=_SPEED_LIMIT_S)
    def speed(self) -> Judgement:
        """With ``--speed``: the bandwidth, and the bytes that fit into a notice."""
        connections = self.config.flush.connections
        grace = grace_s(self.config, self._vm.cloud)
        usable_s = max(0.0, grace - self.config.deadline.reserve_s)
        # At half the time limit no further object starts; the ones sent until then are enough to measure.
        begun_mono_s = time.monotonic()
        zeros = memoryview(bytes(self.config.flush.chunk_bytes))
        sent: list[int] = []
        lock = threading.Lock()

        def send(number: int) -> None:
            if time.monotonic() - begun_mono_s < _SPEED_LIMIT_S / 2:
                key = f"{self.rehearsal.keys.run}/speed-{number}"
                self.store.create(key, Body(zeros))
                with lock:
                    sent.append(zeros.nbytes)

        try:
            parallel(range(_SPEED_OBJECTS * connections), send, threads=connections)
            took_s = time.monotonic() - begun_mono_s
        finally:
            left_bytes = self.rehearsal.clean_up().left_bytes
        bandwidth = sum(sent) / max(took_s, 1e-9)
        stay = (
            f"; without the right to delete, {left_bytes / 1e6:.0f} MB stay" if left_bytes else ""
        )
        return ok(
            f"{sum(sent) / 1e6:.0f} MB in {took_s:.2f} s, {bandwidth / 1e6:.0f} MB/s: "
            f"{bandwidth * usable_s / 1e9:.3g} GB fit into the {usable_s:g} s of a notice{stay}"
        )

    # ------------------------------------------------------------ settings of the bucket

    @property
    def _settings(self) -> S3Settings | GcsSettings:
        assert isinstance(self.backend, (S3Store, GcsStore))
        return self.backend.settings

    @_check("lifecycle rule", SETTINGS, setting="lifecycle rules")
    def lifecycle(self) -> Judgement:
        """No rule deletes checkpoints by age or moves them offline."""
        rules = self._settings.lifecycle_rules()
        if harm := lifecycle_rules.harmful(rules, self._keys, self._settings.prefix):
            fix = "# remove the rule; swansong lifecycle prints rules that fit this run"
            return failure("; ".join(harm), fix)
        return ok("no lifecycle rule deletes checkpoints by age or moves them offline")

    @_check("versioning", SETTINGS, setting="versioning")
    def versioning(self) -> Judgement:
        """A deleted or overwritten object can be brought back."""
        if self._settings.is_versioned():
            return ok("a deleted or overwritten object can be brought back")
        return warning(
            "the bucket keeps no older versions: a deleted or overwritten object is lost",
            store_fixes.of_versioning(self.config),
        )

    @_check("object lock", SETTINGS, setting="object lock")
    def lock(self) -> Judgement:
        """``store.lock_days`` works.

        The right to lock is tried with a key that does not exist.
        """
        days = self.config.store.lock_days
        if not days:
            return ok("store.lock_days is 0: the store locks no checkpoint")
        if not self._settings.has_lock():
            return failure(
                f"store.lock_days is {days}, and the bucket has no object lock: every write would fail",
                store_fixes.of_lock(self.config),
            )
        absent = f"{self._keys.data}absent"
        try:
            self.store.lock(absent)
        except NotFound:
            return ok(f"the store locks checkpoints for {days} days")
        except StoreError as error:
            return of_error(error, "")
        return failure(f"{absent} exists", f"# delete {absent}")

    @_check("bucket policy", SETTINGS, setting="bucket policy")
    def policy(self) -> Judgement:
        """The bucket enforces create-if-absent."""
        settings, keys = self._settings, self._keys
        if isinstance(settings, GcsSettings):
            return _judge_overwriting(settings)
        found, bucket, prefix = settings.policy(), settings.bucket, settings.prefix
        if bucket_policy.enforces_create_if_absent(found, bucket, keys, prefix):
            return ok("the bucket policy enforces create-if-absent for manifests and claims")
        policy = json.dumps(bucket_policy.added(found, bucket, keys, prefix))
        command = store_fixes.aws(self.config, f"aws s3api put-bucket-policy --bucket {bucket}")
        return warning(
            "no bucket policy enforces create-if-absent: an intruder with the role of a VM could overwrite "
            "manifests and claims (the command keeps the existing statements)",
            f"{command} --policy {shlex.quote(policy)}",
        )


def _judge_overwriting(settings: GcsSettings) -> Judgement:
    """On GCS an overwrite takes the right to delete."""
    if _DELETE not in settings.rights([_DELETE]):
        return ok("this role cannot overwrite or delete objects")
    return warning(
        f"this role has {_DELETE}: an intruder on a VM could overwrite and delete checkpoints",
        f"gcloud storage buckets remove-iam-policy-binding gs://{settings.bucket} "
        "--member=serviceAccount:EMAIL --role=ROLE  # grant packer/permissions/gcp-vm.yaml instead",
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


def _check_access(root: Path) -> None:
    """Raise Permanent if a directory above ``root`` is not accessible, so that ``root`` seems missing."""
    for place in reversed(root.parents):
        if place.is_dir() and not os.access(place, os.X_OK, effective_ids=True):
            raise Permanent(
                f"reading {root} failed: {place} is not accessible for the daemon's user",
                hint="Open the directory",
                command=f"chmod a+x {fixes.quoted(place)}",
            )


# ---------------------------------------------------------------- the mirror


@CHECKS.add("mirror", applies=lambda vm: vm.config.mirror.url)
def mirror(vm: Installation) -> Judgement:
    """The mirror can be listed and written, and honours create-if-absent.

    A generation of a rehearsal is claimed and deleted.  No checkpoint depends on the mirror, so its failures
    are warnings.
    """
    config, edit = vm.config, fixes.edit(vm.path)
    try:
        opened = open_mirror(config.mirror, connections=1)
        assert opened is not None
        return _rehearsed(opened, config.run.name, edit)
    except (ConfigError, StoreError) as error:
        found = of_error(error, "")
        return warning(f"commits have one copy only: {found.found}", found.fix or edit)


def _rehearsed(mirror: ObjectStore, run: str, edit: str) -> Judgement:
    store = retried_briefly(mirror)
    rehearsal = Rehearsal(store, run)
    store.check()
    honours_if_absent = rehearsal.claim()
    rehearsal.clean_up()
    if honours_if_absent:
        return ok(f"{store.url} can be listed and written, and honours create-if-absent")
    return warning(
        f"{store.url} ignores create-if-absent: after a promotion two VMs could overwrite each other's"
        " commits. Set mirror.url to a store that honours If-None-Match",
        edit,
    )
