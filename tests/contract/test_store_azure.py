# SPDX-License-Identifier: Apache-2.0
"""Azure: refusals, rights, and tokens of a managed identity, from scripted servers.

Azurite shows the rest, in ``make test-stores``; its rights here, too.
"""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from swansong_bucket.errors import (
    Exists,
    Forbidden,
    Locked,
    NotFound,
    Permanent,
    StoreError,
    Transient,
)
from swansong_bucket.stores.azure.auth import Identity, content_md5
from swansong_bucket.stores.base import Body, Folders, ObjectInfo

from testkit.foreign_servers import AZURE_ACCOUNT, AZURE_KEY
from testkit.raw_server import Peer, RawServer, Request, certificate
from testkit.store_backends import SERVERS, Cloud, store_at

Answer = tuple[int, dict[str, str], bytes]
LISTING = b"<EnumerationResults><Blobs>%b</Blobs><NextMarker/></EnumerationResults>"
EMPTY: Answer = (200, {}, LISTING % b"")
DATA = memoryview(b"bytes of a chunk")


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the credentials of the test."""
    for name in ("STORAGE_CONNECTION_STRING", "STORAGE_SAS_TOKEN", "CLIENT_ID", "TENANT_ID"):
        monkeypatch.delenv(f"AZURE_{name}", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_KEY", "a2V5")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def serve() -> Iterator[Callable[..., RawServer]]:
    """Start servers that answer each request with a function."""
    with ExitStack() as stack:

        def start(answer: Callable[[Request], Answer], pem: Path | None = None) -> RawServer:
            def script(peer: Peer) -> None:
                while (request := peer.request()) is not None:
                    status, headers, body = answer(request)
                    fields = [f"{name}: {value}" for name, value in headers.items()]
                    if request.line.startswith("HEAD") and "Content-Length" in headers:
                        peer.send("\r\n".join([f"HTTP/1.1 {status} X", *fields, "", ""]).encode())
                    else:
                        peer.answer(status, body, *fields)

            return stack.enter_context(RawServer(script, pem))

        yield start


def opened(server: RawServer, ca_bundle: Path | None = None) -> Any:
    return store_at("az://acct/box/prefix", f"{server.url}/acct", ca_bundle=ca_bundle)


def refusal(status: int, code: str) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>No.\nRequestId:1\nTime:2</Message></Error>"
    return status, {"x-ms-error-code": code}, body.encode()


@pytest.mark.parametrize(
    ("status", "code", "wanted", "hint"),
    [
        (409, "BlobAlreadyExists", Exists, ""),
        (412, "ConditionNotMet", Exists, ""),
        (409, "BlobImmutableDueToPolicy", Locked, "policy"),
        (409, "SnapshotsPresent", Locked, "snapshots"),
        (412, "LeaseIdMissing", Locked, "lease"),
        (409, "ContainerBeingDeleted", Transient, ""),
        (503, "ServerBusy", Transient, ""),
        (500, "OperationTimedOut", Transient, ""),
        (429, "", Transient, ""),
        (400, "Md5Mismatch", Transient, ""),
        (404, "ContainerNotFound", NotFound, "store.url"),
        (404, "", NotFound, ""),
        (401, "InvalidAuthenticationInfo", Permanent, "managed identity"),
        (403, "AuthenticationFailed", Permanent, "clock"),
        (403, "KeyBasedAuthenticationNotPermitted", Permanent, "AZURE_STORAGE_KEY"),
        (403, "AuthorizationFailure", Permanent, "firewall"),
        (403, "AuthorizationPermissionMismatch", Permanent, "Storage Blob Data Contributor"),
        (409, "BlobArchived", Permanent, "Rehydrate"),
        (400, "InvalidQueryParameterValue", Permanent, ""),
        (307, "", Permanent, "store.endpoint"),
        (501, "NotImplemented", Permanent, ""),
    ],
)
def test_refusals(
    serve: Callable[..., RawServer], status: int, code: str, wanted: type[StoreError], hint: str
) -> None:
    """Each refusal becomes the error that decides about a retry, with one line and a fix."""
    store = opened(serve(lambda _request: refusal(status, code)))
    for call in (
        lambda: store.put("key", b""),
        lambda: store.get("key"),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreError) as caught:
            call()
        kinds = (Transient, NotFound, Exists, Locked, Permanent)
        assert next(kind for kind in kinds if isinstance(caught.value, kind)) is wanted
        assert hint in caught.value.hint
        assert "RequestId" not in str(caught.value)


def test_a_missing_blob_is_distinguished_by_its_code(serve: Callable[..., RawServer]) -> None:
    """HEAD returns None only for BlobNotFound: the 404 of a proxy or a missing container is an error."""
    codes = ["BlobNotFound"]
    store = opened(serve(lambda _request: (404, {"x-ms-error-code": codes[-1]}, b"")))
    assert store.head("key") is None
    store.delete("key")
    for code in ("", "ContainerNotFound"):
        codes.append(code)
        with pytest.raises(NotFound):
            store.head("key")
        with pytest.raises(NotFound):
            store.delete("key")


@pytest.mark.parametrize("code", ["UnauthorizedBlobOverwrite", "AuthorizationPermissionMismatch"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_writer_that_may_not_overwrite(
    serve: Callable[..., RawServer], code: str, is_ours: bool
) -> None:
    """A refused create counts as stored if the blob has the same MD5, and else as Exists."""
    md5 = content_md5(DATA if is_ours else memoryview(b"bytes of another"))
    held = {"Content-Length": str(DATA.nbytes), "Content-MD5": md5, "ETag": '"1"'}

    def answer(request: Request) -> Answer:
        return (200, held, b"") if request.line.startswith("HEAD") else refusal(403, code)

    store = opened(serve(answer))
    if is_ours:
        store.create("key", Body(DATA))
    else:
        with pytest.raises(Exists):
            store.create("key", Body(DATA))
    with pytest.raises(Exists):
        store.put("key", b"", if_absent=True)


def test_an_acknowledgement_with_another_md5_is_transient(serve: Callable[..., RawServer]) -> None:
    other = {"ETag": '"1"', "Content-MD5": content_md5(memoryview(b"else"))}
    store = opened(serve(lambda _request: (201, other, b"")))
    with pytest.raises(Transient, match="other bytes"):
        store.put("key", b"content")


@pytest.mark.fault("O06")
def test_a_wrong_clock_costs_a_request(serve: Callable[..., RawServer]) -> None:
    """A refused signature is made again with the store's time."""
    asked = []

    def answer(request: Request) -> Answer:
        date = request.header("x-ms-date")
        assert date is not None
        asked.append(date)
        true = datetime.now(UTC) + timedelta(hours=1)
        if abs(true - parsedate_to_datetime(date)) < timedelta(minutes=15):
            return EMPTY
        return 403, {"Date": format_datetime(true, usegmt=True)}, b""

    store = opened(serve(answer))
    store.check()
    store.check()
    assert len(asked) == 3


if "azurite" in SERVERS:  # make test-stores

    def test_a_signature_that_may_only_create(
        open_cloud: Callable[[str], Cloud], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the rights to read, create and list, only overwrites and deletes are refused."""
        cloud = open_cloud("azurite")
        monkeypatch.delenv("AZURE_STORAGE_KEY")
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", signature("rcl"))
        store = cloud.open()
        for _ in range(2):
            store.create("key", Body(DATA))
        assert [info.key for info in store.list("")] == ["key"]
        assert store.get("key") == DATA
        for refused in (
            lambda: store.create("key", Body(DATA[1:])),
            lambda: store.put("key", b"", if_absent=True),
        ):
            with pytest.raises(Exists):
                refused()
        for refused in (lambda: store.put("key", b""), lambda: store.delete("key")):
            with pytest.raises(Forbidden):
                refused()
        assert store.get("key") == DATA


def signature(rights: str) -> str:
    """A shared access signature for all containers of Azurite's account."""
    fields = {"sp": rights, "ss": "b", "srt": "sco", "st": "", "se": "2100-01-01", "sip": ""}
    fields |= {"spr": "http,https", "sv": "2021-12-02", "ses": ""}
    text = "\n".join([AZURE_ACCOUNT, *fields.values(), ""])
    digest = hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), "sha256")
    sent = {name: value for name, value in fields.items() if value}
    return urlencode({**sent, "sig": base64.b64encode(digest).decode()})


BLOB = b"<Blob><Name>%b</Name><Properties><Content-Length>1</Content-Length></Properties></Blob>"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<EnumerationResults><Blobs/></EnumerationResults>",
        b"<EnumerationResults><NextMarker/></EnumerationResults>",
        b"<ListBucketResult/>",
        LISTING % (BLOB % b"other/key"),
        LISTING % b"<Blob><Name>prefix/key</Name></Blob>",
    ],
)
def test_a_listing_that_is_not_whole_is_transient(
    serve: Callable[..., RawServer], body: bytes
) -> None:
    """A body without the last elements, without a size, or with a foreign key is never a short listing."""
    store = opened(serve(lambda _request: (200, {}, body)))
    with pytest.raises(Transient):
        list(store.list(""))


def test_a_listing_of_blobs_and_folders(serve: Callable[..., RawServer]) -> None:
    """Their names have no prefix of the store."""
    items = BLOB % b"prefix/key" + b"<BlobPrefix><Name>prefix/run/</Name></BlobPrefix>"
    store = opened(serve(lambda _request: (200, {}, LISTING % items)))
    assert list(store.list("")) == [ObjectInfo("key", 1)]
    assert store.folders("", None) == Folders(["run"], None)


# ---------------------------------------------------------------- tokens of an identity


class Desk:
    """A metadata service that issues ``token-1``, ``token-2``, ..., or answers with ``status``."""

    def __init__(self) -> None:
        self.issued = 0
        self.status = 200
        self.lifetime_s = 86400
        self.suffix = ""

    def __call__(self, _request: Request) -> Answer:
        if self.status != 200:
            return self.status, {}, b'{"error": "invalid_request"}' if self.status == 400 else b"{}"
        self.issued += 1
        token = {
            "access_token": f"token-{self.issued}{self.suffix}",
            "expires_in": str(self.lifetime_s),
            "expires_on": str(int(time.time()) + self.lifetime_s),
            "resource": "https://storage.azure.com/",
            "token_type": "Bearer",
        }
        return 200, {"Content-Type": "application/json"}, json.dumps(token).encode()


@pytest.fixture
def desk(serve: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch) -> Desk:
    """The metadata service of the VM, instead of keys."""
    desk = Desk()
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    monkeypatch.setenv("PATH", "/nonexistent")  # no Azure CLI
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", serve(desk).url)
    return desk


def test_a_managed_identity(serve: Callable[..., RawServer], desk: Desk, tmp_path: Path) -> None:
    """One token serves all requests; after each 401 a new one is fetched, once."""
    accepted = "Bearer token-1"
    seen: list[str | None] = []

    def answer(request: Request) -> Answer:
        seen.append(request.header("authorization"))
        return EMPTY if seen[-1] == accepted else refusal(401, "InvalidAuthenticationInfo")

    pem = certificate(tmp_path)
    store = opened(serve(answer, pem), pem)
    store.warm()
    store.check()
    assert (set(seen), desk.issued) == ({accepted}, 1)
    desk.status = 500  # a token in memory needs no metadata service
    store.check()
    desk.status = 200
    for number in (2, 3):  # the second one soon after the first
        accepted = f"Bearer token-{number}"
        with pytest.raises(Transient, match="other credentials"):
            store.check()
        store.check()
        assert desk.issued == number


@pytest.mark.parametrize(("status", "wanted"), [(400, Permanent), (500, Transient)])
def test_an_identity_that_is_missing_or_silent(
    serve: Callable[..., RawServer],
    desk: Desk,
    tmp_path: Path,
    status: int,
    wanted: type[StoreError],
) -> None:
    """A VM without an identity gets the fix; a metadata service that fails is asked again later."""
    desk.status = status
    pem = certificate(tmp_path)
    store = opened(serve(lambda _request: EMPTY, pem), pem)
    with pytest.raises(wanted) as caught:
        store.check()
    assert type(caught.value) is wanted
    assert "managed identity" in caught.value.hint


@pytest.mark.parametrize("suffix", ["\r\nx-ms-version: 2009-09-19", "x" * 10_000])
def test_an_invalid_token_is_not_sent(
    serve: Callable[..., RawServer], desk: Desk, tmp_path: Path, suffix: str
) -> None:
    """A line break or an excessive length in a token is an error of the issuer."""
    desk.suffix = suffix
    pem = certificate(tmp_path)
    server = serve(lambda _request: EMPTY, pem)
    with pytest.raises(Transient, match="invalid token"):
        opened(server, pem).check()
    assert server.accepted == 0


def test_no_token_over_plain_http(serve: Callable[..., RawServer], desk: Desk) -> None:
    """The request is refused before it is sent, and the error names the key and the fix."""
    server = serve(lambda _request: EMPTY)
    with pytest.raises(Permanent, match="plain http") as caught:
        opened(server).check()
    assert "store.endpoint" in caught.value.hint
    assert (server.accepted, desk.issued) == (0, 0)


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({"CLIENT_SECRET": "s", "TENANT_ID": "t", "CLIENT_ID": "c"}, "EnvironmentCredential"),
        (
            {"FEDERATED_TOKEN_FILE": "/f", "TENANT_ID": "t", "CLIENT_ID": "c"},
            "WorkloadIdentityCredential",
        ),
        ({"CLIENT_ID": "c"}, "ManagedIdentityCredential"),
        ({}, "ManagedIdentityCredential"),
    ],
)
def test_the_configured_identity_is_used(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], kind: str
) -> None:
    """The variables of the unit or of the pod choose the identity; without any it is that of the VM."""
    for name, value in environment.items():
        monkeypatch.setenv(f"AZURE_{name}", value)
    assert type(Identity(1.0)._found).__name__ == kind


def test_a_principal_that_is_not_whole_is_permanent(
    serve: Callable[..., RawServer], desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret without its tenant is an error at once: no other identity is used instead."""
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "s")
    pem = certificate(tmp_path)
    with pytest.raises(Permanent, match="not fully configured"):
        opened(serve(lambda _request: EMPTY, pem), pem).check()
    assert desk.issued == 0
