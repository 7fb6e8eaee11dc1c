# SPDX-License-Identifier: Apache-2.0
"""The form that all records of the bucket share: canonical JSON with a format, a version and its own digest.

docs/format.md describes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from swansong import bounds
from swansong.bounds import BoundsError

from swansong_bucket.errors import CorruptError
from swansong_bucket.model import CommitRef
from swansong_bucket.util.forms import Form, whole

VERSION = 1
REF = Form(
    CommitRef, generation=whole(0, bounds.GENERATION_MAX), step=whole(0, bounds.STEP_MAX)
).kind
"""A commit that a record names."""

R = TypeVar("R")


def encode(format_name: str, body: Mapping[str, object]) -> bytes:
    """The bytes of a record with these fields.

    Raises:
        BoundsError: a number is not finite, or JSON has no such value.
    """
    try:
        return _digested({"format": format_name, "version": VERSION, **body})[1]
    except (ValueError, TypeError, RecursionError) as error:
        raise BoundsError(f"the record cannot be written as JSON: {error!s:.120}") from None


def decode(
    data: bytes, format_name: str, bytes_max: int, *, values_max: int | None = None
) -> dict[str, Any]:
    """The fields of a record, without its digest.

    Args:
        bytes_max: limit of the bytes.
        values_max: limit of the JSON values, where it differs from that of small records.

    Raises:
        CorruptError: the bytes are not those of :func:`encode` for this format.
    """
    what = f"the {format_name.removeprefix('swansong-')}"
    limits = {} if values_max is None else {"max_values": values_max}
    try:
        body = bounds.json_object(data, what, bytes_max, **limits)
        if body.get("format") != format_name:
            raise CorruptError(f"the object is not a {format_name.removeprefix('swansong-')}")
        version = bounds.integer(body.get("version"), f"version of {what}", 1, 10**6)
    except BoundsError as error:
        raise CorruptError(str(error)) from None
    if version != VERSION:
        raise CorruptError(
            f"{what} has format version {version}; this swansong knows {VERSION}",
            hint="upgrade swansong to read it",
        )
    claimed = body.pop("digest", None)
    try:
        is_intact = (claimed, data) == _digested(body)
    except (ValueError, RecursionError):
        is_intact = False
    if not is_intact:
        raise CorruptError(f"{what} does not match its own digest")
    return body


def read(data: bytes, format_name: str, bytes_max: int, form: Form[R]) -> R:
    """Parse and check the bytes of a small record.

    Raises:
        CorruptError: a field is missing or out of bounds, or as :func:`decode`.
    """
    body = decode(data, format_name, bytes_max)
    try:
        return form.read(body, f"the {format_name.removeprefix('swansong-')}")
    except BoundsError as error:
        raise CorruptError(str(error)) from None


def _digested(body: Mapping[str, object]) -> tuple[str, bytes]:
    """The digest of a body, and the canonical JSON of body and digest.

    The body is encoded only once, in two pieces with the digest between them: it may have 20,000 shards.
    """
    before = _canonical({key: value for key, value in body.items() if key < "digest"})[1:-1]
    after = _canonical({key: value for key, value in body.items() if key > "digest"})[1:-1]
    bare = b",".join(filter(None, (before, after)))
    digest = f"sha256:{hashlib.sha256(b'{%b}' % bare).hexdigest()}"
    field = _canonical({"digest": digest})[1:-1]
    return digest, b"{%b}" % b",".join(filter(None, (before, field, after)))


def _canonical(body: Mapping[str, object]) -> bytes:
    """Sorted keys, no white space, ASCII; raises ValueError for a number that is not finite."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
