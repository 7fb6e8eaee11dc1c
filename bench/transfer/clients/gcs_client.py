# SPDX-License-Identifier: Apache-2.0
"""google-cloud-storage's transfer_manager with threads, which were faster than its processes.

Downloads skip its checksum, because the sink has none for generated data.
"""

from __future__ import annotations

from collections.abc import Callable

from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage import transfer_manager
from job import Job, run


def prepare(job: Job) -> Callable[[], object]:
    client = storage.Client(
        project="bench",
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": job.endpoint},
    )
    bucket = client.bucket(job.bucket)
    pairs = [(str(job.directory / name), bucket.blob(job.key(name))) for name, _ in job.files]
    workers = {"worker_type": transfer_manager.THREAD, "max_workers": 8}

    def upload() -> None:
        if len(pairs) == 1:
            transfer_manager.upload_chunks_concurrently(*pairs[0], **workers)
        else:
            transfer_manager.upload_many(pairs, raise_exception=True, **workers)

    def download() -> None:
        if len(pairs) == 1:
            path, blob = pairs[0]
            transfer_manager.download_chunks_concurrently(
                blob, path, crc32c_checksum=False, **workers
            )
        else:
            transfer_manager.download_many(
                [(blob, path) for path, blob in pairs],
                download_kwargs={"checksum": None},
                raise_exception=True,
                **workers,
            )

    return upload if job.operation == "upload" else download


if __name__ == "__main__":
    run(prepare)
