# SPDX-License-Identifier: Apache-2.0
"""Checks of the bucket's settings: versioning, retention, policy and lifecycle rules."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swansong_bucket.errors import NotFound, StoreError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.gcs.settings import GcsSettings
from swansong_bucket.stores.s3.settings import S3Settings
from swansong_bucket.stores.settings import LifecycleRule
from swansongd.config.config import Config

from swansong_tools.doctor import store_fixes
from swansong_tools.doctor.findings import Judgement, failure, ok, warning
from swansong_tools.upkeep import lifecycle

_DELETE = "storage.objects.delete"
_HARMLESS = {"bool": {"s3:objectcreationoperation": ["true"]}}
"""A condition that exempts only requests which create no object."""


@dataclass(eq=False, repr=False)
class BucketChecks:
    """The checks, by name.

    Args:
        store: with the retention of the configuration.
    """

    config: Config
    store: ObjectStore
    settings: S3Settings | GcsSettings

    def __post_init__(self) -> None:
        self._keys = RunKeys(self.config.run.name)

    def lifecycle(self) -> Judgement:
        return judge_lifecycle(self.settings.lifecycle_rules(), self._keys, self.settings.prefix)

    def versioning(self) -> Judgement:
        if self.settings.is_versioned():
            return ok("a deleted or overwritten object can be brought back")
        return warning(
            "the bucket keeps no older versions: a deleted or overwritten object is lost",
            store_fixes.of_versioning(self.config),
        )

    def lock(self) -> Judgement:
        """Whether ``store.lock_days`` works; asks for the right with a key that does not exist."""
        days = self.config.store.lock_days
        if not days:
            return ok("store.lock_days is 0: the store locks no checkpoint")
        if not self.settings.has_lock():
            return failure(
                f"store.lock_days is {days}, and the bucket has no object lock: every write would fail",
                store_fixes.of_lock(self.config),
            )
        try:
            self.store.lock(f"{self._keys.data}absent")
        except NotFound:
            return ok(f"the store locks checkpoints for {days} days")
        except StoreError as error:
            return failure(f"setting a retention failed: {error}", f"# {error.hint}")
        return failure(f"{self._keys.data}absent exists", f"# delete {self._keys.data}absent")

    def policy(self) -> Judgement:
        settings = self.settings
        if isinstance(settings, GcsSettings):
            return _judge_overwriting(settings)
        found = settings.policy()
        bucket, prefix = settings.bucket, settings.prefix
        if enforces_create_if_absent(found, bucket, self._keys, prefix):
            return ok("the bucket policy enforces create-if-absent for manifests and claims")
        policy: dict[str, Any] = added(found, bucket, self._keys, prefix)
        command = f"aws s3api put-bucket-policy --bucket {bucket}"
        return warning(
            "no bucket policy enforces create-if-absent: an intruder with the role of a VM could overwrite "
            "manifests and claims (the command keeps the existing statements)",
            f"{store_fixes.aws(self.config, command)} --policy {shlex.quote(json.dumps(policy))}",
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


# ---------------------------------------------------------------- the bucket policy of S3


def statements(bucket: str, keys: RunKeys, prefix: str) -> list[dict[str, Any]]:
    """The statements of packer/permissions/aws-bucket-policy.json for a run.

    Args:
        prefix: of the store's URL: empty, or with a ``/`` at its end.
    """
    commits, generations = (
        f"arn:aws:s3:::{bucket}/{prefix}{below}*" for below in (keys.commits, keys.generations)
    )
    denied = {"Effect": "Deny", "Principal": "*"}
    return [
        {
            "Sid": "SwansongCreatesOnce",
            **denied,
            "Action": "s3:PutObject",
            "Resource": [commits, generations],
            "Condition": {"Null": {"s3:if-none-match": "true"}},
        },
        {
            "Sid": "SwansongKeepsClaims",
            **denied,
            "Action": ["s3:DeleteObject", "s3:DeleteObjectVersion"],
            "Resource": generations,
        },
    ]


def added(
    policy: Mapping[str, Any] | None, bucket: str, keys: RunKeys, prefix: str
) -> dict[str, Any]:
    """The policy with the statements for this run; existing statements stay.

    A new statement gets a number if its name is taken: of another run, for example.
    """
    own = statements(bucket, keys, prefix)
    kept = [] if policy is None else _listed(policy.get("Statement", []))
    taken = {each.get("Sid") for each in kept if isinstance(each, dict)}
    for statement in own:
        number, sid = 2, statement["Sid"]
        while statement["Sid"] in taken:
            statement["Sid"], number = f"{sid}{number}", number + 1
    return {"Version": "2012-10-17", "Statement": [*kept, *own]}


def enforces_create_if_absent(
    policy: Mapping[str, Any] | None, bucket: str, keys: RunKeys, prefix: str
) -> bool:
    """Whether the policy denies every account a PutObject without If-None-Match for manifests and claims."""
    found = [] if policy is None else _listed(policy.get("Statement", []))
    resources = [
        f"arn:aws:s3:::{bucket}/{prefix}{below}x" for below in (keys.commits, keys.generations)
    ]
    return all(
        any(_denies(each, resource) for each in found if isinstance(each, dict))
        for resource in resources
    )


def _denies(statement: Mapping[str, Any], resource: str) -> bool:
    condition = _lower(statement.get("Condition", {}))
    null = condition.pop("null", {})
    return (
        statement.get("Effect") == "Deny"
        and statement.get("Principal") in ("*", {"AWS": "*"}, {"AWS": ["*"]})
        and any(_is_like("s3:putobject", each.lower()) for each in _texts(statement, "Action"))
        and any(_is_like(resource, each) for each in _texts(statement, "Resource"))
        and null == {"s3:if-none-match": ["true"]}
        and condition in ({}, _HARMLESS)
    )


def _texts(statement: Mapping[str, Any], name: str) -> list[str]:
    return [each for each in _listed(statement.get(name, [])) if isinstance(each, str)]


def _lower(condition: Any) -> dict[str, Any]:
    """A condition block with names in lower case, and lists of values."""
    if not isinstance(condition, dict):
        return {"?": {}}
    return {
        operator.lower(): {
            key.lower(): [str(value).lower() for value in _listed(values)]
            for key, values in (pairs if isinstance(pairs, dict) else {}).items()
        }
        for operator, pairs in condition.items()
    }


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _is_like(text: str, pattern: str) -> bool:
    parts = [{"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern]
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None
