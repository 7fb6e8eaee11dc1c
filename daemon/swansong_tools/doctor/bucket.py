# SPDX-License-Identifier: Apache-2.0
"""Checks of the bucket's settings: versioning, retention, policy and lifecycle rules.

Without the right to read a setting the finding is "unknown", and never ok.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swansong_bucket.errors import NotFound, StoreError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.gcs.settings import GcsSettings
from swansong_bucket.stores.s3.settings import S3Settings
from swansong_bucket.stores.settings import LifecycleRule
from swansongd.config.config import Config

from swansong_tools.doctor import policies, store_fixes
from swansong_tools.doctor.findings import Judgement, failure, ok, skipped, warning
from swansong_tools.upkeep import lifecycle

_DELETE = "storage.objects.delete"


class BucketChecks:
    """The checks, by name.

    Args:
        store: with the retention of the configuration.
    """

    def __init__(
        self, config: Config, store: ObjectStore, settings: S3Settings | GcsSettings
    ) -> None:
        self._config = config
        self._store = store
        self._settings = settings
        self._keys = RunKeys(config.run.name)

    def checks(self) -> Mapping[str, Callable[[], Judgement]]:
        """The judges, by the name of the check."""
        return {
            "lifecycle rule": self._known(self.lifecycle, "lifecycle rules"),
            "versioning": self._known(self.versioning, "versioning"),
            "object lock": self._known(self.lock, "object lock"),
            "bucket policy": self._known(self.policy, "bucket policy"),
        }

    def _known(self, judge: Callable[[], Judgement], what: str) -> Callable[[], Judgement]:
        def judge_or_unknown() -> Judgement:
            try:
                return judge()
            except StoreError as error:
                return skipped(f"unknown: reading the {what} of the bucket failed: {error}")

        return judge_or_unknown

    def lifecycle(self) -> Judgement:
        return judge_lifecycle(self._settings.lifecycle_rules(), self._keys, self._settings.prefix)

    def versioning(self) -> Judgement:
        if self._settings.is_versioned():
            return ok("a deleted or overwritten object can be brought back")
        return warning(
            "the bucket keeps no older versions: a deleted or overwritten object is lost",
            store_fixes.of_versioning(self._config),
        )

    def lock(self) -> Judgement:
        """Whether ``store.lock_days`` works; asks for the right with a key that does not exist."""
        days = self._config.store.lock_days
        if not days:
            return ok("store.lock_days is 0: the store locks no checkpoint")
        if not self._settings.has_lock():
            return failure(
                f"store.lock_days is {days}, and the bucket has no object lock: every write would fail",
                store_fixes.of_lock(self._config),
            )
        try:
            self._store.lock(f"{self._keys.data}absent")
        except NotFound:
            return ok(f"the store locks checkpoints for {days} days")
        except StoreError as error:
            return failure(f"setting a retention failed: {error}", f"# {error.hint}")
        return failure(f"{self._keys.data}absent exists", f"# delete {self._keys.data}absent")

    def policy(self) -> Judgement:
        settings = self._settings
        if isinstance(settings, GcsSettings):
            return _judge_overwriting(settings)
        found = settings.policy()
        bucket, prefix = settings.bucket, settings.prefix
        if policies.enforces_create_if_absent(found, bucket, self._keys, prefix):
            return ok("the bucket policy enforces create-if-absent for manifests and claims")
        policy: dict[str, Any] = policies.added(found, bucket, self._keys, prefix)
        command = f"aws s3api put-bucket-policy --bucket {bucket}"
        return warning(
            "no bucket policy enforces create-if-absent: an intruder with the role of a VM could overwrite "
            "manifests and claims (the command keeps the existing statements)",
            f"{store_fixes.aws(self._config, command)} --policy {shlex.quote(json.dumps(policy))}",
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


def judge_lifecycle(rules: Sequence[LifecycleRule], keys: RunKeys, prefix: str) -> Judgement:
    """Whether no rule harms checkpoints."""
    harm = lifecycle.harmful(rules, keys, prefix)
    if harm:
        return failure(
            "; ".join(harm), "# remove the rule; swansong lifecycle prints rules that fit this run"
        )
    return ok("no lifecycle rule deletes checkpoints by age or moves them offline")
