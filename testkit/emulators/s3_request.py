# SPDX-License-Identifier: Apache-2.0
"""Checks of the strict S3 on every request: signature, time, payload hash and checksums.

Written from the documentation of the protocol, without code of the daemon: shared code would share mistakes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, unquote

import google_crc32c

from testkit.emulators.store_control import Call

SKEW_MAX_S = 900.0
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, ?"
    r"SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})"
)


class S3Error(Exception):
    """A request that the store refuses."""

    def __init__(self, status: int, code: str, message: str = "", **headers: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.message = message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


# ---------------------------------------------------------------- checksums


def _four(value: int) -> bytes:
    return value.to_bytes(4, "big")


ALGORITHMS: Mapping[str, Callable[[bytes], bytes]] = {
    "CRC32": lambda data: _four(zlib.crc32(data)),
    "CRC32C": lambda data: _four(google_crc32c.value(data)),
    "SHA1": lambda data: hashlib.sha1(data).digest(),
    "SHA256": lambda data: hashlib.sha256(data).digest(),
}


@dataclass(frozen=True)
class Checksum:
    algorithm: str
    value: str
    """Base64."""

    @property
    def header(self) -> str:
        return f"x-amz-checksum-{self.algorithm.lower()}"


def base64_of(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def checksum_of(algorithm: str, data: bytes) -> Checksum:
    return Checksum(algorithm, base64_of(ALGORITHMS[algorithm](data)))


def named_checksum(headers: Mapping[str, str]) -> Checksum | None:
    """The checksum in the headers, not verified yet."""
    found = []
    for name, value in headers.items():
        algorithm = name.removeprefix("x-amz-checksum-").upper()
        if name == f"x-amz-checksum-{algorithm.lower()}" and algorithm not in (
            "ALGORITHM",
            "TYPE",
            "MODE",
        ):
            if algorithm not in ALGORITHMS:
                raise S3Error(501, "NotImplemented", name)
            found.append(Checksum(algorithm, value))
    if len(found) > 1:
        raise S3Error(400, "InvalidRequest", "more than one checksum")
    return found[0] if found else None


# ---------------------------------------------------------------- payload


@dataclass(frozen=True)
class Payload:
    data: bytes
    checksum: Checksum | None
    """The verified checksum of the request."""


def payload_of(call: Call) -> Payload:
    """The content; verify every checksum of the request."""
    declared = call.headers.get("x-amz-content-sha256")
    if declared is None:
        raise S3Error(400, "InvalidRequest", "x-amz-content-sha256 is missing")
    data = call.body
    if declared.startswith("STREAMING-"):
        raise S3Error(501, "NotImplemented", declared)
    if declared != "UNSIGNED-PAYLOAD" and declared != hashlib.sha256(data).hexdigest():
        raise S3Error(400, "XAmzContentSHA256Mismatch")
    md5 = call.headers.get("content-md5")
    if md5 is not None and md5 != base64_of(hashlib.md5(data).digest()):
        raise S3Error(400, "BadDigest" if len(md5) == 24 else "InvalidDigest")
    is_delete = call.method == "POST" and call.parameter("delete") is not None
    if call.method != "PUT" and not is_delete:
        return Payload(data, None)
    stated = named_checksum(call.headers)
    if stated is not None:
        if len(base64.b64decode(stated.value)) != len(ALGORITHMS[stated.algorithm](b"")):
            raise S3Error(400, "InvalidRequest", f"{stated.header} is not such a checksum")
        if stated != checksum_of(stated.algorithm, data):
            raise S3Error(400, "BadDigest", stated.header)
    return Payload(data, stated)


# ---------------------------------------------------------------- signature


@dataclass
class S3Account:
    """Valid access keys, and the clock of the store."""

    access_key: str = "test"
    secret_key: str = "test"
    session_token: str = ""
    is_expired: bool = False
    clock_ahead_s: float = 0.0
    former: frozenset[str] = frozenset()
    """Expired access keys."""

    def verify(self, call: Call) -> str:
        """The region in the signature; raises S3Error."""
        text = call.headers.get("authorization")
        if text is None:
            raise S3Error(403, "AccessDenied", "the request is not signed")
        match = _AUTHORIZATION.fullmatch(text)
        if match is None:
            raise S3Error(400, "AuthorizationHeaderMalformed", text[:40])
        access_key, day, region, signed, signature = match.groups()
        if access_key in self.former:
            raise S3Error(400, "ExpiredToken")
        if access_key != self.access_key:
            raise S3Error(403, "InvalidAccessKeyId")
        token = call.headers.get("x-amz-security-token", "")
        if token != self.session_token:
            raise S3Error(*((400, "InvalidToken") if token else (403, "InvalidAccessKeyId")))
        if self.is_expired:
            raise S3Error(400, "ExpiredToken")
        self._verify_time(call, day)
        names = signed.split(";")
        must = {"host", *(name for name in call.headers if name.startswith("x-amz-"))}
        if names != sorted(names) or not must <= set(names):
            raise S3Error(403, "AccessDenied", f"not signed: {sorted(must - set(names))}")
        if signature != self._signature(call, day, region, names):
            raise S3Error(403, "SignatureDoesNotMatch")
        return region

    def _verify_time(self, call: Call, day: str) -> None:
        stamp = call.headers.get("x-amz-date", "")
        try:
            asked = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        except ValueError:
            raise S3Error(403, "AccessDenied", "no valid x-amz-date") from None
        ahead_s = (datetime.now(UTC) - asked).total_seconds() + self.clock_ahead_s
        if abs(ahead_s) > SKEW_MAX_S:
            raise S3Error(403, "RequestTimeTooSkewed")
        if not stamp.startswith(day):
            raise S3Error(400, "AuthorizationHeaderMalformed", "the scope is of another day")

    def _signature(self, call: Call, day: str, region: str, names: list[str]) -> str:
        pairs = sorted(
            (quote(name, safe="-_.~"), quote(value, safe="-_.~"))
            for name, value in _pairs(call.query)
        )
        canonical = "\n".join(
            [
                call.method,
                quote(unquote(call.path), safe="/-_.~"),
                "&".join(f"{name}={value}" for name, value in pairs),
                *(f"{name}:{' '.join(call.headers.get(name, '').split())}" for name in names),
                "",
                ";".join(names),
                call.headers.get("x-amz-content-sha256", ""),
            ]
        )
        scope = f"{day}/{region}/s3/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        to_sign = f"AWS4-HMAC-SHA256\n{call.headers['x-amz-date']}\n{scope}\n{digest}"
        key = f"AWS4{self.secret_key}".encode()
        for step in (day, region, "s3", "aws4_request"):
            key = hmac.digest(key, step.encode(), "sha256")
        return hmac.digest(key, to_sign.encode(), "sha256").hex()


def _pairs(query: str) -> list[tuple[str, str]]:
    # A plus sign is literal here, not a space.
    return parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
