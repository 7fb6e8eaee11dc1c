# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a bucket of GCS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from swansong.bounds import BoundsError, items, json_object, mapping, text

from swansongd.stores import responses
from swansongd.stores.base import named
from swansongd.stores.http.client import RESPONSE_BYTES_MAX, Response
from swansongd.stores.settings import LifecycleRule

_FIELDS = "kind,lifecycle,objectRetention,softDeletePolicy,versioning"
_NONCURRENT = ("daysSinceNoncurrentTime", "noncurrentTimeBefore", "numNewerVersions")
_RULES_MAX = 1000


class GcsSettings:
    """See :class:`swansongd.stores.settings.BucketSettings`.

    Args:
        exchange: sends a request with a method and a target.
    """

    def __init__(self, bucket: str, prefix: str, exchange: Callable[[str, str], Response]) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self._exchange = exchange

    def is_versioned(self) -> bool:
        kept_s = self._section("softDeletePolicy").get("retentionDurationSeconds", "0")
        return self._section("versioning").get("enabled") is True or kept_s not in ("0", 0)

    def has_lock(self) -> bool:
        return self._section("objectRetention").get("mode") == "Enabled"

    def lifecycle_rules(self) -> Sequence[LifecycleRule]:
        found = self._section("lifecycle")
        with responses.complete("the lifecycle rules"):
            rules = items(found.get("rule", []), "rule", _RULES_MAX)
            return [_rule(mapping(rule, "a rule", 10)) for rule in rules]

    def policy(self) -> Mapping[str, Any] | None:
        return None

    def rights(self, wanted: Sequence[str]) -> frozenset[str]:
        query = urlencode([("permissions", each) for each in wanted])
        found = self._read(
            f"{self._target}/iam/testPermissions?{query}", "storage#testIamPermissionsResponse"
        )
        with responses.complete("the rights"):
            listed = items(found.get("permissions", []), "permissions", len(wanted))
            return frozenset(text(each, "a permission", 200) for each in listed)

    @property
    def _target(self) -> str:
        return f"/storage/v1/b/{quote(self.bucket, safe='')}"

    def _section(self, name: str) -> Mapping[str, Any]:
        found = self._read(f"{self._target}?fields={_FIELDS}", "storage#bucket").get(name, {})
        with responses.complete(f"settings of bucket {self.bucket}"):
            return mapping(found, name, 100)

    def _read(self, target: str, kind: str) -> Mapping[str, Any]:
        what = f"settings of bucket {self.bucket}"
        with named(what):
            response = self._exchange("GET", target)
        with responses.complete(what):
            found = json_object(response.body, "the settings", RESPONSE_BYTES_MAX)
            if found.get("kind") != kind:
                raise BoundsError(f"kind is {found.get('kind')!r:.40}, not {kind!r}")
            return found


def _rule(rule: Mapping[str, Any]) -> LifecycleRule:
    action = mapping(rule.get("action"), "action", 10)
    condition = mapping(rule.get("condition", {}), "condition", 50)
    prefixes = items(condition.get("matchesPrefix", []), "matchesPrefix", 1000)
    kind = text(action.get("type"), "type", 100)
    is_noncurrent = condition.get("isLive") is False or any(
        name in condition for name in _NONCURRENT
    )
    return LifecycleRule(
        name="",
        prefixes=tuple(text(each, "a prefix", 2000) for each in prefixes) or ("",),
        deletes=kind == "Delete" and not is_noncurrent,
        storage_class=str(action.get("storageClass", "")) if kind == "SetStorageClass" else "",
    )
