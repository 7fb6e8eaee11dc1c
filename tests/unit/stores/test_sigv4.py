# SPDX-License-Identifier: Apache-2.0
"""Signatures equal those of botocore for any request."""

from __future__ import annotations

import string
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st
from swansong_bucket.stores.s3.sigv4 import (
    EMPTY_PAYLOAD,
    UNSIGNED_PAYLOAD,
    AwsCredentials,
    encoded_path,
    encoded_query,
    signed_headers,
)

_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30)
_TOKEN = st.text(string.ascii_letters + string.digits + "/+=", min_size=1, max_size=60)
_NAME = st.text(string.ascii_lowercase + "-", min_size=1, max_size=20).map(lambda n: f"x-amz-x{n}")
_VALUE = st.text(string.ascii_letters + string.digits + " =-:/;,", max_size=40).map(str.strip)


class _Theirs(botocore.auth.S3SigV4Auth):  # type: ignore[misc]
    def __init__(self, payload: str, *args: Any) -> None:
        super().__init__(*args)
        self._payload = payload

    def payload(self, request: Any) -> str:
        return self._payload


@given(
    method=st.sampled_from(["PUT", "GET", "HEAD"]),
    host=st.sampled_from(["b.s3.eu-west-1.amazonaws.com", "127.0.0.1:9000", "localhost"]),
    key=_TEXT,
    parameters=st.dictionaries(_TEXT.filter(bool), _TEXT, max_size=4),
    headers=st.dictionaries(_NAME, _VALUE, max_size=4),
    payload=st.sampled_from([UNSIGNED_PAYLOAD, EMPTY_PAYLOAD]),
    credentials=st.builds(AwsCredentials, _TOKEN, _TOKEN, st.none() | _TOKEN),
    region=st.sampled_from(["us-east-1", "eu-central-2"]),
    now=st.datetimes(datetime(2001, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
)
def test_signatures_equal_those_of_botocore(
    *,
    method: str,
    host: str,
    key: str,
    parameters: dict[str, str],
    headers: dict[str, str],
    payload: str,
    credentials: AwsCredentials,
    region: str,
    now: datetime,
) -> None:
    """Over random keys, queries, headers, credentials, regions and times."""
    path, query = encoded_path(f"/bucket/{key}"), encoded_query(parameters)
    theirs = AWSRequest(method, f"https://{host}{path}?{query}", headers=headers)
    reference = Credentials(credentials.access_key, credentials.secret_key, credentials.token)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.auth, "get_current_datetime", lambda: now)
        _Theirs(payload, reference, "s3", region).add_auth(theirs)
    ours = signed_headers(
        method,
        host,
        path,
        query,
        headers,
        payload=payload,
        credentials=credentials,
        region=region,
        now=now,
    )
    assert ours["authorization"] == theirs.headers["Authorization"]
    assert ours["x-amz-date"] == theirs.headers["X-Amz-Date"]
    assert ours.get("x-amz-security-token") == theirs.headers.get("X-Amz-Security-Token")
    assert unquote(path) == f"/bucket/{key}"


def test_nothing_secret_is_shown() -> None:
    """The repr of credentials, as in a traceback, contains no key and no token."""
    shown = repr(AwsCredentials("AKIA", "very-secret", "a-token"))
    assert "very-secret" not in shown
    assert "a-token" not in shown
