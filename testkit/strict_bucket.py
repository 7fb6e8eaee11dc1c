# SPDX-License-Identifier: Apache-2.0
"""A bucket of the strict S3 emulator, which returns the checksums of parts, as S3 does."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from blake3 import blake3
from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.stores.s3.store import S3Store
from swansong_bucket.transfer.restore import restore
from swansong_bucket.transfer.target import RestoreTarget

from testkit.committed import tree
from testkit.rig import control

ACCOUNT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
"""Default account of the emulator."""


@dataclass(frozen=True)
class Strict:
    """One prefix in a bucket of the strict S3 emulator."""

    url: str
    prefix: str

    def table(self, url: str = "") -> dict[str, str]:
        """Table ``[store]`` of the configuration."""
        where = f"s3://ckpt/{self.prefix}"
        return {"url": where, "endpoint": url or self.url, "region": "us-east-1"}

    @property
    def store(self) -> S3Store:
        return S3Store(StoreAccess(**self.table()))

    def order(self, name: str, **query: object) -> None:
        control(self.url, f"{name}?{urlencode(query)}")

    def objects(self, below: str) -> dict[str, str]:
        """SHA-256 of every object below a prefix, by key."""
        store = self.store
        found = [info.key for info in store.list(below)]
        return {key: hashlib.sha256(store.get(key)).hexdigest() for key in found}

    def manifests(self) -> list[dict[str, Any]]:
        """All manifests, newest first; each shard has the ``keys`` of its chunks, too."""
        store = self.store
        keys = sorted((info.key for info in store.list("run/commits/")), reverse=True)
        found: list[dict[str, Any]] = [json.loads(store.get(key)) for key in keys]
        for manifest in found:
            for shard in manifest["shards"]:
                numbers = [each if isinstance(each, int) else each[0] for each in shard["extents"]]
                shard["keys"] = [f"run/data/{manifest['chunks'][n][0]}" for n in numbers]
        return found

    def restored(self, place: Path) -> dict[str, bytes]:
        """Files of the newest whole commit, restored as by a new VM."""
        restore(self.store, RunKeys("run"), RestoreTarget(place))
        return tree(place)

    def chunks_sent(self) -> Counter[str]:
        """Number of requests for each chunk since the last ``clear``, by digest."""
        wanted = re.compile(rf"/{self.prefix}/run/data/[0-9]{{8}}/([0-9a-f]{{64}})-")
        requests = control(self.url, "requests")
        found = (wanted.search(target) for method, target in requests if method == "PUT")
        return Counter(match[1] for match in found if match)


def digests_of(data: bytes, chunk_bytes: int) -> list[str]:
    """The digests of the chunks of a large file, in order."""
    starts = range(0, len(data), chunk_bytes)
    return [blake3(data[start : start + chunk_bytes]).hexdigest() for start in starts]
