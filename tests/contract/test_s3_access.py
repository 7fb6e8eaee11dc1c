# SPDX-License-Identifier: Apache-2.0
"""Access to S3: addresses, credentials, and changes of both."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.errors import Permanent, Transient
from swansong_bucket.stores import credentials
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.remote import DEFAULT_LIMITS
from swansong_bucket.stores.s3 import access
from swansong_bucket.stores.s3.store import S3Store

from testkit.bodies import CountedSink
from testkit.raw_server import RawServer, answering
from testkit.store_backends import Cloud, retrying, store_at

CONTENT = os.urandom(2 * 2**20 + 777)


@pytest.fixture
def cloud(open_cloud: Callable[[str], Cloud]) -> Cloud:
    return open_cloud("s3-tls")


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes the credentials of the profile ``ours``, the only ones."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))

    def write(access_key: str, secret_key: str, token: str) -> None:
        path.write_text(
            f"[ours]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret_key}\n"
            f"aws_session_token = {token}\n"
        )

    return write


def stored(store: S3Store, key: str = "shard") -> bytes:
    sink = CountedSink()
    store.get_range(key, 0, len(CONTENT), sink)
    return sink.data


@pytest.fixture
def below_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve every name below localhost to loopback, which not every resolver does."""
    ask = socket.getaddrinfo

    def resolved(host: Any, *args: Any, **kwargs: Any) -> Any:
        return ask("127.0.0.1" if str(host).endswith("localhost") else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


@pytest.mark.parametrize(
    "endpoint",
    ["http://127.0.0.1:9000", "https://store.example.org", "https://[::1]:9000", "http://a-b:80"],
)
@pytest.mark.parametrize("addressing", ["auto", "path"])
def test_a_configured_address_is_that_of_a_client(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, addressing: Any
) -> None:
    """With endpoint and region in the configuration, no client of botocore is created for its address."""
    config = StoreAccess(
        url="s3://bucket", endpoint=endpoint, region="eu-west-1", addressing=addressing
    )
    with monkeypatch.context() as without_address:
        without_address.setattr(access, "ENDPOINT", re.compile("nothing"))
        expected = access.S3Access(config, DEFAULT_LIMITS, lambda: None)._address()
    monkeypatch.delattr(botocore.session.Session, "create_client")
    assert access.S3Access(config, DEFAULT_LIMITS, lambda: None)._address() == expected


@pytest.mark.usefixtures("below_localhost")
@pytest.mark.parametrize("addressing", ["auto", "path", "virtual"])
@pytest.mark.parametrize("name", ["s3", "s3-tls"])
def test_addressing(open_cloud: Callable[[str], Cloud], name: str, addressing: str) -> None:
    """Bucket in the path or the host: the store verifies signature and checksum."""
    cloud = open_cloud(name)
    endpoint = cloud.server.url.replace("127.0.0.1", "localhost")
    store = cloud.open(endpoint, addressing=addressing)
    store.create("shard", Body(CONTENT))
    assert stored(store) == CONTENT
    assert [info.key for info in store.list("")] == ["shard"]


# ---------------------------------------------------------------- credentials


@pytest.mark.fault("O05")
@pytest.mark.parametrize(
    "after", [("second", "other"), ("first", "other")], ids=["new key", "new secret"]
)
def test_rotated_keys_are_read_again(
    cloud: Cloud,
    profile: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    after: tuple[str, str],
) -> None:
    """Without new keys: Permanent, with a hint.  New keys end the refusals."""
    profile("first", "secret", "")
    cloud.order("credentials", access_key="first", secret_key="secret")
    store = cloud.open(profile="ours")
    store.check()
    cloud.order("credentials", access_key=after[0], secret_key=after[1])
    monkeypatch.setattr(credentials, "_PAUSE_S", 0.0)
    with pytest.raises(Permanent) as caught:
        store.check()
    assert "instance role" in caught.value.hint
    profile(*after, "")
    with pytest.raises(Transient):
        store.head("shard")  # whose error response has no body
    store.create("shard", Body(CONTENT))
    assert stored(store) == CONTENT


@pytest.mark.fault("O05")
def test_an_expired_session_is_replaced(cloud: Cloud, profile: Callable[..., None]) -> None:
    """Also if a HEAD finds out, whose error response has no code."""
    profile("first", "secret", "token")
    cloud.order("credentials", access_key="first", secret_key="secret", session_token="token")
    store = cloud.open(profile="ours")
    store.check()
    cloud.order("expire")
    profile("second", "secret", "token")
    with pytest.raises(Transient, match="other credentials"):
        store.head("shard")


@pytest.mark.fault("O05")
def test_another_source_of_credentials_is_found(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile names another program than before: the configuration file is read again."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    config = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))

    def write(name: str) -> None:
        (tmp_path / name).write_text(
            f'{{"Version": 1, "AccessKeyId": "{name}", "SecretAccessKey": "secret"}}'
        )
        config.write_text(f"[profile ours]\ncredential_process = cat {tmp_path}/{name}\n")
        cloud.order("credentials", access_key=name, secret_key="secret")

    write("first")
    store = cloud.open(profile="ours")
    store.check()
    cloud.order("credentials", access_key="second", secret_key="secret")
    monkeypatch.setattr(credentials, "_PAUSE_S", 0.0)
    for unfinished in ("[", '{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": [1]}'):
        (tmp_path / "first").write_text(unfinished)
        with pytest.raises(Permanent, match="InvalidAccessKeyId"):
            store.check()
    write("second")
    retrying(store).create("shard", Body(CONTENT))
    assert stored(store) == CONTENT


def test_an_archived_object_is_named_with_its_command(cloud: Cloud) -> None:
    """A lifecycle rule has moved it to GLACIER: Permanent, and the hint brings it back."""
    store = cloud.open()
    store.put("key", b"x")
    cloud.order("answer", status=403, code="InvalidObjectState", method="GET", times=100)
    with pytest.raises(Permanent) as caught:
        store.get("key")
    assert "aws s3api restore-object" in caught.value.hint


def test_a_missing_profile(cloud: Cloud) -> None:
    """Permanent; the hint names the setting."""
    store = cloud.open(profile="unknown")
    for call in (store.check, lambda: store.create("key", Body(b"x")), store.warm):
        with pytest.raises(Permanent) as caught:
            call()
        assert "store.profile" in caught.value.hint


@pytest.mark.fault("O07")
def test_the_bucket_is_in_another_region(cloud: Cloud) -> None:
    """A redirect is followed once: the request is Transient, and the next one goes to the other region."""
    store = cloud.open()
    store.create("shard", Body(CONTENT))
    cloud.order("region", name="eu-west-1")
    with pytest.raises(Transient):
        store.create("shard", Body(CONTENT))
    store.create("shard", Body(CONTENT))
    assert stored(store) == CONTENT
    store.check()


@pytest.mark.fault("O06")
@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_a_wrong_clock_costs_a_request(cloud: Cloud, ahead_s: int) -> None:
    """A refused signature is made again with the store's time; later ones have it from the beginning."""
    store = cloud.open()
    cloud.order("clock", ahead_s=ahead_s)
    assert store.head("shard") is None  # the refusal of a HEAD has no code
    store.create("shard", Body(CONTENT))
    assert stored(store) == CONTENT
    assert [method for method, _ in cloud.requests()] == ["HEAD", "HEAD", "GET", "PUT", "GET"]
    cloud.order("clock", ahead_s=0)  # the clock of the VM is set right
    store.create("second", Body(CONTENT))
    assert stored(store, "second") == CONTENT


@pytest.mark.fault("O06")
def test_a_clock_that_is_wrong_by_days(cloud: Cloud) -> None:
    """Permanent, and a hint that names the clock: no signature is valid days later."""
    store = cloud.open()
    cloud.order("clock", ahead_s=2 * 86400)
    with pytest.raises(Permanent) as caught:
        store.create("key", Body(b"x"))
    assert "clock" in caught.value.hint


# ---------------------------------------------------------------- servers that misbehave


@pytest.fixture
def responding(cloud_environment: None) -> Iterator[Callable[..., S3Store]]:
    """A store with a server that sends the same response to every request."""
    with ExitStack() as servers:

        def start(*answer: Any) -> S3Store:
            server = servers.enter_context(RawServer(answering(*answer)))
            return store_at("s3://bucket", server.url, region="us-east-1")

        yield start


@pytest.mark.fault("O04")
@pytest.mark.parametrize(
    ("wait", "seconds"),
    [("7", 7.0), ("soon", None), ("-1", None), ("1e9", None), ("9" * 999, None)],
)
def test_retry_after_of_slow_down(
    responding: Callable[..., S3Store], wait: str, seconds: float | None
) -> None:
    """SlowDown has the store's Retry-After, if it is valid."""
    store = responding(503, b"<Error><Code>SlowDown</Code></Error>", f"Retry-After: {wait}")
    for call in (store.check, lambda: store.create("key", Body(b"x"))):
        with pytest.raises(Transient, match="SlowDown") as caught:
            call()
        assert caught.value.retry_after_s == seconds


@pytest.mark.fault("O13")
def test_the_store_returns_another_checksum(responding: Callable[..., S3Store]) -> None:
    """The bytes do not count as stored: Transient."""
    store = responding(200, b"", 'ETag: "x"', "x-amz-checksum-crc32c: AAAAAA==")
    with pytest.raises(Transient, match="other bytes"):
        store.create("key", Body(b"something"))
