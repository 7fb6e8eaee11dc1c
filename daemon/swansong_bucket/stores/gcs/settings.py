# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a bucket of GCS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode

from swansong.bounds import BYTES_MAX, items, mapping, text

from swansong_bucket.stores import responses
from swansong_bucket.stores.gcs.access import GcsAccess
from swansong_bucket.stores.settings import LifecycleRule

_NONCURRENT = ("daysSinceNoncurrentTime", "noncurrentTimeBefore", "numNewerVersions")
_RULES_MAX = 1000


class GcsSettings:
    """The settings of one bucket, see :mod:`swansong_bucket.stores.settings`."""

    def __init__(self, access: GcsAccess) -> None:
        self.bucket, self.prefix = access.bucket, access.prefix
        self._access = access

    def is_versioned(self) -> bool:
        """Whether the bytes stay after a delete or an overwrite, by versions or by soft delete."""
        with self._read() as bucket:
            kept_s = _part(bucket, "softDeletePolicy").get("retentionDurationSeconds", "0")
            is_soft = responses.decimal(str(kept_s), "retentionDurationSeconds", BYTES_MAX) > 0
            return is_soft or _part(bucket, "versioning").get("enabled") is True

    def has_lock(self) -> bool:
        """Whether objects can have a retention."""
        with self._read() as bucket:
            return _part(bucket, "objectRetention").get("mode") == "Enabled"

    def lifecycle_rules(self) -> Sequence[LifecycleRule]:
        """The rules that are in force."""
        with self._read() as bucket:
            rules = items(_part(bucket, "lifecycle").get("rule", []), "rule", _RULES_MAX)
            return [_rule(mapping(rule, "a rule", 50)) for rule in rules]

    def rights(self, wanted: Sequence[str]) -> frozenset[str]:
        """The rights among ``wanted`` that these credentials have on the whole bucket."""
        query = urlencode([("permissions", each) for each in wanted], quote_via=quote)
        below, kind = f"/iam/testPermissions?{query}", "storage#testIamPermissionsResponse"
        with self._read(below, kind) as found:
            listed = items(found.get("permissions", []), "permissions", len(wanted))
            return frozenset(text(each, "a permission", 200) for each in listed)

    @contextmanager
    def _read(self, below: str = "", kind: str = "storage#bucket") -> Iterator[Mapping[str, Any]]:
        """A resource of the bucket; a field that is out of bounds is an error of the contract."""
        what = f"settings of bucket {self.bucket}"
        with responses.complete(what):
            response = self._access.of_bucket(what, below)
            yield responses.json_document(response, "the settings", kind)


def _part(bucket: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object in the resource of a bucket; empty if it is absent."""
    return mapping(bucket.get(name, {}), name, 50)


def _rule(rule: Mapping[str, Any]) -> LifecycleRule:
    condition = _part(rule, "condition")
    prefixes = items(condition.get("matchesPrefix", []), "matchesPrefix", 1000)
    is_noncurrent = condition.get("isLive") is False or not condition.keys().isdisjoint(_NONCURRENT)
    return LifecycleRule(
        name="",
        prefixes=tuple(text(each, "a prefix", 2000) for each in prefixes) or ("",),
        deletes=_part(rule, "action").get("type") == "Delete" and not is_noncurrent,
    )
