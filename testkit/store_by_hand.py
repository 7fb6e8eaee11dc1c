# SPDX-License-Identifier: Apache-2.0
"""Requests to S3 and GCS with any content, signed by botocore."""

from __future__ import annotations

import os

import requests
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from testkit.foreign_servers import BUCKET
from testkit.store_backends import Cloud


class UncheckedSigner(S3SigV4Auth):  # type: ignore[misc,unused-ignore]
    """Signs the declared payload hash without verifying it."""

    def __init__(self, secret_key: str = "test") -> None:
        super().__init__(Credentials("test", secret_key), "s3", "us-east-1")

    def _modify_request_before_signing(self, request: AWSRequest) -> None:
        declared = request.headers.get("x-amz-content-sha256")
        super()._modify_request_before_signing(request)  # type: ignore[misc,unused-ignore]
        if declared:
            request.headers.replace_header("X-Amz-Content-SHA256", declared)


def signed(
    cloud: Cloud,
    method: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    *,
    secret_key: str = "test",
    timeout_s: float = 20.0,
) -> requests.Response:
    """The response to a request for a new key."""
    url = f"{cloud.server.url}/{BUCKET}/{cloud.prefix}/{os.urandom(4).hex()}"
    request = AWSRequest(method, url, headers=headers or {}, data=body)
    if cloud.is_s3:
        UncheckedSigner(secret_key).add_auth(request)
    return requests.request(
        method,
        url,
        data=body,
        headers=dict(request.headers),
        verify=str(cloud.ca) if cloud.ca else True,
        timeout=timeout_s,
        allow_redirects=False,
    )
