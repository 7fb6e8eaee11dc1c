# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a bucket of S3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from swansong.bounds import items, json_object

from swansong_bucket.errors import NotFound
from swansong_bucket.stores import responses
from swansong_bucket.stores.http.client import RESPONSE_BYTES_MAX
from swansong_bucket.stores.s3.access import S3Access, Unsupported
from swansong_bucket.stores.settings import LifecycleRule

_RULES_MAX = 1000
"""Limit of S3."""


class S3Settings:
    """The settings of one bucket, see :mod:`swansong_bucket.stores.settings`."""

    def __init__(self, access: S3Access) -> None:
        self.bucket, self.prefix = access.bucket, access.prefix
        self._access = access

    def is_versioned(self) -> bool:
        """Whether the bytes stay as an older version after a delete or an overwrite."""
        found = self._read("GetBucketVersioning", "versioning", "VersioningConfiguration")
        return found.findtext("Status") == "Enabled"

    def has_lock(self) -> bool:
        """Whether objects can have a retention."""
        # A store that does not know the operation lists the bucket.
        roots = "ObjectLockConfiguration", "ListBucketResult"
        try:
            found = self._read("GetObjectLockConfiguration", "object-lock", *roots)
        except (NotFound, Unsupported):
            return False
        return found.findtext("ObjectLockEnabled") == "Enabled"

    def lifecycle_rules(self) -> Sequence[LifecycleRule]:
        """The rules that are in force."""
        what = "GetBucketLifecycleConfiguration"
        try:
            found = self._read(what, "lifecycle", "LifecycleConfiguration")
        except NotFound:
            return []
        with responses.complete(what):
            rules = items(found.findall("Rule"), "Rules", _RULES_MAX)
        return [_rule(rule) for rule in rules if rule.findtext("Status") == "Enabled"]

    def policy(self) -> Mapping[str, Any] | None:
        """The bucket policy; None without one."""
        what = "GetBucketPolicy"
        try:
            response = self._access.call(what, "GET", None, {"policy": ""})
        except NotFound:
            return None
        with responses.complete(what):
            return json_object(response.body, "the policy", RESPONSE_BYTES_MAX)

    def _read(self, operation: str, setting: str, *roots: str) -> ET.Element:
        """The document of a setting, whose root has one of these tags."""
        response = self._access.call(operation, "GET", None, {setting: ""})
        with responses.complete(operation):
            return responses.document(response, *roots)


def _rule(rule: ET.Element) -> LifecycleRule:
    """Convert a rule; an older form has the prefix outside of the filter."""
    places = ("Filter/And/Prefix", "Filter/Prefix", "Prefix")
    return LifecycleRule(
        name=rule.findtext("ID", ""),
        prefixes=(next(filter(None, map(rule.findtext, places)), ""),),
        # ExpiredObjectDeleteMarker removes markers without versions, and no object.
        deletes=any(rule.find(f"Expiration/{limit}") is not None for limit in ("Days", "Date")),
        storage_classes=tuple(move.text or "" for move in rule.findall("Transition/StorageClass")),
    )
