# SPDX-License-Identifier: Apache-2.0
"""Signature version 4 of requests to S3.

botocore's implementation takes several times as long, and holds the interpreter's lock: it would limit the
throughput of many small shards.  Tests compare both implementations over random requests.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from urllib.parse import quote

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
EMPTY_PAYLOAD = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class AwsCredentials:
    """Keys that sign requests."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(repr=False)


def encoded_path(path: str) -> str:
    """A path as S3 signs it: percent-encoded, except for unreserved bytes and ``/``."""
    return quote(path, safe="/-_.~")


def encoded_query(parameters: Mapping[str, str]) -> str:
    """A query as S3 signs it: percent-encoded, sorted by name."""
    pairs = [
        (quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in parameters.items()
    ]
    return "&".join(f"{name}={value}" for name, value in sorted(pairs))


def signed_headers(
    method: str,
    host: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    *,
    payload: str,
    credentials: AwsCredentials,
    region: str,
    now: datetime,
) -> dict[str, str]:
    """``headers``, and the headers that authorise the request.

    Args:
        path: from :func:`encoded_path`.
        query: from :func:`encoded_query`.
        headers: names in lower case; all of them are signed.
        payload: SHA-256 of the body in hex, or one of the constants above.
        now: in UTC.
    """
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    signed = {**headers, "x-amz-content-sha256": payload, "x-amz-date": stamp}
    if credentials.token:
        signed["x-amz-security-token"] = credentials.token
    canonical = sorted({**signed, "host": host}.items())
    names = ";".join(name for name, _ in canonical)
    lines = "".join(f"{name}:{' '.join(value.split())}\n" for name, value in canonical)
    request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{payload}"
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    key = _day_key(credentials.secret_key, stamp[:8], region)
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}"
    )
    return signed


@lru_cache(maxsize=8)
def _day_key(secret_key: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret_key}".encode()
    for word in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, word.encode(), "sha256")
    return key
