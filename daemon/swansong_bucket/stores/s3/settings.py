# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a bucket of S3 with boto3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from swansong.bounds import items, json_object

from swansong_bucket.errors import NotFound
from swansong_bucket.stores import responses
from swansong_bucket.stores.http.client import RESPONSE_BYTES_MAX
from swansong_bucket.stores.s3.access import S3Access, Unsupported, errors_of
from swansong_bucket.stores.settings import LifecycleRule

_RULES_MAX = 1000
"""Limit of S3."""
_ROOTS = {
    "GetBucketVersioning": ("VersioningConfiguration",),
    "GetBucketLifecycleConfiguration": ("LifecycleConfiguration",),
    # A store that does not know the operation lists the bucket.
    "GetObjectLockConfiguration": ("ObjectLockConfiguration", "ListBucketResult"),
}


class S3Settings:
    """The settings of one bucket, see :mod:`swansong_bucket.stores.settings`."""

    def __init__(self, access: S3Access) -> None:
        self.bucket, self.prefix = access.bucket, access.prefix
        self._access = access

    def is_versioned(self) -> bool:
        """Whether the bytes stay as an older version after a delete or an overwrite."""
        return bool(self._read("get_bucket_versioning").get("Status") == "Enabled")

    def has_lock(self) -> bool:
        """Whether objects can have a retention."""
        try:
            found = self._read("get_object_lock_configuration")
        except (NotFound, Unsupported):
            return False
        lock = found.get("ObjectLockConfiguration", {})
        return bool(lock.get("ObjectLockEnabled") == "Enabled")

    def lifecycle_rules(self) -> Sequence[LifecycleRule]:
        """The rules that are in force."""
        try:
            found = self._read("get_bucket_lifecycle_configuration")
        except NotFound:
            return []
        with responses.complete("GetBucketLifecycleConfiguration"):
            rules = items(found.get("Rules", []), "Rules", _RULES_MAX)
        return [_rule(rule) for rule in rules if rule.get("Status") == "Enabled"]

    def policy(self) -> Mapping[str, Any] | None:
        """The bucket policy; None without one."""
        try:
            found = self._read("get_bucket_policy")
        except NotFound:
            return None
        with responses.complete("GetBucketPolicy"):
            return json_object(found["Policy"].encode(), "the policy", RESPONSE_BYTES_MAX)

    def _read(self, operation: str) -> Mapping[str, Any]:
        with errors_of("settings of the bucket", ""):
            found: Mapping[str, Any] = getattr(self._client, operation)(Bucket=self.bucket)
            return found

    @cached_property
    def _client(self) -> Any:
        """A client of boto3, which forms the requests and parses the responses."""
        import boto3  # noqa: PLC0415 - slow to import
        from botocore import UNSIGNED  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        # The region is unused, too: _send takes only the query.
        config = Config(signature_version=UNSIGNED, retries={"total_max_attempts": 1})
        client = boto3.client("s3", region_name="us-east-1", config=config)
        client.meta.events.register("before-send.s3", self._send)
        return client

    def _send(self, request: Any, event_name: str, **_: object) -> Any:
        """Send a request of boto3 with the credentials, address, limits and errors of the data path."""
        from botocore.awsrequest import AWSResponse  # noqa: PLC0415

        operation = event_name.rpartition(".")[2]
        query = dict(parse_qsl(urlsplit(request.url).query, keep_blank_values=True))
        response = self._access.call(operation, request.method, None, query)
        if operation in _ROOTS:
            # botocore reads an empty document, and each foreign one, as settings without a value.
            with responses.complete(operation):
                responses.document(response, *_ROOTS[operation])
        raw = SimpleNamespace(stream=lambda: [response.body])
        return AWSResponse(request.url, response.status, response.headers, raw)


def _rule(rule: Mapping[str, Any]) -> LifecycleRule:
    """Convert a rule; an older form has the prefix outside of the filter."""
    where = rule.get("Filter", rule)
    expiration = rule.get("Expiration", {})
    return LifecycleRule(
        name=rule.get("ID", ""),
        prefixes=(where.get("And", where).get("Prefix", ""),),
        # ExpiredObjectDeleteMarker removes markers without versions, and no object.
        deletes="Days" in expiration or "Date" in expiration,
        storage_classes=tuple(move.get("StorageClass", "") for move in rule.get("Transitions", [])),
    )
