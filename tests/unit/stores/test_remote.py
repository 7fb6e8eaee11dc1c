# SPDX-License-Identifier: Apache-2.0
"""Requests that are the same on S3, GCS and Azure."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import Exists, Permanent
from swansong_bucket.stores.base import Body, BytesSink, Sink
from swansong_bucket.stores.http.client import Response
from swansong_bucket.stores.s3.store import S3Store


@pytest.mark.parametrize(
    ("status", "content_range", "is_read"),
    [
        (206, "bytes 5-7/10", True),
        (200, "bytes 5-7/10", True),
        (203, "bytes 5-7/10", False),
        (204, "bytes 5-7/10", False),
        (206, "bytes 0-2/10", False),
        (206, "bytes 5-70/100", False),
        (200, "", False),
    ],
)
def test_a_range_is_read_only_from_a_complete_answer(
    status: int, content_range: str, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the range that was asked for; some servers send it with status 200."""
    store, sink = S3Store(StoreAccess(url="s3://bucket")), BytesSink(3)

    def answer(*_: object, headers: Mapping[str, str], sink: Sink) -> Response:
        assert headers["range"] == "bytes=5-7"
        sink.write(memoryview(b"abc"))
        return Response(status, {"content-range": content_range}, b"")

    monkeypatch.setattr(store._access, "call", answer)
    if is_read:
        store.get_range("key", 5, 3, sink)
        assert sink.data == b"abc"
    else:
        with pytest.raises(Permanent, match="bytes 5-7 are not within the object"):
            store.get_range("key", 5, 3, sink)


@pytest.mark.parametrize(
    ("size_bytes", "checksum", "methods", "is_ours"),
    [
        (5, "of these bytes", "PUT HEAD", True),
        (5, "of other bytes", "PUT HEAD", False),
        (4, "", "PUT HEAD", False),
        (5, "", "PUT HEAD PUT", True),
    ],
)
def test_an_object_that_exists_is_ours_by_its_bytes(
    size_bytes: int,
    checksum: str,
    methods: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_ours: bool,
) -> None:
    """If the store returns no checksum, only an object of the same size gets these bytes again."""
    store, body, sent = S3Store(StoreAccess(url="s3://bucket")), Body(b"bytes"), []
    checksums = {"of these bytes": store._checksum(body), "of other bytes": "AAAAAA=="}

    def answer(
        _: str, method: str, *_more: object, headers: Mapping[str, str], **_options: object
    ) -> Response:
        sent.append(method)
        if method == "PUT":
            if "if-none-match" in headers:
                raise Exists("412")
            return Response(200, {"etag": '"1"'}, b"")
        found = {store._checksum_header: checksums[checksum]} if checksum else {}
        return Response(200, {"content-length": str(size_bytes), "etag": '"1"', **found}, b"")

    monkeypatch.setattr(store._access, "call", answer)
    if is_ours:
        store.create("key", body)
    else:
        with pytest.raises(Exists):
            store.create("key", body)
    assert " ".join(sent) == methods
