# SPDX-License-Identifier: Apache-2.0
"""What the answers of Google's XML interface say."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from xml.etree import ElementTree as ET

from swansongd.errors import Transient
from swansongd.stores.checksums import crc32c_from_base64
from swansongd.stores.http1 import xml_text
from swansongd.stores.wire import Answer


def parsed(what: str, answer: Answer, wanted: str) -> ET.Element:
    """The answer's document.  An error may come under status 200, when it came up late."""
    try:
        root = ET.fromstring(answer.body)  # noqa: S314 - the configured store's own words
    except ET.ParseError as error:
        raise Transient(f"{what}: an answer that is no XML: {error}") from error
    if root.tag.rpartition("}")[2] != wanted:
        raise Transient(f"{what}: an error under status 200: {xml_text(answer.body, 'Code')}")
    return root


def quoted(etag: str) -> str:
    """One form for headers and documents: ETags of both are compared, and sent back."""
    return '"' + etag.strip('"') + '"'


def goes_on(page: ET.Element) -> bool:
    """Whether the listing has more pages."""
    return page.findtext("{*}IsTruncated") == "true"


def number_of(element: ET.Element, tag: str) -> int:
    """The number in the element of this name; 0 where there is none."""
    text = element.findtext(f"{{*}}{tag}") or ""
    return int(text) if text.isdecimal() else 0


def age_of_s(begun: str, now: datetime) -> float:
    """Since ``begun``; nothing where that is no time, for what is young is left alone."""
    try:
        return max(0.0, (now - datetime.fromisoformat(begun)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def told_crc32c(hashes: str) -> int | None:
    """The CRC32C among what ``x-goog-hash`` says; None where there is none."""
    for item in hashes.split(","):
        kind, _, value = item.strip().partition("=")
        if kind == "crc32c":
            with suppress(ValueError):
                return crc32c_from_base64(value)
    return None


def date_of(answer: Answer) -> datetime:
    """The store's own time."""
    try:
        return parsedate_to_datetime(answer.headers["date"])
    except (KeyError, ValueError):
        return datetime.now(UTC)
