# SPDX-License-Identifier: Apache-2.0
"""Credentials, address, signed requests and error responses of a bucket of S3.

Imports botocore only when a client is first needed.  botocore finds the address of the bucket, the region
and the credentials.  It sends no request to the store.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import Exists, NotFound, Permanent, StoreError, Transient
from swansong_bucket.stores.base import Body, Sink, bucket_and_prefix, named
from swansong_bucket.stores.clock import CLOCK_HINT, SigningClock, StoreClock
from swansong_bucket.stores.credentials import CredentialCache
from swansong_bucket.stores.http.client import Response, Wire
from swansong_bucket.stores.remote import ENDPOINT, WireLimits, refusal, translated, wire_to
from swansong_bucket.stores.responses import one_line, xml_text
from swansong_bucket.stores.s3.sigv4 import (
    EMPTY_PAYLOAD,
    AwsCredentials,
    encoded_path,
    encoded_query,
    signed_headers,
)

_SAMPLE_KEY = "k"
_HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
"""Bucket names that a certificate's wildcard matches: without dots."""
_REGION_NAME = re.compile(r"[a-z0-9-]{1,40}")
_UNUSED_KEYS = {"aws_access_key_id": "unused", "aws_secret_access_key": "unused"}
"""For presigned URLs that are only parsed, never requested."""

# Codes with status 400 whose cause is this attempt, not the request.
_TRANSIENT_CODES = {
    "RequestTimeout", "IncompleteBody", "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch", "SlowDown", "Throttling", "ThrottlingException", "InternalError",
}  # fmt: skip
# Codes whose cause is the credentials: rotated keys, expired or revoked sessions.  Others may exist by now.
_CREDENTIALS_CODES = {
    "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidAccessKeyId", "InvalidToken",
    "SignatureDoesNotMatch",
}  # fmt: skip
_CLOCK_CODE = "RequestTimeTooSkewed"
_ELSEWHERE_CODES = {
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}  # fmt: skip
CREDENTIALS_HINT = (
    "Give the VM an instance role for the bucket, or credentials in boto3's default chain"
)
_RIGHTS = "Allow s3:ListBucket, GetObject and PutObject on store.url"
_REGION = "Set store.region to the region of the bucket"
_UNSUPPORTED = "This store lacks an operation that Swansong needs: use another store"
_HINTS = {
    "NoSuchBucket": "Create the bucket, or fix store.url",
    _CLOCK_CODE: CLOCK_HINT,
    "AccessDenied": _RIGHTS,
    "403": _RIGHTS,
    **dict.fromkeys(_ELSEWHERE_CODES, _REGION),
    "301": _REGION,
    "307": _REGION,
    "InvalidObjectState": "Run aws s3api restore-object, and remove the rule that archives objects",
}


class Invalid(Permanent):
    """HTTP 400 InvalidRequest: for example, a retention in a bucket without Object Lock."""


class Unsupported(Permanent):
    """The store does not implement this operation."""


@dataclass(frozen=True, slots=True)
class S3Request:
    """A request before it is signed."""

    method: str
    path: str
    """Path of the object below the bucket, with its ``/``; empty for the bucket itself."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    payload: str = EMPTY_PAYLOAD
    """See :func:`swansong_bucket.stores.s3.sigv4.signed_headers`."""
    body: Body | None = None
    sink: Sink | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """Address of the bucket."""

    wire: Wire
    endpoint: str
    base_path: str
    """Path before the ``/`` of the key: the bucket, or empty if the host names the bucket."""
    region: str

    @property
    def is_tls(self) -> bool:
        return self.endpoint.startswith("https:")


class S3Access:
    """Signed requests to one bucket.

    Args:
        config: with a URL ``s3://bucket/prefix``.
        check: sends a request, for the clock of the store.

    Raises:
        ConfigError: the URL has another form.
    """

    def __init__(
        self, config: StoreAccess, limits: WireLimits, check: Callable[[], object]
    ) -> None:
        self._url = config.url or ""
        self.bucket, self.prefix = bucket_and_prefix(self._url)
        self.clock = StoreClock(check)
        self._signing = SigningClock()
        self._config = config
        self._limits = limits
        self._region = config.region
        """Replaced by the region in a redirect."""
        self._credentials = CredentialCache(
            "S3", load=self._load_credentials, fetch=_aws_credentials, has_expired=_has_expired
        )
        self._trusted: str | None = None
        self._route_lock = threading.Lock()
        self._known_route: Route | None = None

    # ------------------------------------------------------------ requests

    def call(
        self,
        operation: str,
        method: str,
        key: str | None,
        parameters: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        payload: str = EMPTY_PAYLOAD,
        body: Body | None = None,
        sink: Sink | None = None,
    ) -> Response:
        """Send one signed request for an object, or with key None for the bucket; returns a success.

        Args:
            operation: name in the documentation of S3, as in its permissions.

        Raises:
            StoreError: the store refused the request; also when it redirects to another address.
        """
        path = "" if key is None else f"/{self.prefix}{key}"
        what = operation if key is None else f"{operation} {key}"
        request = S3Request(method, path, parameters or {}, headers or {}, payload, body, sink)
        with named(f"{what} in {self._url}"):
            response = self._exchange(request)
        self.clock.observe(response.headers.get("date", ""))
        return response

    def _exchange(self, request: S3Request) -> Response:
        route, credentials = self.route(), self._credentials.get()
        method = request.method
        response = self._signing.answered(partial(_sent, route, credentials, request))
        if 200 <= response.status < 300:
            self._credentials.accept(credentials)
            return response
        code = xml_text(response.body, "Code") or str(response.status)
        region = response.headers.get("x-amz-bucket-region", route.region)
        is_elsewhere = 300 <= response.status < 400 or code in _ELSEWHERE_CODES
        if is_elsewhere or (method == "HEAD" and response.status == 400 and region != route.region):
            raise self._moved(response, code, route, credentials)
        is_of_credentials = self._expect_no_others(response, code, credentials, method)
        if is_of_credentials:
            raise Permanent(_message(response, code), hint=CREDENTIALS_HINT)
        raise _refusal(response, code)

    def renew_credentials(self) -> None:
        """Renew credentials that expire soon; raises Permanent if there are none."""
        self._credentials.renew()

    def route(self) -> Route:
        """Address of the bucket; found on the first call."""
        with self._route_lock:
            if self._known_route is None:
                self._known_route = self._found_route()
            return self._known_route

    def _moved(
        self, response: Response, code: str, route: Route, credentials: AwsCredentials
    ) -> StoreError:
        """The error for a bucket in another region; takes the region from the response, never an address."""
        region = response.headers.get("x-amz-bucket-region") or xml_text(response.body, "Region")
        if not region:
            # HeadBucket needs no right: its refusal contains the region, too.
            head = _sent(route, credentials, S3Request("HEAD", ""), self._signing.now())
            region = head.headers.get("x-amz-bucket-region", "")
        message = f"{one_line(code, 80)}: the bucket is not in {route.region}"
        if region == route.region or not _REGION_NAME.fullmatch(region):
            return Permanent(message, hint=_REGION)
        with self._route_lock:
            if self._known_route is route:
                self._known_route = None
                route.wire.close()
                self._region = region
        return Transient(f"{message} but in {region}")

    def _expect_no_others(
        self, response: Response, code: str, used: AwsCredentials, method: str
    ) -> bool:
        """Whether the credentials ``used`` are the cause of an error response.

        The response to a HEAD has no body, so no code.  The cause of a 403 is a missing right or a revoked
        session, so other credentials are looked for.

        Raises:
            Transient: there are other credentials now.
        """
        is_certain = (
            code in _CREDENTIALS_CODES
            or response.status == 401
            or (method == "HEAD" and response.status == 400)
        )
        is_possible = response.status == 403 and code != _CLOCK_CODE
        if (is_certain or is_possible) and self._credentials.replace(used, is_certain=is_certain):
            raise Transient(f"{_message(response, code)}; other credentials were found")
        return is_certain

    def _found_route(self) -> Route:
        with errors_of(
            "find the address of the bucket", "Check table [store] of the configuration"
        ):
            endpoint, base_path, region = self._address()
        wire = wire_to(endpoint, self._config, self._limits, self._trusted)
        return Route(wire, endpoint, base_path, region)

    # ------------------------------------------------------------ botocore

    def _address(self) -> tuple[str, str, str]:
        """Endpoint of the bucket, path before the ``/`` of the key, and region."""
        import botocore.session  # noqa: PLC0415 - slow to import
        from botocore.config import Config  # noqa: PLC0415

        session = botocore.session.Session(profile=self._config.profile)
        self._trusted = session.get_config_variable("ca_bundle")
        given, region, style = self._config.endpoint, self._region, self._addressing_style()
        if given and ENDPOINT.fullmatch(given) and region and style == "path":
            return given, f"/{self.bucket}", region  # a client of botocore reads 2 MB of models
        addressing: Any = {"addressing_style": style}
        client = session.create_client(
            "s3",
            region_name=region,
            endpoint_url=given,
            config=Config(signature_version="s3v4", s3=addressing),
            **_UNUSED_KEYS,
        )
        url = client.generate_presigned_url(
            "put_object", Params={"Bucket": self.bucket, "Key": _SAMPLE_KEY}
        )
        parts = urlsplit(url)
        found_region = parse_qs(parts.query)["X-Amz-Credential"][0].split("/")[2]
        base_path = parts.path.removesuffix(f"/{_SAMPLE_KEY}")
        return f"{parts.scheme}://{parts.netloc}", base_path, found_region

    def _addressing_style(self) -> str:
        if self._config.addressing != "auto":
            return self._config.addressing
        if self._config.endpoint:
            return "path"
        # Given no style, botocore names the global host in addresses, which redirects new buckets.
        return "virtual" if _HOST_NAME.fullmatch(self.bucket) else "auto"

    def _load_credentials(self) -> Any:
        """botocore's credentials, from the first source that has some."""
        import botocore.session  # noqa: PLC0415

        with errors_of("credentials for S3", CREDENTIALS_HINT):
            # A new session: an old one caches files and assumed roles.
            session = botocore.session.Session(profile=self._config.profile)
            found = session.get_component("credential_provider").load_credentials()
        if found is None:
            raise Permanent("no credentials for S3", hint=CREDENTIALS_HINT)
        return found


def _sent(
    route: Route, credentials: AwsCredentials, request: S3Request, signed: datetime
) -> Response:
    """Sign a request with this time, and send it, once."""
    path = (route.base_path + encoded_path(request.path)) or "/"
    query = encoded_query(request.parameters)
    headers = signed_headers(
        request.method,
        route.wire.host,
        path,
        query,
        request.headers,
        payload=request.payload,
        credentials=credentials,
        region=route.region,
        now=signed,
    )
    return route.wire.request(
        request.method,
        f"{path}?{query}" if query else path,
        headers,
        body=request.body,
        sink=request.sink,
    )


def _aws_credentials(found: Any) -> AwsCredentials:
    """The keys of botocore's credentials, which renew themselves in their last 15 minutes."""
    with errors_of("credentials for S3", CREDENTIALS_HINT):
        frozen = found.get_frozen_credentials()
        credentials = AwsCredentials(frozen.access_key, frozen.secret_key, frozen.token)
        if not all(isinstance(word, str) for word in (*frozen[:2], frozen.token or "")):
            raise TypeError("a field is not text")
        return credentials


def _has_expired(found: Any) -> bool:
    refresh_needed = getattr(found, "refresh_needed", None)
    return refresh_needed is not None and bool(refresh_needed(refresh_in=0))


# ---------------------------------------------------------------- errors


def _message(response: Response, code: str) -> str:
    status = str(response.status)
    head = status if code == status else f"{status} {one_line(code, 80)}"
    return ": ".join(filter(None, (head, one_line(xml_text(response.body, "Message"), 200))))


def _refusal(response: Response, code: str) -> StoreError:
    """The error of the contract for a response with an error status."""
    message, hint = _message(response, code), _HINTS.get(code, "")
    if code in ("NoSuchBucket", "NoSuchKey"):
        return NotFound(message, hint=hint)
    if code == "PreconditionFailed":
        return Exists(message)
    if code == "InvalidRequest" and response.status == 400:
        return Invalid(message, hint=hint)
    if response.status in (405, 501):
        return Unsupported(message, hint=_UNSUPPORTED)
    return refusal(response, message, hint, is_transient=code in _TRANSIENT_CODES)


def errors_of(what: str, hint: str) -> AbstractContextManager[None]:
    """Turn errors of botocore and its plug-ins into errors of the contract."""
    return translated(what, partial(_classified, hint=hint))


def _classified(error: Exception, message: str, hint: str) -> StoreError:
    """The error of the contract for one of botocore's, urllib3's or the system's, by its type."""
    from botocore import exceptions as of  # noqa: PLC0415
    from botocore.parsers import ResponseParserError  # noqa: PLC0415
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    network = (
        of.HTTPClientError, of.ConnectionError, of.IncompleteReadError, ResponseParserError,
        of.MetadataRetrievalError, HTTPError, OSError,
    )  # fmt: skip
    if isinstance(error, network):
        return Transient(message)
    if isinstance(error, of.ProfileNotFound):
        return Permanent(message, hint="Fix store.profile")
    return Permanent(message, hint=hint)
