# SPDX-License-Identifier: Apache-2.0
"""How to get at a bucket of S3: credentials, address, signed requests, and what its refusals mean.

The only module of the stores that imports boto3, when a client is first needed: botocore finds the
address of the bucket, the region and the credentials.  It sends nothing to the store itself.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from urllib3.exceptions import HTTPError

from swansongd.errors import Exists, NotFound, Permanent, StoreError, Transient
from swansongd.stores.answers import one_line, xml_text
from swansongd.stores.base import Body, Sink, is_certificate_problem, named
from swansongd.stores.credentials import Credentials
from swansongd.stores.http.client import Answer, Wire
from swansongd.stores.s3.sigv4 import (
    EMPTY_PAYLOAD,
    Identity,
    encoded_path,
    encoded_query,
    signed_headers,
)
from swansongd.util.http1 import retry_after_s

Addressing = Literal["auto", "path", "virtual"]

_SAMPLE_KEY = "k"
_HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
"""A bucket that can stand before a certificate's wildcard: without dots."""
_REGION_NAME = re.compile(r"[a-z0-9-]{1,40}")
_ERROR = re.compile(rb"\s*(?:<\?[^>]{0,100}\?>\s*)?<Error[\s>]")
_STALL_S = 3.0
_NOBODY = {"aws_access_key_id": "nobody", "aws_secret_access_key": "nobody"}
"""Signs nothing that is sent."""

# Refusals with a status of 400 that are about this one attempt, not about what was asked.
_TRANSIENT_CODES = {
    "RequestTimeout", "IncompleteBody", "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch", "SlowDown", "Throttling", "ThrottlingException", "InternalError",
}  # fmt: skip
# Refusals that are about who asks.  Rotated keys, ended and revoked sessions: others may be there by now.
_CREDENTIALS_CODES = {
    "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidAccessKeyId", "InvalidToken",
    "SignatureDoesNotMatch",
}  # fmt: skip
_CLOCK_CODE = "RequestTimeTooSkewed"
# Refusals of a body with a trailer that are about something else: credentials, time, or bytes that
# changed on their way, which only a store that reads the trailer can detect.
_NOT_OF_THE_TRAILER = (_TRANSIENT_CODES | _CREDENTIALS_CODES | {_CLOCK_CODE}) - {
    "IncompleteBody", "InvalidDigest", "XAmzContentSHA256Mismatch", "SignatureDoesNotMatch",
}  # fmt: skip
_ELSEWHERE_CODES = {
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}  # fmt: skip
CREDENTIALS_HINT = (
    "Give the VM an instance role for the bucket, or put credentials where boto3 looks for them"
)
_RIGHTS = "Allow s3:ListBucket, GetObject, PutObject and AbortMultipartUpload on store.url"
_REGION = "Set store.region to the region of the bucket"
_UNSUPPORTED = "This store lacks an operation that Swansong needs: use another store"
TRAILER_HINT = 'Set store.checksums = "header"'
_HINTS = {
    "NoSuchBucket": "Make the bucket, or fix store.url",
    _CLOCK_CODE: "The clock of this VM is wrong: fix time synchronisation",
    "AccessDenied": _RIGHTS,
    "403": _RIGHTS,
    **dict.fromkeys(_ELSEWHERE_CODES, _REGION),
    "301": _REGION,
    "307": _REGION,
}


class TrailerRefused(Permanent):
    """The store refused a body with its checksum behind it; before it, the checksum may be accepted."""


class Unsupported(Permanent):
    """The store does not have this operation."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where the objects of the bucket are, for the wire."""

    wire: Wire
    endpoint: str
    base_path: str
    """Before the ``/`` of the key: the bucket, or nothing where the host names it."""
    region: str

    @property
    def is_tls(self) -> bool:
        return self.endpoint.startswith("https:")


class S3Access:
    """One bucket, by one identity.

    Args:
        bucket: its name.
        endpoint: of an S3-compatible store or a VPC endpoint.
        region: of the bucket; without it boto3's own configuration and the store's redirect decide.
        connections: how many threads will call at once.
        profile: of the AWS configuration files; without it the default chain decides.
        ca_bundle: certificates to trust; without it AWS_CA_BUNDLE, or the system's.
        addressing: where the bucket is named; ``auto`` is ``path`` with an endpoint, else AWS's own way.
        connect_timeout_s: limit of making a connection.
        read_timeout_s: limit of one wait for an answer.
    """

    def __init__(
        self,
        bucket: str,
        *,
        endpoint: str | None,
        region: str | None,
        connections: int,
        profile: str | None,
        ca_bundle: str | None,
        addressing: Addressing,
        connect_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        self._bucket = bucket
        self._endpoint = endpoint
        self._region = region
        self._connections = connections
        self._profile = profile
        self._ca_bundle = ca_bundle
        if addressing == "auto":
            # Given no style, botocore names the global host in addresses, which redirects new buckets.
            is_host_name = _HOST_NAME.fullmatch(bucket) is not None
            addressing = "path" if endpoint else "virtual" if is_host_name else "auto"
        self._addressing = addressing
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._lock = threading.Lock()
        self._made_client: Any = None
        self._credentials = Credentials(
            "S3", load=self._load_credentials, fetch=_identity_of, is_over=_has_expired
        )
        self._trusted = ca_bundle
        self._route_lock = threading.Lock()
        self._known_route: Route | None = None

    # ------------------------------------------------------------ requests

    def exchange(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str],
        headers: Mapping[str, str],
        *,
        payload: str,
        body: Body | None = None,
        trailer: str | None = None,
        sink: Sink | None = None,
    ) -> Answer:
        """One signed request; the answer is a success.  A redirect to another address is an error.

        Args:
            path: of the object below the bucket, with its ``/``, or empty for the bucket itself.
            payload: see :func:`swansongd.stores.s3.sigv4.signed_headers`.
        """
        route, identity = self.route(), self._credentials.get()
        answer = self._sent(
            route,
            identity,
            method,
            path,
            parameters=parameters,
            headers=headers,
            payload=payload,
            body=body,
            trailer=trailer,
            sink=sink,
        )
        if 200 <= answer.status < 300:
            self._credentials.accept(identity)
            return answer
        code = xml_text(answer.body, "Code") or str(answer.status)
        region = answer.headers.get("x-amz-bucket-region", route.region)
        is_elsewhere = 300 <= answer.status < 400 or code in _ELSEWHERE_CODES
        if is_elsewhere or (method == "HEAD" and answer.status == 400 and region != route.region):
            raise self._moved(answer, code, route, identity)
        is_of_credentials = self._expect_no_others(answer, code, identity, method)
        if trailer is not None and _may_be_of_the_trailer(answer.status, code):
            raise TrailerRefused(_message(answer, code), hint=TRAILER_HINT)
        if is_of_credentials:
            raise Permanent(_message(answer, code), hint=CREDENTIALS_HINT)
        raise _refusal(answer, code)

    def expect_no_error(self, answer: Answer) -> None:
        """Raises the error that came under a status of success, as it may when it came up late."""
        if _ERROR.match(answer.body):
            raise _refusal(answer, xml_text(answer.body, "Code"))

    def renew_credentials(self) -> None:
        """Have credentials that last for a while; raises Permanent where there are none."""
        self._credentials.renew()

    def route(self) -> Route:
        """Where to send; asks nobody once it is known."""
        with self._route_lock:
            if self._known_route is None:
                self._known_route = self._found_route()
            return self._known_route

    def _sent(
        self,
        route: Route,
        identity: Identity,
        method: str,
        path: str,
        *,
        parameters: Mapping[str, str],
        headers: Mapping[str, str],
        payload: str = EMPTY_PAYLOAD,
        body: Body | None = None,
        trailer: str | None = None,
        sink: Sink | None = None,
    ) -> Answer:
        encoded = (route.base_path + encoded_path(path)) or "/"
        query = encoded_query(parameters)
        signed = signed_headers(
            method,
            route.wire.host,
            encoded,
            query,
            headers,
            payload=payload,
            identity=identity,
            region=route.region,
            now=datetime.now(UTC),
        )
        target = f"{encoded}?{query}" if query else encoded
        return route.wire.request(method, target, signed, body=body, trailer=trailer, sink=sink)

    def _moved(self, answer: Answer, code: str, route: Route, identity: Identity) -> StoreError:
        """The bucket is in another region: its name is taken from the answer, and never an address."""
        region = answer.headers.get("x-amz-bucket-region") or xml_text(answer.body, "Region")
        if not region:
            # A refusal contains the region too: HeadBucket needs no right of its own.
            head = self._sent(route, identity, "HEAD", "", parameters={}, headers={})
            region = head.headers.get("x-amz-bucket-region", "")
        message = f"{one_line(code, 80)}: the bucket is not in {route.region}"
        if region == route.region or not _REGION_NAME.fullmatch(region):
            return Permanent(message, hint=_REGION)
        with self._route_lock:
            if self._known_route is route:
                self._known_route = None
                route.wire.close()
                with self._lock:
                    self._region, self._made_client = region, None
        return Transient(f"{message} but in {region}")

    def _expect_no_others(self, answer: Answer, code: str, used: Identity, method: str) -> bool:
        """Whether a refusal is about ``used``; Transient is raised when there are other credentials now.

        A HEAD has no body that could name a code.  A refusal with 403 may be about a right that is
        lacking, or about a session that was revoked: other credentials are looked for, too.
        """
        is_certain = (
            code in _CREDENTIALS_CODES
            or answer.status == 401
            or (method == "HEAD" and answer.status == 400)
        )
        is_possible = answer.status == 403 and code != _CLOCK_CODE
        if (is_certain or is_possible) and self._credentials.replace(used, is_certain=is_certain):
            raise Transient(f"{_message(answer, code)}; other credentials were found")
        return is_certain

    def _found_route(self) -> Route:
        with _errors_of("the address of the bucket", "Check table [store] of the configuration"):
            url = self._client().generate_presigned_url(
                "put_object", Params={"Bucket": self._bucket, "Key": _SAMPLE_KEY}
            )
        parts = urlsplit(url)
        endpoint = f"{parts.scheme}://{parts.netloc}"
        wire = Wire(
            endpoint,
            connections=self._connections,
            ca_bundle=self._trusted,
            connect_timeout_s=self._connect_timeout_s,
            stall_s=min(_STALL_S, self._read_timeout_s),
            reply_s=self._read_timeout_s,
        )
        region = parse_qs(parts.query)["X-Amz-Credential"][0].split("/")[2]
        return Route(wire, endpoint, parts.path.removesuffix(f"/{_SAMPLE_KEY}"), region)

    # ------------------------------------------------------------ botocore

    def _client(self) -> Any:
        """A client that is asked for addresses only."""
        import boto3  # noqa: PLC0415 - a VM on another cloud need not load it
        import botocore.session  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        with self._lock:
            if self._made_client is None:
                base = botocore.session.Session(profile=self._profile)
                self._trusted = self._ca_bundle or base.get_config_variable("ca_bundle")
                session = boto3.Session(botocore_session=base, region_name=self._region)
                addressing: Any = {"addressing_style": self._addressing}
                self._made_client = session.client(
                    "s3",
                    endpoint_url=self._endpoint,
                    config=Config(signature_version="s3v4", s3=addressing),
                    **_NOBODY,
                )
            return self._made_client

    def _load_credentials(self) -> Any:
        """botocore's credentials, from the first source that has some."""
        import botocore.session  # noqa: PLC0415

        with _errors_of("credentials for S3", CREDENTIALS_HINT):
            # A new session: an old one keeps the files that it has read, and the roles it has assumed.
            session = botocore.session.Session(profile=self._profile)
            found = session.get_component("credential_provider").load_credentials()
        if found is None:
            raise Permanent("no credentials for S3", hint=CREDENTIALS_HINT)
        return found


def _identity_of(found: Any) -> Identity:
    """Who signs; botocore renews what has less than 15 minutes left."""
    with _errors_of("credentials for S3", CREDENTIALS_HINT):
        frozen = found.get_frozen_credentials()
        identity = Identity(frozen.access_key, frozen.secret_key, frozen.token)
        if not all(isinstance(word, str) for word in (*frozen[:2], frozen.token or "")):
            raise TypeError("a field is not text")
        return identity


def _has_expired(found: Any) -> bool:
    refresh_needed = getattr(found, "refresh_needed", None)
    return refresh_needed is not None and bool(refresh_needed(refresh_in=0))


# ---------------------------------------------------------------- errors


def _message(answer: Answer, code: str) -> str:
    status = str(answer.status)
    refusal = status if code == status else f"{status} {one_line(code, 80)}"
    return ": ".join(filter(None, (refusal, one_line(xml_text(answer.body, "Message"), 200))))


def _may_be_of_the_trailer(status: int, code: str) -> bool:
    """Whether a store that reads no trailers refuses a body in this way."""
    is_refusal = 400 <= status < 500 or status == 501
    return (
        is_refusal
        and status not in (401, 404, 408, 409, 412, 429)
        and code not in _NOT_OF_THE_TRAILER
    )


def _refusal(answer: Answer, code: str) -> StoreError:
    """The error of the contract for an answer that was no success."""
    status = answer.status
    message, hint = _message(answer, code), _HINTS.get(code, "")
    if status == 404 or code in ("NoSuchBucket", "NoSuchKey", "NoSuchUpload"):
        return NotFound(message, hint=hint)
    if status == 412 or code == "PreconditionFailed":
        return Exists(message)
    if status in (405, 501):
        return Unsupported(message, hint=_UNSUPPORTED)
    if code in _TRANSIENT_CODES or status in (408, 409, 429) or status >= 500:
        return Transient(message, hint=hint, retry_after_s=retry_after_s(answer.headers))
    return Permanent(message, hint=hint)


@contextmanager
def _errors_of(what: str, hint: str) -> Iterator[None]:
    """Turns what botocore and its plug-ins raise into an error of the contract."""
    try:
        with named(what):
            yield
    except StoreError:
        raise
    except Exception as error:  # botocore does not check what a credential_process prints
        raise _classified(error, what, hint) from error


def _classified(error: Exception, what: str, hint: str) -> StoreError:
    """The error of the contract for one of botocore's, urllib3's or the system's, by its type."""
    from botocore import exceptions as of  # noqa: PLC0415
    from botocore.parsers import ResponseParserError  # noqa: PLC0415

    message = f"{what}: {error!s:.300}"
    if is_certificate_problem(error):
        return Permanent(message, hint="The store's certificate is not trusted on this VM")
    network = (
        of.HTTPClientError, of.ConnectionError, of.IncompleteReadError, ResponseParserError,
        of.MetadataRetrievalError, HTTPError, OSError,
    )  # fmt: skip
    if isinstance(error, network):
        return Transient(message)
    if isinstance(error, of.ProfileNotFound):
        return Permanent(message, hint="Fix store.profile")
    return Permanent(message, hint=hint)
