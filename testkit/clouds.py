# SPDX-License-Identifier: Apache-2.0
"""The emulated clouds for tests: raise a notice, read the bucket, make the store fail.

The bucket is read and written by plain HTTP with botocore's signatures, without the code under test except
for :attr:`Bucket.client` and :meth:`Bucket.restored`.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode
from xml.etree import ElementTree as ET

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from swansong_bucket.config.sections import StoreAccess
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.stores.s3.store import S3Store
from swansong_bucket.transfer.restore import restore
from swansong_bucket.transfer.target import RestoreTarget

from testkit.committed import tree
from testkit.rig import control

_ACCOUNT = Credentials("test", "test")
"""Default account of the emulator."""
SPOT_PATH = "/latest/meta-data/spot/instance-action"


@dataclass(frozen=True)
class Aws:
    """The instance metadata service of one VM."""

    url: str

    @property
    def metadata(self) -> tuple[str, str]:
        """Argument ``metadata`` of :class:`rig.Vm`."""
        return ("aws", self.url)

    def notice(self, action: str = "terminate", *, in_s: float = 30) -> datetime:
        """Announce the interruption of the VM in ``in_s`` seconds; returns the stated time."""
        return datetime.fromisoformat(control(self.url, "notice", action=action, in_s=in_s)["time"])

    def withdraw(self) -> None:
        control(self.url, "withdraw")


@dataclass(frozen=True)
class Gcp:
    """The metadata server of one VM."""

    url: str

    @property
    def metadata(self) -> tuple[str, str]:
        """Argument ``metadata`` of :class:`rig.Vm`."""
        return ("gcp", self.url)

    def preempt(self) -> None:
        control(self.url, "set", key="instance/preempted", value="TRUE")


@dataclass(frozen=True)
class Azure:
    """The metadata service of one VM."""

    url: str

    @property
    def metadata(self) -> tuple[str, str]:
        """Argument ``metadata`` of :class:`rig.Vm`."""
        return ("azure", self.url)

    def event(self, type_: str, *, in_s: float, **more: object) -> str:
        """Announce an event of the VM; returns its id."""
        return str(control(self.url, "event", type=type_, in_s=in_s, **more)["id"])

    def end(self, event_id: str) -> None:
        """The event is over, or withdrawn."""
        control(self.url, "end", id=event_id)

    def approvals(self) -> list[str]:
        """The ids of the events that the VM has approved."""
        return list(control(self.url, "approvals"))


@dataclass(frozen=True)
class Bucket:
    """One team's part of the bucket ``ckpt`` in the S3 emulator.  Keys have no prefix."""

    endpoint: str
    prefix: str

    @property
    def store(self) -> dict[str, str]:
        """Table ``[store]`` of the configuration."""
        url = f"s3://ckpt/{self.prefix}"
        return {"url": url, "endpoint": self.endpoint, "region": "us-east-1"}

    @property
    def client(self) -> S3Store:
        """The store as the daemon opens it, with the credentials of the environment."""
        return S3Store(StoreAccess(**self.store))

    def order(self, name: str, **query: object) -> Any:
        """Make the store fail, see :mod:`testkit.emulators.store_control`."""
        return control(self.endpoint, f"{name}?{urlencode(query)}")

    def keys(self, below: str = "") -> list[str]:
        query = urlencode({"list-type": 2, "prefix": f"{self.prefix}/{below}"})
        listing = ET.fromstring(self._ask("GET", f"?{query}"))
        assert listing.findtext("{*}IsTruncated") != "true"
        names = [item.findtext("{*}Key") or "" for item in listing.findall("{*}Contents")]
        return [name.removeprefix(f"{self.prefix}/") for name in names]

    def get(self, key: str) -> bytes:
        return self._ask("GET", quote(f"/{self.prefix}/{key}"))

    def put(self, key: str, data: bytes) -> None:
        self._ask("PUT", quote(f"/{self.prefix}/{key}"), data)

    def delete(self, key: str) -> None:
        self._ask("DELETE", quote(f"/{self.prefix}/{key}"))

    def objects(self, below: str = "") -> dict[str, bytes]:
        """All objects, by key."""
        return {key: self.get(key) for key in self.keys(below)}

    def damage(self, shard: dict[str, Any]) -> None:
        """Flip one bit of a shard of :meth:`manifests`."""
        data = bytearray(self.get(shard["key"]))
        first = shard["extents"][0]
        data[0 if isinstance(first, int) else first[1]] ^= 1
        self.put(shard["key"], bytes(data))

    def manifests(self, run: str = "run") -> list[dict[str, Any]]:
        """The manifests of all commits, newest first; each shard has the ``key`` of its first chunk, too."""
        keys = sorted(self.keys(f"{run}/commits/"), reverse=True)
        found: list[dict[str, Any]] = [json.loads(self.get(key).split(b"\n")[0]) for key in keys]
        for manifest in found:
            for shard in (each for each in manifest["shards"] if each["extents"]):
                first = shard["extents"][0]
                number = first if isinstance(first, int) else first[0]
                shard["key"] = f"{run}/data/{manifest['chunks'][number][0]}"
        return found

    def content(self, manifest: dict[str, Any]) -> dict[str, bytes]:
        """The bytes of each shard of a manifest, by path."""
        prefix = f"{manifest['run']}/data/"
        chunks = [self.get(prefix + name) for name, _ in manifest["chunks"]]

        def bytes_of(extent: int | list[int]) -> bytes:
            if isinstance(extent, int):
                return chunks[extent]
            number, offset, size_bytes = extent
            return chunks[number][offset : offset + size_bytes]

        return {
            each["path"]: b"".join(map(bytes_of, each["extents"])) for each in manifest["shards"]
        }

    def restored(self, place: Path) -> dict[str, bytes]:
        """Files of the newest whole commit, restored as by a new VM."""
        restore(self.client, RunKeys("run"), RestoreTarget(place))
        return tree(place)

    def chunks_sent(self) -> Counter[str]:
        """Number of requests for each chunk since the last ``clear``, by digest."""
        wanted = re.compile(rf"/{self.prefix}/run/data/[0-9]{{8}}/([0-9a-f]{{64}})-")
        found = (wanted.search(key) for method, key in self.order("requests") if method == "PUT")
        return Counter(match[1] for match in found if match)

    def farewells(self, run: str = "run") -> list[dict[str, Any]]:
        """The farewells of all evacuations, oldest first."""
        return [json.loads(self.get(key)) for key in sorted(self.keys(f"{run}/farewells/"))]

    def _ask(self, method: str, target: str, data: bytes | None = None) -> bytes:
        signed = AWSRequest(method, f"{self.endpoint}/ckpt{target}", data=data)
        signed.headers["Content-Type"] = "application/octet-stream"
        S3SigV4Auth(_ACCOUNT, "s3", "us-east-1").add_auth(signed)
        headers = dict(signed.headers)
        request = urllib.request.Request(signed.url, data=data, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            content: bytes = answer.read()
        return content
