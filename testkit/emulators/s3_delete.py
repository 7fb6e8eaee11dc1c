# SPDX-License-Identifier: Apache-2.0
"""The documents of a multi-object delete of S3: AmazonS3/latest/API/API_DeleteObjects.html."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from xml.etree import ElementTree as ET

from testkit.emulators.s3_request import S3Error
from testkit.emulators.store_control import StoreResponse

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_OBJECTS_MAX = 1000


def deletions(document: bytes) -> tuple[list[tuple[str, str | None]], bool]:
    """The keys with their ETags, and whether the response omits the deleted ones."""
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
    root = ET.Element("DeleteResult", {"xmlns": _NAMESPACE})
    for tag, facts in done:
        item = ET.SubElement(root, tag)
        for name, value in facts.items():
            ET.SubElement(item, name).text = value
    return StoreResponse(200, ET.tostring(root), {"Content-Type": "application/xml"})
