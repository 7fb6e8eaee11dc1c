# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a bucket of S3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from swansong.bounds import json_object

from swansongd.errors import NotFound, Permanent
from swansongd.stores import responses
from swansongd.stores.http.client import RESPONSE_BYTES_MAX
from swansongd.stores.s3.retention import Call, S3Retention
from swansongd.stores.settings import LifecycleRule


class S3Settings:
    """See :class:`swansongd.stores.settings.BucketSettings`.

    Args:
        call: sends requests.
    """

    def __init__(self, bucket: str, prefix: str, call: Call, retention: S3Retention) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self._call = call
        self._retention = retention

    def is_versioned(self) -> bool:
        what = "GetBucketVersioning"
        response = self._call("GetBucketVersioning", "GET", None, {"versioning": ""})
        with responses.complete(what):
            # moto sends the second one
            root = responses.document(
                response, "VersioningConfiguration", "GetBucketVersioningResponse"
            )
        return root.findtext("Status") == "Enabled"

    def has_lock(self) -> bool:
        return self._retention.is_enabled()

    def lifecycle_rules(self) -> Sequence[LifecycleRule]:
        what = "GetBucketLifecycleConfiguration"
        try:
            response = self._call("GetBucketLifecycleConfiguration", "GET", None, {"lifecycle": ""})
        except NotFound:
            return []
        with responses.complete(what):
            rules = responses.document(response, "LifecycleConfiguration").findall("Rule")
        return [_rule(rule) for rule in rules if rule.findtext("Status") == "Enabled"]

    def policy(self) -> Mapping[str, Any] | None:
        what = "GetBucketPolicy"
        try:
            response = self._call("GetBucketPolicy", "GET", None, {"policy": ""})
        except NotFound:
            return None
        with responses.complete(what):
            return json_object(response.body, "the policy", RESPONSE_BYTES_MAX)

    def rights(self, wanted: Sequence[str]) -> frozenset[str]:
        raise Permanent(f"S3 has no request that tells whether the caller has {', '.join(wanted)}")


def _rule(rule: ET.Element) -> LifecycleRule:
    """Parse a rule; an older form has the prefix outside of the filter."""
    filter_ = rule.find("Filter")
    where = rule if filter_ is None else filter_
    both = where.find("And")
    prefix = (where if both is None else both).findtext("Prefix") or ""
    expiration = rule.find("Expiration")
    # ExpiredObjectDeleteMarker removes markers without versions, and no object.
    deletes = expiration is not None and any(
        expiration.find(tag) is not None for tag in ("Days", "Date")
    )
    moves = rule.find("Transition")
    return LifecycleRule(
        name=rule.findtext("ID") or "",
        prefixes=(prefix,),
        deletes=deletes,
        storage_class="" if moves is None else moves.findtext("StorageClass") or "",
    )
