# SPDX-License-Identifier: Apache-2.0
"""S3 and GCS stores with error responses and lost replies."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
from swansong_bucket.errors import Exists, NotFound, Permanent, StoreError, Transient
from swansong_bucket.stores.base import Body

from testkit.store_backends import (
    BUCKET,
    Cloud,
    every_call,
    get_range,
    store_at,
)

CONTENT = os.urandom(200_000)


# ---------------------------------------------------------------- refusals

COMMON = [
    pytest.param(503, "SlowDown", Transient, "", marks=pytest.mark.fault("O04")),
    pytest.param(429, "TooManyRequests", Transient, "", marks=pytest.mark.fault("O04")),
    (500, "InternalError", Transient, ""),
    (502, "BadGateway", Transient, ""),
    (408, "RequestTimeout", Transient, ""),
    pytest.param(409, "ConditionalRequestConflict", Transient, "", marks=pytest.mark.fault("O10")),
    pytest.param(412, "PreconditionFailed", Exists, "", marks=pytest.mark.fault("O08")),
    (404, "NoSuchKey", NotFound, ""),
    (404, "NoSuchBucket", NotFound, "store.url"),
    (403, "AccessDenied", Permanent, ""),
    (400, "InvalidArgument", Permanent, ""),
    (411, "MissingContentLength", Permanent, ""),
    (501, "NotImplemented", Permanent, ""),
]
OF_ONE_SERVICE = [
    pytest.param("s3", 400, "BadDigest", Transient, "", marks=pytest.mark.fault("O13")),
    ("s3", 400, "RequestTimeout", Transient, ""),
    ("s3", 403, "AccessDenied", Permanent, "s3:ListBucket"),
    ("s3", 403, "InvalidAccessKeyId", Permanent, "instance role"),
    ("s3", 403, "SignatureDoesNotMatch", Permanent, "instance role"),
    pytest.param(
        "s3", 400, "ExpiredToken", Permanent, "instance role", marks=pytest.mark.fault("O05")
    ),
    pytest.param(
        "s3", 403, "RequestTimeTooSkewed", Permanent, "clock", marks=pytest.mark.fault("O06")
    ),
    pytest.param(
        "s3",
        400,
        "IllegalLocationConstraintException",
        Permanent,
        "store.region",
        marks=pytest.mark.fault("O07"),
    ),
    ("gcs", 403, "AccessDenied", Permanent, "service account"),
    pytest.param(
        "gcs", 401, "Unauthorized", Permanent, "service account", marks=pytest.mark.fault("O05")
    ),
]
KINDS = (Transient, NotFound, Exists, Permanent)
"""All that the contract knows; the last one is the base of the two before it."""


def refusal_is_classified(
    cloud: Cloud, status: int, code: str, wanted: type[StoreError], hint: str
) -> None:
    store = cloud.open()
    store.put("key", b"content")
    calls: list[Callable[[], object]] = [
        lambda: store.put("other", b"", if_absent=True),
        lambda: store.get("key"),
        lambda: get_range(store, "key", 0, 3),
    ]
    if wanted is not Exists:  # which compares the object
        calls.append(lambda: store.create("other", Body(b"x" * 10)))
    if wanted is not NotFound:  # which has another meaning there
        calls += [lambda: list(store.list("")), lambda: store.delete("key"), store.check]
    for call in calls:
        cloud.order("clear")
        for method in ("GET", "PUT", "POST", "DELETE"):  # the response to a HEAD has no body
            cloud.order("answer", status=status, code=code, method=method, times=9)
        with pytest.raises(StoreError) as caught:
            call()
        kind = next(kind for kind in KINDS if isinstance(caught.value, kind))
        assert kind is wanted, caught.value
        # The JSON interface of GCS has no code for a missing bucket, so every 404 has the hint.
        assert hint in caught.value.hint


@pytest.mark.parametrize(("status", "code", "wanted", "hint"), COMMON)
def test_refusals(
    cloud: Cloud, status: int, code: str, wanted: type[StoreError], hint: str
) -> None:
    """Every call turns an error response into the error that tells whether a retry can help."""
    refusal_is_classified(cloud, status, code, wanted, hint)


@pytest.mark.parametrize(("kind", "status", "code", "wanted", "hint"), OF_ONE_SERVICE)
def test_refusals_of_one_service(  # noqa: PLR0917 - the table above
    open_cloud: Callable[[str], Cloud],
    kind: str,
    status: int,
    code: str,
    wanted: type[StoreError],
    hint: str,
) -> None:
    """Codes of S3 alone, and statuses with another meaning in GCS, each with its hint."""
    refusal_is_classified(open_cloud(kind), status, code, wanted, hint)


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            b'{"error": {"code": 403, "message": "\\"me\\" lacks storage.objects.get\\n"}}',
            '"me" lacks',
        ),
        (b'{"error": "invalid_grant", "error_description": "no"}', "invalid_grant"),
        (b"<Error><Message>Denied.</Message><Details>me lacks it</Details></Error>", "me lacks it"),
        (b"<html><head><title>Forbidden by the proxy</title></head></html>", "by the proxy"),
        (b"the bucket is locked\n", "the bucket is locked"),
        (json.dumps({"error": {"message": LONG}}).encode(), "xxx"),
    ],
)
def test_a_refusal_of_gcs_has_its_reason(
    open_cloud: Callable[[str], Cloud], body: bytes, reason: str
) -> None:
    """In one line of bounded length, for both interfaces."""
    cloud = open_cloud("gcs")
    store = cloud.open()
    cloud.order("say", status=403, body=body.decode())
    with pytest.raises(StoreError) as caught:
        store.check()
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.fault("O04", "O21")
def test_one_call_is_one_request(cloud: Cloud) -> None:
    """No SDK retries, after any error."""
    store = cloud.open()
    store.put("key", b"content")
    for call in every_call(store).values():
        cloud.order("clear")
        cloud.order("outage", seconds=60)
        with pytest.raises(Transient):
            call()
        assert len(cloud.requests()) == 1, cloud.requests()


@pytest.mark.fault("O05", "O07")
def test_no_credentials(cloud_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permanent with a hint, without a request to the network; later credentials are found."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nonexistent")
    for store in (store_at(f"s3://{BUCKET}"), store_at(f"gs://{BUCKET}")):
        for _ in range(2):
            with pytest.raises(Permanent) as caught:
                store.check()
            assert "instance role" in caught.value.hint or "service account" in caught.value.hint


@pytest.mark.fault("O05")
def test_credentials_that_come_later(
    open_cloud: Callable[[str], Cloud], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that was used without credentials works once they exist."""
    store = store_at(f"s3://{BUCKET}", open_cloud("s3").server.url)
    with monkeypatch.context() as without:
        without.delenv("AWS_ACCESS_KEY_ID")
        with pytest.raises(Permanent):
            store.check()
    store.check()
