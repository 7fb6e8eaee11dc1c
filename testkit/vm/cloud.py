# SPDX-License-Identifier: Apache-2.0
"""The cloud around a VM: its metadata service at the real address, and a bucket that outlives the VM."""

from __future__ import annotations

import json
import urllib.request
from contextlib import ExitStack
from typing import Any

from testkit.clouds import Aws, Bucket, Gcp
from testkit.emulators.process import EmulatorProcess
from testkit.vm.machine import METADATA

COMMITS = "ours/run/commits/"


class Cloud:
    """One cloud, whose processes end with ``started``.

    Args:
        kind: ``aws``, with S3 for a bucket, or ``gcp``, with Cloud Storage.
    """

    def __init__(self, started: ExitStack, kind: str) -> None:
        self.kind = kind
        self.vendor = {"aws": "Amazon EC2", "gcp": "Google"}[kind]
        self._started = started
        self._service: EmulatorProcess | None = None
        module = {"aws": "testkit.emulators.s3_server", "gcp": "testkit.emulators.gcs_server"}[kind]
        store = started.enter_context(EmulatorProcess(module, "--bucket", "ckpt"))
        self._bucket_url = store.url
        self._endpoint = store.url.replace("127.0.0.1", METADATA)

    def new_service(self) -> None:
        """Start the metadata service of the next VM; that of the previous VM is killed."""
        if self._service:
            self._service.kill()
        module = {"aws": "testkit.emulators.aws_imds", "gcp": "testkit.emulators.gcp_metadata"}[
            self.kind
        ]
        service = EmulatorProcess(module, "--port", "80")
        self._service = self._started.enter_context(service)

    @property
    def aws(self) -> Aws:
        assert self._service is not None
        return Aws(self._service.url)

    @property
    def gcp(self) -> Gcp:
        assert self._service is not None
        return Gcp(self._service.url)

    @property
    def store(self) -> dict[str, str]:
        """Table ``[store]`` of the configuration, with addresses for the VM."""
        if self.kind == "gcp":
            return {"url": "gs://ckpt/ours", "endpoint": self._endpoint}
        return {"url": "s3://ckpt/ours", "endpoint": self._endpoint, "region": "us-east-1"}

    def committed_steps(self) -> list[int]:
        """Steps of the manifests in the bucket, read without our own code."""
        if self.kind == "aws":
            keys = Bucket(self._bucket_url, "ours").keys("run/commits/")
        else:
            url = f"{self._bucket_url}/storage/v1/b/ckpt/o?prefix={COMMITS}"
            with urllib.request.urlopen(url, timeout=60) as answer:
                listing: dict[str, Any] = json.load(answer)
            keys = [item["name"] for item in listing.get("items", [])]
        # .../commits/GENERATION/STEP/NODE.json
        return sorted({int(key.split("/")[-2]) for key in keys})
