# SPDX-License-Identifier: Apache-2.0
"""The store emulators are as strict as the real stores: a test with a lenient emulator proves nothing.

Their checksums, preconditions and pages are shown by test_our_emulators_lack_nothing and by the contract.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree as ET

import boto3
import pytest
import requests
from botocore.client import Config
from botocore.exceptions import ClientError

from testkit.emulators.store_control import POINTS
from testkit.store_backends import BUCKET, Cloud
from testkit.store_by_hand import signed


def s3_client(url: str, **options: Any) -> Any:
    config: Any = {"request_checksum_calculation": "when_required", **options.pop("config", {})}
    return boto3.client(
        "s3",
        endpoint_url=url,
        **{"region_name": "us-east-1", **options},
        config=Config(retries={"total_max_attempts": 1}, **config),
    )


@pytest.fixture
def s3(open_cloud: Callable[[str], Cloud]) -> Any:
    return s3_client(open_cloud("s3").server.url)


def refused(call: Any, **arguments: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(Bucket=BUCKET, **arguments)
    return str(caught.value.response["Error"]["Code"])


def signed_put(cloud: Cloud, body: bytes, headers: dict[str, str]) -> str:
    """The error code of a PUT; empty for a success."""
    answer = signed(cloud, "PUT", body, headers)
    return ET.fromstring(answer.content).findtext("{*}Code") or "" if answer.content else ""


def test_s3_verifies_signatures(open_cloud: Callable[[str], Cloud], s3: Any) -> None:
    """Access key, secret, time and bytes are verified."""
    cloud = open_cloud("s3")
    url = cloud.server.url
    names = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}

    def code(**changed: str) -> str:
        return refused(s3_client(url, **{**names, **changed}).list_objects_v2)

    assert code(aws_access_key_id="unknown") == "InvalidAccessKeyId"
    assert code(aws_secret_access_key="guessed") == "SignatureDoesNotMatch"
    assert code(aws_session_token="stale") == "InvalidToken"
    assert requests.get(f"{url}/{BUCKET}/key", timeout=10).status_code == 403
    wrong_hash = {"x-amz-content-sha256": "0" * 64}
    assert signed_put(cloud, b"content", wrong_hash) == "XAmzContentSHA256Mismatch"
    wrong_md5 = {"content-md5": base64.b64encode(bytes(16)).decode()}
    assert signed_put(cloud, b"content", wrong_md5) == "BadDigest"
    assert signed_put(cloud, b"content", {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}) == ""
    for key in ("with space/a b", "a+b=c@d,e", "ümläut/日本", "per%20cent", "(x)'&y!*~"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"1")  # each has another canonical form
    cloud.order("clock", ahead_s=1000)
    assert refused(s3.list_objects_v2) == "RequestTimeTooSkewed"
    cloud.order("clear")
    cloud.order("expire")
    assert refused(s3.list_objects_v2) == "ExpiredToken"
    cloud.order("credentials", access_key="other", secret_key="new", session_token="fresh")
    other = {"aws_access_key_id": "other", "aws_secret_access_key": "new"}
    assert refused(s3_client(url, **other).list_objects_v2) == "InvalidAccessKeyId"
    s3_client(url, **other, aws_session_token="fresh").list_objects_v2(Bucket=BUCKET)


@pytest.mark.fault("O01")
@pytest.mark.parametrize("point", POINTS)
def test_a_connection_breaks_where_it_was_ordered(cloud: Cloud, point: str) -> None:
    """A request takes effect only if the break is after its last byte."""
    # requests does not detect a truncated head of a response without a body.
    method = "GET" if point == "in_answer" else "PUT"
    cloud.order("break", kind="reset", at=point, method=method)
    broken = (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)
    with pytest.raises(broken):
        signed(cloud, method, b"x" * 1000)
    asked = [method for method, _ in cloud.requests()]
    assert asked == ([method] if point in POINTS[-2:] else [])
    cloud.order("break", kind="stall", at=point, method=method)
    with pytest.raises((requests.Timeout, requests.ConnectionError)):
        signed(cloud, method, b"x" * 1000, timeout_s=0.3)


def test_unknown_requests_are_refused(open_cloud: Callable[[str], Cloud], s3: Any) -> None:
    """With 501."""
    gcs = open_cloud("gcs").server
    unknown = requests.get(f"{gcs.url}/{BUCKET}/key?acl", timeout=10)
    listing = requests.get(f"{gcs.url}/storage/v1/b/{BUCKET}/o?versions=true", timeout=10)
    assert (unknown.status_code, listing.status_code) == (501, 501)
    s3.put_object(Bucket=BUCKET, Key="key", Body=b"1")
    assert refused(s3.get_object_acl, Key="key") == "NotImplemented"
