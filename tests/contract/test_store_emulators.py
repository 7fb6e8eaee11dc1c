# SPDX-License-Identifier: Apache-2.0
"""The store emulators are as strict as the real stores: a test with a lenient emulator proves nothing."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree as ET

import boto3
import google_crc32c
import pytest
import requests
from botocore.awsrequest import AWSRequest
from botocore.client import Config
from botocore.exceptions import ClientError

from testkit.emulators.process import EmulatorProcess
from testkit.emulators.store_control import POINTS
from testkit.store_backends import BUCKET, MIB, Cloud
from testkit.store_by_hand import UncheckedSigner, signed


def crc(data: bytes) -> str:
    value = google_crc32c.value(data).to_bytes(4, "big")
    return base64.b64encode(value).decode()


@pytest.mark.fault("O13")
def test_gcs_verifies_checksums(gcs_server: EmulatorProcess) -> None:
    """A wrong CRC32C is refused without an effect."""
    url = f"{gcs_server.url}/{BUCKET}/{os.urandom(8).hex()}"
    headers = {"x-goog-hash": f"crc32c={crc(b'other')}"}
    assert requests.put(url, data=b"content", headers=headers, timeout=10).status_code == 400
    assert requests.head(url, timeout=10).status_code == 404


def test_gcs_numbers_every_version(gcs_server: EmulatorProcess) -> None:
    """Object generations grow, and a create-if-absent of an existing object is refused."""
    url = f"{gcs_server.url}/{BUCKET}/{os.urandom(8).hex()}"
    first = requests.put(url, data=b"1", timeout=10)
    second = requests.put(url, data=b"2", timeout=10)
    numbers = [int(answer.headers["x-goog-generation"]) for answer in (first, second)]
    assert numbers[0] < numbers[1]
    for wanted, status in ((0, 412), (numbers[0], 412), (numbers[1], 200)):
        headers = {"x-goog-if-generation-match": str(wanted)}
        assert requests.put(url, data=b"3", headers=headers, timeout=10).status_code == status


def test_gcs_refuses_unknown_requests(gcs_server: EmulatorProcess) -> None:
    """With 501."""
    unknown = requests.get(f"{gcs_server.url}/{BUCKET}/key?acl", timeout=10)
    listing = requests.get(f"{gcs_server.url}/storage/v1/b/{BUCKET}/o?versions=true", timeout=10)
    assert (unknown.status_code, listing.status_code) == (501, 501)


# ---------------------------------------------------------------- S3, by the SDK


def s3_client(url: str, **options: Any) -> Any:
    config: Any = {"request_checksum_calculation": "when_required", **options.pop("config", {})}
    return boto3.client(
        "s3",
        endpoint_url=url,
        **{"region_name": "us-east-1", **options},
        config=Config(retries={"total_max_attempts": 1}, **config),
    )


@pytest.fixture
def s3(s3_server: EmulatorProcess) -> Any:
    return s3_client(s3_server.url)


def refused(call: Any, **arguments: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(Bucket=BUCKET, **arguments)
    return str(caught.value.response["Error"]["Code"])


@pytest.mark.fault("O13")
@pytest.mark.parametrize("server", ["s3", "moto"])
def test_s3_verifies_checksums(open_cloud: Callable[[str], Cloud], server: str) -> None:
    """A wrong CRC32C is refused."""
    s3 = s3_client(open_cloud(server).server.url)
    key = os.urandom(8).hex()
    assert refused(s3.put_object, Key=key, Body=b"1", ChecksumCRC32C=crc(b"2")) == "BadDigest"
    assert refused(s3.head_object, Key=key) == "404"
    s3.put_object(Bucket=BUCKET, Key=key, Body=b"1", ChecksumCRC32C=crc(b"1"))


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


@pytest.mark.fault("O07")
def test_s3_redirects_to_the_region_of_the_bucket(open_cloud: Callable[[str], Cloud]) -> None:
    """A signature for another region gets 301 with the right one."""
    cloud = open_cloud("s3")
    cloud.order("region", name="eu-west-1")
    answer = signed(cloud, "GET")
    assert (answer.status_code, answer.headers["x-amz-bucket-region"]) == (301, "eu-west-1")


@pytest.mark.fault("O08")
def test_s3_honours_preconditions(s3: Any) -> None:
    """Create-if-absent and replace-if-equal."""
    key = os.urandom(8).hex()
    etag = s3.put_object(Bucket=BUCKET, Key=key, Body=b"1", IfNoneMatch="*")["ETag"]
    put, failed = s3.put_object, "PreconditionFailed"
    assert refused(put, Key=key, Body=b"2", IfNoneMatch="*") == failed
    assert refused(put, Key=key, Body=b"2", IfMatch='"other"') == failed
    put(Bucket=BUCKET, Key=key, Body=b"2", IfMatch=etag)
    assert s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"2"


def test_s3_lists_in_pages(open_cloud: Callable[[str], Cloud], s3: Any) -> None:
    """Every page once, in order, with the paginator of the SDK."""
    folder = os.urandom(4).hex()
    keys = [f"{folder}/{number}" for number in range(5)]
    for key in keys:
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"")
    open_cloud("s3").order("page", size=2)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{folder}/")
    found = [[entry["Key"] for entry in page["Contents"]] for page in pages]
    assert found == [keys[:2], keys[2:4], keys[4:]]


def test_s3_ranges_and_addresses(open_cloud: Callable[[str], Cloud], s3: Any) -> None:
    """206 and 416, lifecycle rules, and virtual-host addresses."""
    key = os.urandom(8).hex()
    s3.put_object(Bucket=BUCKET, Key=key, Body=b"0123456789")
    answer = s3.get_object(Bucket=BUCKET, Key=key, Range="bytes=2-4")
    assert (answer["ContentRange"], answer["Body"].read()) == ("bytes 2-4/10", b"234")
    assert refused(s3.get_object, Key=key, Range="bytes=10-") == "InvalidRange"
    assert refused(s3.get_bucket_lifecycle_configuration) == "NoSuchLifecycleConfiguration"
    rule = {"ID": "x", "Status": "Enabled", "Filter": {"Prefix": ""}}
    rules = {"Rules": [{**rule, "Expiration": {"Days": 1}}]}
    s3.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=rules)
    assert s3.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"][0]["ID"] == "x"
    s3.delete_bucket_lifecycle(Bucket=BUCKET)
    url = open_cloud("s3").server.url
    request = AWSRequest("HEAD", f"{url}/{key}", headers={"Host": f"{BUCKET}.localhost"})
    UncheckedSigner().add_auth(request)
    head = requests.head(f"{url}/{key}", headers=dict(request.headers), timeout=10)
    assert (head.status_code, head.headers["Content-Length"]) == (200, "10")
    assert requests.get(f"{url}/{BUCKET}/{key}?acl", timeout=10).status_code == 403
    assert refused(s3.get_object_acl, Key=key) == "NotImplemented"


# ---------------------------------------------------------------- both, and their faults


def test_corrupt_flips_one_bit(cloud: Cloud) -> None:
    """The size stays, the content changes; a missing object cannot be corrupted."""
    store = cloud.open()
    store.put("key", b"content")
    cloud.order("corrupt", object=f"{cloud.prefix}/key")
    spoilt = store.get("key")
    assert sum((a ^ b).bit_count() for a, b in zip(spoilt, b"content", strict=True)) == 1


def test_an_outage_ends(cloud: Cloud) -> None:
    """503 during the outage; ``clear`` ends it and empties the record of requests."""
    cloud.order("outage", seconds=60)
    url, verify = f"{cloud.server.url}/{BUCKET}/key", str(cloud.ca) if cloud.ca else True
    cloud.order("outage", seconds=60, retry_after_s=7)
    answer = requests.get(url, verify=verify, timeout=10)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "7")
    assert cloud.requests() == [("GET", f"/{BUCKET}/key")]
    cloud.order("clear")
    assert cloud.requests() == []
    cloud.open().check()


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


def test_pace(cloud: Cloud) -> None:
    """A body takes as long as the rate requires."""
    cloud.order("pace", connection_bytes_per_s=2 * MIB)
    store = cloud.open()
    began = time.monotonic()
    store.create("shard", memoryview(bytes(MIB)))
    assert time.monotonic() - began > 0.4


def test_gcs_tokens(gcs_server: EmulatorProcess, open_cloud: Callable[[str], Cloud]) -> None:
    """Only the valid token is accepted; 401 for others and for none."""
    open_cloud("gcs").order("token", valid="fresh")
    url = f"{gcs_server.url}/storage/v1/b/{BUCKET}/o"
    statuses = {
        token: requests.get(
            url, headers={"Authorization": f"Bearer {token}"}, timeout=10
        ).status_code
        for token in ("fresh", "stale")
    }
    assert statuses == {"fresh": 200, "stale": 401}
    assert requests.get(url, timeout=10).status_code == 401
