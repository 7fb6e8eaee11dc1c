# SPDX-License-Identifier: Apache-2.0
"""How to get at a bucket of S3: credentials, address, signed requests, and what its refusals mean.

The only module of the stores that imports boto3, when a client is first needed: botocore finds the
address of the bucket, the region and the credentials.  It sends nothing to the store itself.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from urllib3.exceptions import HTTPError

from swansongd.errors import Exists, NotFound, Permanent, StoreError, Transient
from swansongd.http1 import retry_after_s
from swansongd.stores.answers import one_line, xml_text
from swansongd.stores.base import Body, Sink, is_certificate_problem
from swansongd.stores.sigv4 import (
    EMPTY_PAYLOAD,
    Identity,
    encoded_path,
    encoded_query,
    signed_headers,
)
from swansongd.stores.wire import Answer, Wire

Addressing = Literal["auto", "path", "virtual"]

_SAMPLE_KEY = "k"
_HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
"""A bucket that can stand before a certificate's wildcard: without dots."""
_REGION_NAME = re.compile(r"[a-z0-9-]{1,40}")
_ERROR = re.compile(rb"\s*(?:<\?[^>]{0,100}\?>\s*)?<Error[\s>]")
_STALL_S = 3.0
_HOPELESS_S = 5.0

# Refusals with a status of 400 that are about this one attempt, not about what was asked.
_TRANSIENT_CODES = {
    "RequestTimeout", "IncompleteBody", "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch", "SlowDown", "Throttling", "ThrottlingException", "InternalError",
}  # fmt: skip
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_ELSEWHERE_CODES = {
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}  # fmt: skip
CREDENTIALS_HINT = (
    "Give the VM an instance role for the bucket, or put credentials where boto3 looks for them"
)
_RIGHTS = "Allow s3:ListBucket, GetObject, PutObject and AbortMultipartUpload on store.url"
_REGION = "Set store.region to the region of the bucket"
_HINTS = {
    "NoSuchBucket": "Make the bucket, or mend store.url",
    "RequestTimeTooSkewed": "The clock of this VM is wrong: mend time synchronisation",
    "AccessDenied": _RIGHTS,
    "403": _RIGHTS,
    "InvalidAccessKeyId": CREDENTIALS_HINT,
    "SignatureDoesNotMatch": CREDENTIALS_HINT,
    "InvalidToken": CREDENTIALS_HINT,
    **dict.fromkeys(_EXPIRED_CODES, CREDENTIALS_HINT),
    **dict.fromkeys(_ELSEWHERE_CODES, _REGION),
    "301": _REGION,
    "307": _REGION,
}


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
        self._credentials: Any = None
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
            payload: see :func:`swansongd.stores.sigv4.signed_headers`.
        """
        route, identity = self.route(), self._identity()
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
            return answer
        code = xml_text(answer.body, "Code") or str(answer.status)
        if method == "HEAD" and answer.status == 400:
            code = "ExpiredToken"  # the only reason for a refusal of so simple a request
        if 300 <= answer.status < 400 or code in _ELSEWHERE_CODES:
            raise self._moved(answer, code, route, identity)
        raise self._refusal(answer, code, identity)

    def expect_no_error(self, answer: Answer) -> None:
        """Raises the error that came under a status of success, as it may when it came up late."""
        if _ERROR.match(answer.body):
            raise self._refusal(answer, xml_text(answer.body, "Code"), self._identity())

    def renew_credentials(self) -> None:
        """Have credentials that last for a while; raises Permanent where there are none."""
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415

        try:
            self._client()
            self._credentials.renew()
        except (BotoCoreError, OSError, RuntimeError) as error:
            raise classified(error, "credentials for S3") from error

    def route(self) -> Route:
        """Where to send; asks nobody once it is known."""
        with self._route_lock:
            if self._known_route is None:
                self._known_route = self._found_route()
            return self._known_route

    def _identity(self) -> Identity:
        """Who signs now; asks nobody unless the credentials have expired."""
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415

        try:
            if self._credentials is None:
                self._client()
            frozen = self._credentials.get_frozen_credentials()
        except (BotoCoreError, OSError, RuntimeError) as error:
            raise classified(error, "credentials for S3") from error
        return Identity(frozen.access_key, frozen.secret_key, frozen.token)

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

    def _found_route(self) -> Route:
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415

        try:
            url = self._client().generate_presigned_url(
                "put_object", Params={"Bucket": self._bucket, "Key": _SAMPLE_KEY}
            )
        except (BotoCoreError, OSError, RuntimeError) as error:
            raise classified(error, "the address of the bucket") from error
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

    # ------------------------------------------------------------ the client

    def _client(self) -> Any:
        import boto3  # noqa: PLC0415 - a VM on another cloud need not load it
        import botocore.session  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        with self._lock:
            if self._made_client is None:
                base = botocore.session.Session(profile=self._profile)
                self._trusted = self._ca_bundle or base.get_config_variable("ca_bundle")
                if self._credentials is None:
                    chain = base.get_component("credential_provider")
                    found = chain.load_credentials()
                    if found is None:
                        # Not kept: the metadata service may answer the next time.
                        raise Permanent("no credentials for S3", hint=CREDENTIALS_HINT)
                    self._credentials = held(found, chain.load_credentials)
                base.register_component("credential_provider", _Holder(self._credentials))
                session = boto3.Session(botocore_session=base, region_name=self._region)
                addressing: Any = {"addressing_style": self._addressing}
                self._made_client = session.client(
                    "s3",
                    endpoint_url=self._endpoint,
                    config=Config(signature_version="s3v4", s3=addressing),
                )
            return self._made_client

    def _refusal(self, answer: Answer, code: str, used: Identity) -> StoreError:
        """The error of the contract for an answer that was no success."""
        status = answer.status
        reason = one_line(xml_text(answer.body, "Message"), 200)
        message = f"{status} {one_line(code, 80)}: {reason}"
        hint = _HINTS.get(code, "")
        if code in _EXPIRED_CODES:
            is_new = self._credentials.replace((used.access_key, used.secret_key, used.token))
            return Transient(message) if is_new else Permanent(message, hint=hint)
        if status == 404 or code in ("NoSuchBucket", "NoSuchKey", "NoSuchUpload"):
            return NotFound(message, hint=hint)
        if status == 412 or code == "PreconditionFailed":
            return Exists(message)
        if code in _TRANSIENT_CODES or status in (408, 409, 429) or status >= 500:
            return Transient(message, hint=hint, retry_after_s=retry_after_s(answer.headers))
        return Permanent(message, hint=hint)


def classified(error: Exception, what: str) -> StoreError:
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
        return Permanent(message, hint="Mend store.profile")
    if isinstance(
        error, (of.NoCredentialsError, of.PartialCredentialsError, of.CredentialRetrievalError)
    ):
        return Permanent(message, hint=CREDENTIALS_HINT)
    return Permanent(message)


def held(first: Any, load: Callable[[], Any] = lambda: None) -> Any:
    """botocore's credentials, asked for anew only when told to or once they have expired.

    botocore's own ask the metadata service a quarter of an hour before that, in the middle of a
    request, and fail with it; but it may be dead by then, and the credentials are good.

    Args:
        first: what to begin with.
        load: goes through the sources of credentials again.
    """
    from botocore.credentials import Credentials  # noqa: PLC0415
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415

    class Held(Credentials):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__("", "")
            self._inner = first
            self._frozen: Any = None
            self._renewing = threading.Lock()
            self._hopeless_until_mono_s = 0.0

        def renew(self) -> None:
            """Fetch new ones where less than 15 minutes are left: that is botocore's own rule."""
            with self._renewing:
                self._frozen = self._inner.get_frozen_credentials()

        def replace(self, refused: tuple[str, str, str | None]) -> bool:
            """Whether there are others than ``refused``: of many who ask at once, one goes for them."""
            with self._renewing:
                if tuple(self._frozen[:3]) != refused:
                    return True
                if time.monotonic() < self._hopeless_until_mono_s:
                    return False
                try:
                    fresh = load()
                    frozen = fresh and fresh.get_frozen_credentials()
                except (BotoCoreError, OSError, RuntimeError):
                    frozen = None
                if not frozen or tuple(frozen[:3]) == refused:
                    self._hopeless_until_mono_s = time.monotonic() + _HOPELESS_S
                    return False
                self._inner, self._frozen = fresh, frozen
                return True

        def get_frozen_credentials(self) -> Any:
            if self._frozen is None or self._has_expired():
                self.renew()
            return self._frozen

        def _has_expired(self) -> bool:
            refresh_needed = getattr(self._inner, "refresh_needed", None)
            return refresh_needed is not None and bool(refresh_needed(refresh_in=0))

    return Held()


class _Holder:
    """Hands botocore the credentials that are to be used."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def load_credentials(self) -> Any:
        return self._credentials
