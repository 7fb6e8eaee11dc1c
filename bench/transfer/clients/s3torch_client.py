# SPDX-License-Identifier: Apache-2.0
"""The client of s3torchconnector, used as its checkpoint writer does (as a stream)."""

from __future__ import annotations

from collections.abc import Callable

from job import Job, in_threads, run
from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

READ_BYTES = 8 * 2**20


def prepare(job: Job) -> Callable[[], object]:
    client = MountpointS3Client(
        region="us-east-1", endpoint=job.endpoint, force_path_style=True, part_size=16 * 2**20
    )

    def one(file: tuple[str, int]) -> None:
        name, _ = file
        if job.operation == "download":
            with open(job.directory / name, "wb") as target:
                target.writelines(client.get_object(job.bucket, job.key(name)))
            return
        with open(job.directory / name, "rb") as source:
            stream = client.put_object(job.bucket, job.key(name))
            while chunk := source.read(READ_BYTES):
                stream.write(chunk)
            stream.close()

    files_at_once = {1: 1}.get(len(job.files), 16 if len(job.files) > 100 else 4)
    return lambda: in_threads(files_at_once, job.files, one)


if __name__ == "__main__":
    run(prepare)
