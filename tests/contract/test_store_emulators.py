# SPDX-License-Identifier: Apache-2.0
"""The store emulators are strict where the real stores are: a fake that forgives proves nothing."""

from __future__ import annotations

import base64
import os
from typing import Any
from xml.etree import ElementTree as ET

import boto3
import google_crc32c
import pytest
import requests
from botocore.client import Config
from botocore.exceptions import ClientError
from contract.store_backends import BUCKET, MIB, PART, Cloud
from emulators.process import EmulatorProcess


def crc(data: bytes) -> str:
    value = google_crc32c.value(data).to_bytes(4, "big")
    return base64.b64encode(value).decode()


class GcsUpload:
    """A multipart upload by hand."""

    def __init__(self, server: EmulatorProcess) -> None:
        self.url = f"{server.url}/{BUCKET}/{os.urandom(8).hex()}"
        answer = requests.post(f"{self.url}?uploads", timeout=10)
        self.upload_id = ET.fromstring(answer.content).findtext("{*}UploadId")

    def part(self, number: int, data: bytes, checksum: str | None = None) -> requests.Response:
        headers = {"x-goog-hash": f"crc32c={checksum or crc(data)}"}
        url = f"{self.url}?partNumber={number}&uploadId={self.upload_id}"
        return requests.put(url, data=data, headers=headers, timeout=10)

    def complete(self, *parts: tuple[int, str]) -> tuple[int, str | None]:
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
            for number, etag in parts
        )
        answer = requests.post(
            f"{self.url}?uploadId={self.upload_id}",
            data=f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>",
            timeout=10,
        )
        return answer.status_code, ET.fromstring(answer.content).findtext("{*}Code")


@pytest.mark.fault("O13")
def test_gcs_verifies_what_comes_with_a_checksum(gcs_server: EmulatorProcess) -> None:
    """Parts, whole objects and JSON uploads with a wrong CRC32C are refused and leave no trace."""
    upload = GcsUpload(gcs_server)
    assert upload.part(1, b"content", crc(b"other")).status_code == 400
    assert upload.complete((1, "x")) == (400, "InvalidPart")
    headers = {"x-goog-hash": f"crc32c={crc(b'other')}"}
    assert requests.put(upload.url, data=b"content", headers=headers, timeout=10).status_code == 400
    assert requests.head(upload.url, timeout=10).status_code == 404


def test_gcs_refuses_bad_completions(gcs_server: EmulatorProcess) -> None:
    """Wrong order, wrong ETag, a part too small, an unknown upload: each has its code."""
    upload = GcsUpload(gcs_server)
    large = bytes(PART)
    etags = {n: upload.part(n, large).headers["ETag"] for n in (1, 2)}
    etags[3] = upload.part(3, b"small").headers["ETag"]
    etags[4] = upload.part(4, b"last").headers["ETag"]
    assert upload.complete((2, etags[2]), (1, etags[1])) == (400, "InvalidPartOrder")
    assert upload.complete((1, etags[3])) == (400, "InvalidPart")
    assert upload.complete((9, etags[1])) == (400, "InvalidPart")
    assert upload.complete((1, etags[1]), (3, etags[3]), (4, etags[4])) == (400, "EntityTooSmall")
    assert requests.head(upload.url, timeout=10).status_code == 404
    assert upload.complete((1, etags[1]), (4, etags[4])) == (200, None)
    head = requests.head(upload.url, timeout=10)
    assert head.headers["x-goog-hash"] == f"crc32c={crc(large + b'last')}"
    assert int(head.headers["Content-Length"]) == PART + 4
    assert upload.complete((1, etags[1])) == (404, "NoSuchUpload")


def test_gcs_numbers_every_version(gcs_server: EmulatorProcess) -> None:
    """Object generations grow, and a create only if generation 0 is refused where one stands."""
    url = f"{gcs_server.url}/{BUCKET}/{os.urandom(8).hex()}"
    first = requests.put(url, data=b"1", timeout=10)
    second = requests.put(url, data=b"2", timeout=10)
    numbers = [int(answer.headers["x-goog-generation"]) for answer in (first, second)]
    assert numbers[0] < numbers[1]
    for wanted, status in ((0, 412), (numbers[0], 412), (numbers[1], 200)):
        headers = {"x-goog-if-generation-match": str(wanted)}
        assert requests.put(url, data=b"3", headers=headers, timeout=10).status_code == status


def test_gcs_takes_resumable_uploads(cloud: Cloud) -> None:
    """What google-cloud-storage sends of objects over 8 MiB; create-if-absent holds there too."""
    store = cloud.open()
    content = os.urandom(9 * MIB)
    store.put("large", content, if_absent=True)
    assert store.get("large") == content


def test_gcs_says_when_it_does_not_know(gcs_server: EmulatorProcess) -> None:
    """What the emulator lacks it refuses instead of guessing."""
    unknown = requests.get(f"{gcs_server.url}/{BUCKET}/key?acl", timeout=10)
    listing = requests.get(f"{gcs_server.url}/storage/v1/b/{BUCKET}/o?delimiter=/", timeout=10)
    assert (unknown.status_code, listing.status_code) == (501, 501)


@pytest.fixture
def s3(s3_server: EmulatorProcess) -> Any:
    config = Config(request_checksum_calculation="when_required", retries={"total_max_attempts": 1})
    return boto3.client("s3", endpoint_url=s3_server.url, region_name="us-east-1", config=config)


def refused(call: Any, **arguments: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(Bucket=BUCKET, **arguments)
    return str(caught.value.response["Error"]["Code"])


@pytest.mark.fault("O13")
def test_s3_verifies_what_comes_with_a_checksum(s3: Any) -> None:
    """A wrong CRC32C is refused on puts and parts, a missing one where it was announced."""
    key = os.urandom(8).hex()
    assert refused(s3.put_object, Key=key, Body=b"1", ChecksumCRC32C=crc(b"2")) == "BadDigest"
    begun = s3.create_multipart_upload(Bucket=BUCKET, Key=key, ChecksumAlgorithm="CRC32C")
    part = {"Key": key, "UploadId": begun["UploadId"], "PartNumber": 1, "Body": b"1"}
    assert refused(s3.upload_part, **part, ChecksumCRC32C=crc(b"2")) == "BadDigest"
    assert refused(s3.upload_part, **part) == "InvalidRequest"
    etag = s3.upload_part(Bucket=BUCKET, **part, ChecksumCRC32C=crc(b"1"))["ETag"]
    named = {"PartNumber": 1, "ETag": etag}
    order = {"Key": key, "UploadId": begun["UploadId"]}
    complete = s3.complete_multipart_upload
    assert refused(complete, **order, MultipartUpload={"Parts": [named]}) == "InvalidRequest"
    whole = {"Parts": [{**named, "ChecksumCRC32C": crc(b"1")}]}
    assert refused(complete, **order, MultipartUpload=whole, MpuObjectSize=2) == "InvalidRequest"
    complete(Bucket=BUCKET, **order, MultipartUpload=whole, MpuObjectSize=1)
    assert refused(complete, **order, MultipartUpload=whole) == "NoSuchUpload"


def test_corrupt_flips_one_bit(cloud: Cloud) -> None:
    """The size stays, the content does not; what is not there cannot be corrupted."""
    store = cloud.open()
    store.put("key", b"content")
    cloud.order("corrupt", object=f"{cloud.prefix}/key")
    spoilt = store.get("key")
    assert sum((a ^ b).bit_count() for a, b in zip(spoilt, b"content", strict=True)) == 1


def test_an_outage_ends(cloud: Cloud) -> None:
    """503 while it lasts; ``clear`` ends it, and the record of requests with it."""
    cloud.order("outage", seconds=60)
    assert requests.get(f"{cloud.server.url}/{BUCKET}/key", timeout=10).status_code == 503
    assert cloud.requests() == [("GET", f"/{BUCKET}/key")]
    cloud.order("clear")
    assert cloud.requests() == []
    cloud.open().check()
