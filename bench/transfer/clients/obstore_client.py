# SPDX-License-Identifier: Apache-2.0
"""obstore with its defaults, or tuned (16 MiB parts, unsigned payload, CRC64NVME, ranged reads).

``concurrency`` limits the requests in flight, as in the other clients: parts of one large file, parts of
several files, or small files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import obstore
from job import Job, in_threads, parts, run
from obstore.store import S3Store

PART_BYTES = 16 * 2**20


def is_small(job: Job) -> bool:
    return len(job.files) >= 100


def prepare(job: Job) -> Callable[[], object]:
    is_tuned = "tuned" in job.options
    tuning: dict[str, Any] = {}
    if is_tuned:
        tuning = {"unsigned_payload": True, "checksum_algorithm": "crc64nvme"}
    store = S3Store(
        job.bucket,
        endpoint=job.endpoint,
        region="us-east-1",
        access_key_id="key",
        secret_access_key="secret",
        virtual_hosted_style_request=False,
        # obstore accepts no CA file.
        client_options={"allow_invalid_certificates": True, "timeout": timedelta(seconds=60)},
        **tuning,
    )
    concurrency = job.option("concurrency", 8)
    files_at_once = {1: 1}.get(len(job.files), concurrency if is_small(job) else 4)

    def upload(file: tuple[str, int]) -> None:
        name, _ = file
        path = job.directory / name
        if is_tuned:
            each = max(1, concurrency // files_at_once)
            obstore.put(store, job.key(name), path, chunk_size=PART_BYTES, max_concurrency=each)
        else:
            obstore.put(store, job.key(name), path)

    def download_whole(file: tuple[str, int]) -> None:
        name, _ = file
        with open(job.directory / name, "wb") as target:
            target.writelines(obstore.get(store, job.key(name)))

    def download() -> None:
        if not is_tuned:
            in_threads(files_at_once, job.files, download_whole)
            return
        tasks = []
        for name, size_bytes in job.files:
            fd = os.open(job.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            tasks += [(fd, name, *part) for part in parts(size_bytes, PART_BYTES)]

        def get(task: tuple[int, str, int, int]) -> None:
            fd, name, offset, length = task
            data = obstore.get_range(store, job.key(name), start=offset, length=length)
            os.pwrite(fd, data, offset)

        in_threads(concurrency, tasks, get)

    if job.operation == "download":
        return download
    return lambda: in_threads(files_at_once, job.files, upload)


if __name__ == "__main__":
    run(prepare)
