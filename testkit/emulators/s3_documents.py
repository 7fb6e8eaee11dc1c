# SPDX-License-Identifier: Apache-2.0
"""XML documents of the strict S3: multi-object deletes, and settings of a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from xml.etree import ElementTree as ET

from testkit.emulators import s3_policy
from testkit.emulators.s3_bucket import S3Bucket
from testkit.emulators.s3_request import S3Error
from testkit.emulators.store_control import StoreResponse

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_OBJECTS_MAX = 1000


def document(
    tag: str,
    facts: Iterable[tuple[str, str]],
    item_tag: str = "",
    items: Sequence[Iterable[tuple[str, str]]] = (),
) -> StoreResponse:
    root = ET.Element(tag, {"xmlns": NAMESPACE})
    for name, value in facts:
        ET.SubElement(root, name).text = value
    for item in items:
        element = ET.SubElement(root, item_tag)
        for name, value in item:
            ET.SubElement(element, name).text = value
    body = b'<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root)
    return StoreResponse(200, body, {"Content-Type": "application/xml"})


def deletions(document: bytes) -> tuple[list[tuple[str, str | None]], bool]:
    """The keys with their ETags, and whether the response omits the deleted ones.

    See AmazonS3/latest/API/API_DeleteObjects.html.
    """
    try:
        root = ET.fromstring(document)
    except ET.ParseError:
        raise S3Error(400, "MalformedXML") from None
    items = root.findall("{*}Object")
    keys = [item.findtext("{*}Key") or "" for item in items]
    if root.tag.rpartition("}")[2] != "Delete" or not all(keys):
        raise S3Error(400, "MalformedXML")
    if not 1 <= len(items) <= _OBJECTS_MAX:
        raise S3Error(400, "MalformedXML", f"{len(items)} objects")
    tags = [item.findtext("{*}ETag") for item in items]
    return list(zip(keys, tags, strict=True)), root.findtext("{*}Quiet") == "true"


def result_of_deletions(done: Iterable[tuple[str, Mapping[str, str]]]) -> StoreResponse:
    """The response; each entry is named Deleted or Error."""
    root = ET.Element("DeleteResult", {"xmlns": NAMESPACE})
    for tag, facts in done:
        item = ET.SubElement(root, tag)
        for name, value in facts.items():
            ET.SubElement(item, name).text = value
    return StoreResponse(200, ET.tostring(root), {"Content-Type": "application/xml"})


def of_setting(method: str, name: str, content: bytes, bucket: S3Bucket) -> StoreResponse:
    """Read or change a setting of a bucket; raises S3Error."""
    match method, name:
        case "GET", "lifecycle":
            return _stored(bucket.lifecycle, "NoSuchLifecycleConfiguration")
        case "PUT", "lifecycle":
            _root(content, "LifecycleConfiguration")
            bucket.lifecycle = content
        case "GET", "policy":
            return _stored(bucket.policy_text, "NoSuchBucketPolicy")
        case "PUT", "policy":
            bucket.policy = s3_policy.parsed(content)
            bucket.policy_text = content
            return StoreResponse(204)
        case "GET", "versioning":
            status = [("Status", bucket.versioning)] if bucket.versioning else []
            return document("VersioningConfiguration", status)
        case "PUT", "versioning":
            root = _root(content, "VersioningConfiguration")
            bucket.set_versioning(root.findtext("{*}Status") or "")
        case "GET", "object-lock":
            if not bucket.has_object_lock:
                raise S3Error(404, "ObjectLockConfigurationNotFoundError")
            return document("ObjectLockConfiguration", [("ObjectLockEnabled", "Enabled")])
        case "PUT", "object-lock":
            root = _root(content, "ObjectLockConfiguration")
            if (
                root.findtext("{*}ObjectLockEnabled") != "Enabled"
                or root.find("{*}Rule") is not None
            ):
                raise S3Error(501, "NotImplemented", "a default retention")
            if bucket.versioning != "Enabled":
                raise S3Error(409, "InvalidBucketState", "Object Lock needs versioning")
            bucket.has_object_lock = True
        case _:
            raise S3Error(405, "MethodNotAllowed")
    return StoreResponse(200)


def _stored(content: bytes, absent: str) -> StoreResponse:
    if not content:
        raise S3Error(404, absent)
    return StoreResponse(200, content, {"Content-Type": "application/xml"})


def _root(content: bytes, tag: str) -> ET.Element:
    try:
        root = ET.fromstring(content)
    except ET.ParseError:
        raise S3Error(400, "MalformedXML") from None
    if root.tag.rpartition("}")[2] != tag:
        raise S3Error(400, "MalformedXML")
    return root
