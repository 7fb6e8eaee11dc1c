# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a bucket of GCS with google-cloud-storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from io import BytesIO
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from swansong.bounds import BoundsError, items, json_object, mapping, text

from swansong_bucket.stores import responses
from swansong_bucket.stores.gcs.access import GcsAccess
from swansong_bucket.stores.http.client import RESPONSE_BYTES_MAX
from swansong_bucket.stores.settings import LifecycleRule

_KINDS = ("storage#bucket", "storage#testIamPermissionsResponse")
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
            kept_s = bucket.soft_delete_policy.retention_duration_seconds
            return bucket.versioning_enabled is True or bool(kept_s)

    def has_lock(self) -> bool:
        """Whether objects can have a retention."""
        with self._read() as bucket:
            return bool(bucket.object_retention_mode == "Enabled")

    def lifecycle_rules(self) -> Sequence[LifecycleRule]:
        """The rules that are in force."""
        with self._read() as bucket:
            rules = items(list(bucket.lifecycle_rules), "rule", _RULES_MAX)
            return [_rule(dict(rule)) for rule in rules]

    def rights(self, wanted: Sequence[str]) -> frozenset[str]:
        """The rights among ``wanted`` that these credentials have on the whole bucket."""
        with self._checked():
            found = self._bucket.test_iam_permissions(wanted, retry=None)
            listed = items(found, "permissions", len(wanted))
            return frozenset(text(each, "a permission", 200) for each in listed)

    @contextmanager
    def _read(self) -> Iterator[Any]:
        """The bucket of google-cloud-storage, with its present settings."""
        with self._checked():
            self._bucket.reload(retry=None)
            yield self._bucket

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Turn a field of a wrong type into an error of the contract: the library checks no types."""
        with responses.complete(f"settings of bucket {self.bucket}"):
            try:
                yield
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise BoundsError(str(error)) from error

    @cached_property
    def _bucket(self) -> Any:
        """The bucket of a client that forms the requests and parses the responses."""
        from google.auth.credentials import AnonymousCredentials  # noqa: PLC0415
        from google.cloud import storage  # noqa: PLC0415 - slow to import

        client = storage.Client(
            project="unused",
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": "https://unused"},
            _http=SimpleNamespace(request=self._send),
        )
        return client.bucket(self.bucket)

    def _send(self, url: str, method: str, **_: object) -> Any:
        """Send a request of the library with the credentials, address, limits and errors of the data path."""
        import requests  # noqa: PLC0415 - slow to import

        parts = urlsplit(url)
        what = f"settings of bucket {self.bucket}"
        response = self._access.ask(what, method, f"{parts.path}?{parts.query}")
        found = json_object(response.body, "the settings", RESPONSE_BYTES_MAX)
        if found.get("kind") not in _KINDS:
            raise BoundsError(f"kind is {found.get('kind')!r:.40}, not {_KINDS[0]!r}")
        received = requests.Response()
        received.status_code, received.raw = response.status, BytesIO(response.body)
        return received


def _rule(rule: Mapping[str, Any]) -> LifecycleRule:
    condition = mapping(rule.get("condition", {}), "condition", 50)
    prefixes = items(condition.get("matchesPrefix", []), "matchesPrefix", 1000)
    is_noncurrent = condition.get("isLive") is False or not condition.keys().isdisjoint(_NONCURRENT)
    return LifecycleRule(
        name="",
        prefixes=tuple(text(each, "a prefix", 2000) for each in prefixes) or ("",),
        deletes=rule["action"]["type"] == "Delete" and not is_noncurrent,
    )
