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
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import Exists, NotFound, Permanent, StoreError, Transient
from swansong_bucket.stores.base import bucket_and_prefix
from swansong_bucket.stores.clock import CLOCK_HINT, SigningClock
from swansong_bucket.stores.http.client import Response, Wire
from swansong_bucket.stores.remote import (
    ENDPOINT,
    RemoteAccess,
    StoreRequest,
    WireLimits,
    code_of,
    translated,
    wire_to,
)
from swansong_bucket.stores.responses import one_line, xml_text
from swansong_bucket.stores.s3.sigv4 import (
    EMPTY_PAYLOAD,
    UNSIGNED_PAYLOAD,
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
_TRANSIENT_CODES = (
    "RequestTimeout", "IncompleteBody", "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch", "SlowDown", "Throttling", "ThrottlingException", "InternalError",
)  # fmt: skip
_CLOCK_CODE = "RequestTimeTooSkewed"
_ELSEWHERE_CODES = {
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}  # fmt: skip
CREDENTIALS_HINT = (
    "Give the VM an instance role for the bucket, or credentials in boto3's default chain"
)
_UNSUPPORTED = "This store lacks an operation that Swansong needs: use another store"


class Invalid(Permanent):
    """HTTP 400 InvalidRequest: for example, a retention in a bucket without Object Lock."""


class Unsupported(Permanent):
    """The store does not implement this operation."""


@dataclass(frozen=True, slots=True)
class Route:
    """Address of the bucket."""

    wire: Wire
    endpoint: str
    base_path: str
    """Path before the ``/`` of the key: the bucket, or empty if the host names the bucket."""
    region: str


class S3Access(RemoteAccess):
    """Signed requests to one bucket.

    Args:
        config: with a URL ``s3://bucket/prefix``.

    Raises:
        ConfigError: the URL has another form.
    """

    _credentials_codes = (
        "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidAccessKeyId", "InvalidToken",
        "SignatureDoesNotMatch",
    )  # fmt: skip
    _credentials_hint = CREDENTIALS_HINT
    _kinds: ClassVar[Mapping[str, type[StoreError]]] = {
        **dict.fromkeys(_TRANSIENT_CODES, Transient),
        "NoSuchBucket": NotFound,
        "NoSuchKey": NotFound,
        "PreconditionFailed": Exists,
        "InvalidRequest": Invalid,
        "405": Unsupported,
        "501": Unsupported,
    }
    _hints: ClassVar[Mapping[str, str]] = {
        "NoSuchBucket": "Create the bucket, or fix store.url",
        _CLOCK_CODE: CLOCK_HINT,
        "403": "Allow s3:ListBucket, GetObject and PutObject on store.url",
        "405": _UNSUPPORTED,
        "501": _UNSUPPORTED,
        "InvalidObjectState": "Run aws s3api restore-object, and remove the rule that archives objects",
    }

    def __init__(
        self, config: StoreAccess, limits: WireLimits, check: Callable[[], object]
    ) -> None:
        super().__init__("S3", config, check)
        self.bucket, self.prefix = bucket_and_prefix(self._url)
        self._signing = SigningClock()
        self._config = config
        self._limits = limits
        self._region = config.region
        """Replaced by the region in a redirect."""
        self._trusted: str | None = None
        self._route_lock = threading.Lock()
        self._known_route: Route | None = None

    # ------------------------------------------------------------ requests

    def _path(self, key: str | None, *, is_data: bool) -> str:  # noqa: ARG002 - for GCS
        return "" if key is None else encoded_path(f"/{self.prefix}{key}")

    def _answered(self, used: AwsCredentials, request: StoreRequest) -> Response:
        """Send a request.

        Raises:
            Transient: the bucket is in another region, to which further requests go.
            Permanent: it is at another address.
        """
        route = self.route()
        response = self._signing.answered(partial(_sent, route, used, request))
        region = response.headers.get("x-amz-bucket-region", route.region)
        is_elsewhere = 300 <= response.status < 400 or (
            response.status >= 400 and code_of(response) in _ELSEWHERE_CODES
        )
        is_head = request.method == "HEAD" and response.status == 400
        if is_elsewhere or (is_head and region != route.region):
            raise self._moved(response, route, used)
        return response

    def _are_refused(
        self, response: Response, code: str, request: StoreRequest, used: Any
    ) -> bool | None:
        """As in the base class.

        The response to a HEAD has no body, so no code.  The cause of a 403 is a missing right or a revoked
        session, so other credentials are looked for.
        """
        if response.status == 400 and request.method == "HEAD":
            return True
        is_doubtful = response.status == 403 and code != _CLOCK_CODE
        return super()._are_refused(response, code, request, used) or (
            None if is_doubtful else False
        )

    def route(self) -> Route:
        """Address of the bucket; found on the first call."""
        with self._route_lock:
            if self._known_route is None:
                self._known_route = self._found_route()
            return self._known_route

    def _moved(self, response: Response, route: Route, used: AwsCredentials) -> StoreError:
        """The error for a bucket in another region; takes the region from the response, never an address."""
        region = response.headers.get("x-amz-bucket-region") or xml_text(response.body, "Region")
        if not region:
            # HeadBucket needs no right: its refusal contains the region, too.
            asked = StoreRequest("HEAD", "", {}, {})
            head = _sent(route, used, asked, self._signing.now())
            region = head.headers.get("x-amz-bucket-region", "")
        what = one_line(code_of(response), 80) or response.status
        message = f"{what}: the bucket is not in {route.region}"
        if region == route.region or not _REGION_NAME.fullmatch(region):
            return Permanent(message, hint="Set store.region to the region of the bucket")
        with self._route_lock:
            if self._known_route is route:
                self._known_route = None
                route.wire.close()
                self._region = region
        return Transient(f"{message} but in {region}")

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

    def _fetch_credentials(self, source: Any) -> AwsCredentials:
        """The keys of botocore's credentials, which renew themselves in their last 15 minutes."""
        with errors_of("credentials for S3", CREDENTIALS_HINT):
            frozen = source.get_frozen_credentials()
            credentials = AwsCredentials(frozen.access_key, frozen.secret_key, frozen.token)
            if not all(isinstance(word, str) for word in (*frozen[:2], frozen.token or "")):
                raise TypeError("a field is not text")
            return credentials

    def _has_expired(self, source: Any) -> bool:
        refresh_needed = getattr(source, "refresh_needed", None)
        return refresh_needed is not None and bool(refresh_needed(refresh_in=0))


def _sent(route: Route, used: AwsCredentials, request: StoreRequest, signed: datetime) -> Response:
    """Sign a request with this time, and send it, once."""
    path = (route.base_path + request.path) or "/"
    query = encoded_query(request.parameters)
    payload = EMPTY_PAYLOAD
    if request.body is not None:
        is_tls = route.endpoint.startswith("https:")
        payload = UNSIGNED_PAYLOAD if is_tls else request.body.sha256()
    headers = signed_headers(
        request.method,
        route.wire.host,
        path,
        query,
        request.headers,
        payload=payload,
        credentials=used,
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
