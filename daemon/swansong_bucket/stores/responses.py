# SPDX-License-Identifier: Apache-2.0
"""Parses the responses of S3, GCS and Azure, and requires every field that a response must have.

A proxy, a crash or a foreign server can truncate a response, empty it, or replace it by another page, with
status 200.  Such a response is Transient.  It never means that there is no object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from html import unescape
from typing import Any, NamedTuple
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET

from swansong.bounds import BYTES_MAX, BoundsError, integer, items, json_object, mapping, text

from swansong_bucket.errors import Transient
from swansong_bucket.stores.base import ObjectInfo
from swansong_bucket.stores.http.client import RESPONSE_BYTES_MAX, Response
from swansong_bucket.util.http1 import http_date

PAGE_ITEMS = 1000
"""Requested size of a page, and the largest one of both stores."""
_PAGE_ITEMS_MAX = 10 * PAGE_ITEMS
_ELEMENTS_MAX = 20 * PAGE_ITEMS
_DEPTH_MAX = 16
_PIECE_CHARS = 16 * 2**10
_KEY_CHARS_MAX = 4096
"""Four times the limit of the stores: some count differently."""
_TOKEN_CHARS_MAX = 4096
_ETAG_CHARS_MAX = 256
_DECIMAL = re.compile(r"[0-9]{1,19}")


class ListedPage(NamedTuple):
    """A page of a listing."""

    infos: Sequence[ObjectInfo]
    folders: Sequence[str]
    """With the delimiter ``/``: the names before a slash, without the prefix."""
    token: str | None
    """Requests the next page; None on the last page."""


@contextmanager
def complete(what: str) -> Iterator[None]:
    """Turn a field that is missing or out of bounds into a Transient error of the operation ``what``."""
    try:
        yield
    except BoundsError as error:
        reason = one_line(str(error), 300)
        raise Transient(
            f"{what}: the response is truncated, or not from a store: {reason}"
        ) from error


# ---------------------------------------------------------------- XML


def xml_text(body: bytes, tag: str) -> str:
    """The text of the first ``tag`` in the body of an error response; empty if there is none."""
    match = re.search(rb"<%b>([^<]{0,1000})</%b>" % (tag.encode(), tag.encode()), body)
    return unescape(match[1].decode("utf-8", "replace")) if match else ""


def reason_of(body: bytes) -> str:
    """The message of an error response, in JSON, XML or plain text.

    Further lines of a message of Azure have the id and the time of the request.
    """
    try:
        whole = json_object(body, "the refusal", RESPONSE_BYTES_MAX)
    except BoundsError:
        tags = [xml_text(body, tag) for tag in ("Message", "Details", "title")]
        is_text = not body.lstrip().startswith((b"<", b"{"))
        found = " ".join(filter(None, (tag.strip().partition("\n")[0] for tag in tags)))
        return found or (body.decode("utf-8", "replace") if is_text else "")
    stated = whole.get("error", whole)
    if isinstance(stated, dict):
        stated = stated.get("message")
    return stated if isinstance(stated, str) else ""


def one_line(found: str, max_chars: int) -> str:
    """Text from a store on one printable line, for logs and errors."""
    words = "".join(char if char.isprintable() else " " for char in found[: 2 * max_chars]).split()
    return " ".join(words)[:max_chars]


def document(response: Response, *tags: str) -> ET.Element:
    """The XML document of a response; tags have no namespace.

    Args:
        tags: accepted tags of the root.

    Raises:
        BoundsError: the body is not such a document, or has too many elements.
    """
    parser = ET.XMLParser(target=_Builder())  # noqa: S314 - _Builder refuses entities
    try:
        whole = response.body.decode()
        # In pieces: after a refusal of the builder, the parser still reads the piece to its end.
        for start in range(0, len(whole), _PIECE_CHARS):
            parser.feed(whole[start : start + _PIECE_CHARS])
        root: ET.Element = parser.close()
    except (ET.ParseError, UnicodeDecodeError) as error:
        raise BoundsError(
            f"the {len(response.body)} bytes are not an XML document: {error}"
        ) from None
    if root.tag not in tags:
        # A store reports an error with status 200 if it found the error after it sent the head.
        code = xml_text(response.body, "Code")
        raise BoundsError(f"<{root.tag:.40}> {code:.80} instead of <{tags[0]}>")
    return root


class _Builder(ET.TreeBuilder):
    """Builds small documents; refuses a document type, which could define entities."""

    def __init__(self) -> None:
        super().__init__()
        self._elements = 0
        self._depth = 0

    def doctype(self, name: str, *_: Any) -> None:
        raise BoundsError(f"the XML document declares a document type: {name:.40}")

    def start(self, tag: Any, attrs: dict[Any, Any], /) -> ET.Element:
        self._elements += 1
        self._depth += 1
        if self._elements > _ELEMENTS_MAX or self._depth > _DEPTH_MAX:
            raise BoundsError("the XML document has too many elements")
        return super().start(tag.rpartition("}")[2], attrs)

    def end(self, tag: str, /) -> ET.Element:
        self._depth -= 1
        return super().end(tag.rpartition("}")[2])


def field(element: ET.Element, tag: str, max_chars: int) -> str:
    """The text of the element of this name, which must exist and not be empty."""
    found = text(element.findtext(tag), tag, max_chars)
    if not found:
        raise BoundsError(f"{tag} is empty")
    return found


def _next_token(page: ET.Element, found: int) -> str | None:
    """The token of the next page of S3; None on the last page.

    Args:
        found: number of the keys and folders on this page.
    """
    count = page.findtext("KeyCount")
    if count is not None and decimal(count, "KeyCount", _ELEMENTS_MAX) > found:
        raise BoundsError(f"KeyCount is {count}, and there are {found} keys and folders")
    is_truncated = page.findtext("IsTruncated", "").strip().lower()
    if is_truncated not in ("true", "false"):
        raise BoundsError(f"IsTruncated is {is_truncated!r:.40}, not true or false")
    if is_truncated == "false":
        return None
    return field(page, "NextContinuationToken", _TOKEN_CHARS_MAX)


def decimal(value: Any, name: str, high: int) -> int:
    """Parse an integer in decimal notation."""
    if not _DECIMAL.fullmatch(text(value, name, 20)):
        raise BoundsError(f"{name} is {value!r:.40}, not a number")
    return integer(int(value), name, 0, high)


def objects(response: Response, base: str, prefix: str) -> ListedPage:
    """Parse a page of a listing of S3, version 2.

    Args:
        base: prefix of the store's URL; removed from the keys.
        prefix: requested prefix of the keys, after ``base``.
    """
    page = document(response, "ListBucketResult")
    decoded = unquote_plus if page.findtext("EncodingType") == "url" else str
    now = _stated_date(response)
    found = [
        ObjectInfo(
            _below(decoded(field(item, "Key", 3 * _KEY_CHARS_MAX)), base, prefix),
            decimal(item.findtext("Size"), "Size", BYTES_MAX),
            _object_age_s(item.findtext("LastModified") or "", now),
            _tag(item.findtext("ETag") or ""),
        )
        for item in page.findall("Contents")
    ]
    names = [
        _folder(decoded(field(item, "Prefix", 3 * _KEY_CHARS_MAX)), base, prefix)
        for item in page.findall("CommonPrefixes")
    ]
    return ListedPage(found, names, _next_token(page, len(found) + len(names)))


def blobs(response: Response, base: str, prefix: str) -> ListedPage:
    """Parse a page of a listing of Azure; see :func:`objects`."""
    page = document(response, "EnumerationResults")
    now = _stated_date(response)
    found = [
        ObjectInfo(
            _below(field(item, "Name", _KEY_CHARS_MAX), base, prefix),
            decimal(item.findtext("Properties/Content-Length"), "Content-Length", BYTES_MAX),
            _seconds_between(http_date(item.findtext("Properties/Last-Modified") or ""), now),
            _tag(item.findtext("Properties/Etag") or ""),
        )
        for item in page.findall("Blobs/Blob")
    ]
    names = [
        _folder(field(item, "Name", _KEY_CHARS_MAX), base, prefix)
        for item in page.findall("Blobs/BlobPrefix")
    ]
    return ListedPage(found, names, _next_marker(page))


def _next_marker(page: ET.Element) -> str | None:
    """The token of the next page of Azure; None on the last page, whose element is empty."""
    if page.find("Blobs") is None or page.find("NextMarker") is None:
        raise BoundsError("Blobs or NextMarker is missing")
    return text(page.findtext("NextMarker"), "NextMarker", _TOKEN_CHARS_MAX) or None


def _below(key: str, base: str, prefix: str) -> str:
    if not key.startswith(base + prefix) or len(key) > _KEY_CHARS_MAX:
        raise BoundsError(f"the key {key!r:.80} is not below {base + prefix!r:.80}")
    return key.removeprefix(base)


def _folder(key: str, base: str, prefix: str) -> str:
    """The name of a folder, from a common prefix of keys."""
    name = _below(key, base, prefix).removeprefix(prefix)
    if not name.endswith("/"):
        raise BoundsError(f"the folder {key!r:.80} does not end with a slash")
    return name[:-1]


def _object_age_s(written: str, now: datetime | None) -> float | None:
    """Seconds since ``written``; None if one of the times is unknown."""
    try:
        return _seconds_between(datetime.fromisoformat(written), now)
    except (ValueError, TypeError, OverflowError):
        return None


def _seconds_between(then: datetime | None, now: datetime | None) -> float | None:
    return None if then is None or now is None else max(0.0, (now - then).total_seconds())


def _stated_date(response: Response) -> datetime | None:
    """The store's time of the response."""
    return http_date(response.headers.get("date", ""))


def _tag(etag: str) -> str:
    """The ETag as a tag; empty if the store sends none, or no valid one."""
    bare = etag.strip('"')
    is_valid = len(bare) <= _ETAG_CHARS_MAX and bare.isascii() and bare.isprintable()
    return f'"{bare}"' if bare and is_valid else ""


# ---------------------------------------------------------------- JSON


def json_objects(response: Response, base: str, prefix: str) -> ListedPage:
    """Parse a page of a listing of GCS; see :func:`objects`."""
    body = json_document(response, "the listing", "storage#objects")
    now = _stated_date(response)
    found = []
    for each in items(body.get("items", []), "items", _PAGE_ITEMS_MAX):
        item = mapping(each, "an item", 100)
        key = _below(text(item.get("name"), "name", _KEY_CHARS_MAX), base, prefix)
        found.append(_json_info(item, key, now))
    names = [
        _folder(text(each, "a prefix", _KEY_CHARS_MAX), base, prefix)
        for each in items(body.get("prefixes", []), "prefixes", _PAGE_ITEMS_MAX)
    ]
    return ListedPage(found, names, _token(body))


def _token(body: Mapping[str, Any]) -> str | None:
    """The token of the next page of GCS; None on the last page."""
    if body.get("nextPageToken") is None:
        return None
    token = text(body["nextPageToken"], "nextPageToken", _TOKEN_CHARS_MAX)
    if not token:
        raise BoundsError("nextPageToken is empty")
    return token


def _json_info(item: Mapping[str, Any], key: str, now: datetime | None) -> ObjectInfo:
    generation = item.get("generation", "")
    is_valid = isinstance(generation, str) and _DECIMAL.fullmatch(generation)
    return ObjectInfo(
        key,
        decimal(item.get("size"), "size", BYTES_MAX),
        _object_age_s(str(item.get("timeCreated", "")), now),
        generation if is_valid else "",
    )


def json_metadata(response: Response, base: str, key: str) -> tuple[ObjectInfo, str | None]:
    """An object of GCS, and its CRC32C in base64; None if the store returns no checksum.

    Args:
        base: prefix of the store's URL; removed from the key.
    """
    body = json_document(response, "the metadata", "storage#object")
    if body.get("name") != base + key:
        raise BoundsError(f"name is {body.get('name')!r:.80}, not {base + key!r:.80}")
    info = _json_info(body, key, _stated_date(response))
    return info, str(body.get("crc32c") or "") or None


def json_document(response: Response, what: str, kind: str) -> Mapping[str, Any]:
    """The JSON object of a response of GCS, which is of this kind."""
    body = json_object(response.body, what, RESPONSE_BYTES_MAX)
    if body.get("kind") != kind:
        raise BoundsError(f"kind is {body.get('kind')!r:.40}, not {kind!r}")
    return body


# ---------------------------------------------------------------- headers


def etag_of(headers: Mapping[str, str]) -> str:
    """The ETag by which a store acknowledges a body."""
    found = headers.get("etag", "")
    if not found or len(found) > _ETAG_CHARS_MAX or not found.isprintable():
        raise BoundsError(f"ETag is {found!r:.40}")
    return found


def length_of(headers: Mapping[str, str]) -> int:
    """The length in the response to a HEAD."""
    return decimal(headers.get("content-length"), "Content-Length", BYTES_MAX)


def head_info(response: Response, key: str) -> ObjectInfo:
    """The object of a HEAD."""
    written = http_date(response.headers.get("last-modified", ""))
    return ObjectInfo(
        key,
        length_of(response.headers),
        _seconds_between(written, _stated_date(response)),
        _tag(response.headers.get("etag", "")),
    )


def remaining(response: Response, base: str) -> dict[str, str]:
    """The keys that a multi-object delete did not delete, each with the store's code.

    Args:
        base: prefix of the store's URL; removed from the keys.
    """
    result = document(response, "DeleteResult", "DeleteObjectsResult")
    return {
        _below(field(item, "Key", _KEY_CHARS_MAX), base, ""): one_line(field(item, "Code", 200), 80)
        for item in result.findall("Error")
    }
