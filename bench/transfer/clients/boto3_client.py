# SPDX-License-Identifier: Apache-2.0
"""boto3's managed transfer with its defaults, or tuned (16 MiB x 8, no checksum, unsigned payload)."""

from __future__ import annotations

from collections.abc import Callable

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from job import Job, in_threads, run


def prepare(job: Job) -> Callable[[], object]:
    if "tuned" in job.options:
        config = Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=32,
            s3={"payload_signing_enabled": False, "addressing_style": "path"},
        )
        transfer = TransferConfig(
            multipart_threshold=16 * 2**20,
            multipart_chunksize=16 * 2**20,
            max_concurrency=8,
            io_chunksize=2**20,
        )
        files_at_once = 8 if len(job.files) < 100 else 16
    else:
        config = Config(s3={"addressing_style": "path"})
        transfer = TransferConfig()
        files_at_once = 1 if len(job.files) < 100 else 10
    client = boto3.client("s3", endpoint_url=job.endpoint, verify=job.ca, config=config)

    def one(file: tuple[str, int]) -> None:
        name, _ = file
        path, key = str(job.directory / name), job.key(name)
        if job.operation == "upload":
            client.upload_file(path, job.bucket, key, Config=transfer)
        else:
            client.download_file(job.bucket, key, path, Config=transfer)

    return lambda: in_threads(files_at_once, job.files, one)


if __name__ == "__main__":
    run(prepare)
