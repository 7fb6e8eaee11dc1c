# SPDX-License-Identifier: Apache-2.0
"""Reads that are the same on S3, GCS and Azure."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import Permanent
from swansong_bucket.stores.base import BytesSink, Sink
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
