# SPDX-License-Identifier: Apache-2.0
"""The policies in packer/permissions, as the stores enforce them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError
from swansong_bucket.errors import Exists, Permanent
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.retention import DAY_S, Lock
from swansong_bucket.stores.s3.store import S3Store

from testkit import REPOSITORY
from testkit.store_backends import Cloud, store_at

from .test_store_locks import client_of

PERMISSIONS = REPOSITORY / "packer" / "permissions"
CLAIM = "run/generations/00000001.json"
COMMIT = "run/commits/00000001/000000000001/00000-of-00001.json"
DATA = f"run/data/00000001/{64 * '0'}-n"


def policy(file: str, bucket: str) -> str:
    """A file of packer/permissions for the run ``run`` below the prefix ``p``."""
    text = (PERMISSIONS / file).read_text()
    return text.replace("BUCKET", bucket).replace("PREFIX", "p").replace("RUN", "run")


class Bucket:
    """A bucket of the strict S3 with the bucket policy, for administrators and for roles."""

    def __init__(self, cloud: Cloud, *, lock: bool = False) -> None:
        self.cloud = cloud
        self.name = f"policy-{uuid.uuid4().hex[:12]}"
        cloud.order("bucket", name=self.name, lock=int(lock))
        self.client: Any = client_of(cloud)
        text = policy("aws-bucket-policy.json", self.name)
        self.client.put_bucket_policy(Bucket=self.name, Policy=text)

    def store(self, **options: Any) -> S3Store:
        endpoint = self.cloud.server.url
        return store_at(f"s3://{self.name}/p", endpoint, region="us-east-1", **options)

    def as_role(self, *files: str) -> S3Store:
        """The store with the rights of these files."""
        statements = [
            statement
            for file in files
            for statement in json.loads(policy(file, self.name))["Statement"]
            if "autoscaling" not in str(statement["Action"])
        ]
        self.cloud.order("role", policy=json.dumps({"Statement": statements}))
        return self.store()

    def refuses(self, operation: str, key: str, **options: Any) -> bool:
        try:
            getattr(self.client, operation)(Bucket=self.name, Key=f"p/{key}", **options)
        except ClientError as error:
            return bool(error.response["Error"]["Code"] == "AccessDenied")
        return False


@pytest.fixture
def bucket(open_cloud: Callable[[str], Cloud]) -> Bucket:
    return Bucket(open_cloud("s3"))


@pytest.mark.fault("K08")
@pytest.mark.parametrize("key", [CLAIM, COMMIT])
def test_the_bucket_policy_enforces_create_if_absent(bucket: Bucket, key: str) -> None:
    """No one overwrites a claim or a manifest, also not in parts; the daemon's own requests pass."""
    store = bucket.store()
    store.put(key, b"first", if_absent=True)
    assert bucket.refuses("put_object", key, Body=b"attack")
    assert bucket.refuses("create_multipart_upload", key)
    with pytest.raises(Exists):
        store.put(key, b"second", if_absent=True)
    assert store.get(key) == b"first"


@pytest.mark.fault("K08")
def test_the_bucket_policy_restricts_nothing_else(bucket: Bucket) -> None:
    """Chunks, farewells and pins pass."""
    store = bucket.store()
    store.create(DATA, Body(b"chunk"))
    store.put("run/farewells/x.json", b"{}", if_absent=True)
    store.put("other/pins/x.json", b"{}")


@pytest.mark.fault("K09")
def test_no_one_deletes_a_claim(bucket: Bucket) -> None:
    """A deleted claim would let two VMs hold one generation."""
    bucket.store().put(CLAIM, b"claim", if_absent=True)
    assert bucket.refuses("delete_object", CLAIM)
    with pytest.raises(Permanent):
        bucket.store().delete(CLAIM)


@pytest.mark.fault("K09")
def test_the_prune_role_deletes_commits_and_data_only(bucket: Bucket) -> None:
    """Single, conditional and multi-object deletes; claims, pins and farewells stay."""
    writer = bucket.store()
    keys = [COMMIT, DATA, f"{COMMIT}.2", f"{DATA}.2", "run/pins/a.json", "run/farewells/f.json"]
    for key in [*keys, CLAIM]:
        writer.put(key, b"x", if_absent=True)
    store = bucket.as_role("aws-prune.json")
    infos = {info.key: info for info in store.list("run/")}
    store.delete(COMMIT, if_tag=infos[COMMIT].tag)
    store.delete(DATA)
    remaining = store.delete_many([infos[key] for key in [*keys[2:], CLAIM]])
    assert set(remaining) == {"run/pins/a.json", "run/farewells/f.json", CLAIM}
    assert set(remaining.values()) == {"AccessDenied"}
    for key in remaining:
        with pytest.raises(Permanent):
            store.delete(key)
    for key in (COMMIT, DATA, CLAIM):
        with pytest.raises(Permanent):
            store.put(key, b"x", if_absent=True)
    assert store.get(CLAIM) == b"x"


@pytest.mark.fault("K05")
def test_the_vm_role_locks_with_its_second_file(open_cloud: Callable[[str], Cloud]) -> None:
    """It writes and extends retentions, and deletes nothing; without the file a locked write is refused."""
    bucket = Bucket(open_cloud("s3"), lock=True)
    lock = Lock("governance", lambda _: DAY_S)
    bucket.as_role("aws-vm.json")
    with pytest.raises(Permanent) as refused:
        bucket.store(lock=lock).put(COMMIT, b"x", if_absent=True)
    assert "aws-vm-lock.json" in refused.value.hint
    bucket.as_role("aws-vm.json", "aws-vm-lock.json")
    store = bucket.store(lock=lock)
    store.put(COMMIT, b"x", if_absent=True)
    assert store.lock(COMMIT) is not None
    assert store.settings.is_versioned()
    assert store.settings.has_lock()
    assert store.settings.policy() is not None
    with pytest.raises(Permanent):
        store.delete(COMMIT)
    assert store.get(COMMIT) == b"x"


@pytest.mark.fault("K09")
def test_the_prune_role_of_gcs_deletes_by_name(open_cloud: Callable[[str], Cloud]) -> None:
    """The condition on the role restricts deletes to commits and data."""
    cloud = open_cloud("gcs")
    name = f"policy-{uuid.uuid4().hex[:12]}"
    cloud.order("bucket", name=name)
    store = store_at(f"gs://{name}/p", cloud.server.url)
    for key in (CLAIM, COMMIT, DATA):
        store.put(key, b"x", if_absent=True)
    cloud.order("role", delete_below="p/run/commits/,p/run/data/")
    store.delete(COMMIT)
    store.delete(DATA)
    with pytest.raises(Permanent):
        store.delete(CLAIM)
    assert [info.key for info in store.list("")] == [CLAIM]


@pytest.mark.parametrize(
    "document",
    [
        '{"Statement": []}',
        '{"Statement": [{"Effect": "Deny", "Action": "s3:*", "Resource": "*", "NotPrincipal": "x"}]}',
        '{"Statement": [{"Effect": "Deny", "Action": "s3:*", "Resource": "*", "Condition": {"X": {}}}]}',
    ],
)
def test_the_emulator_refuses_a_policy_that_it_cannot_evaluate(
    bucket: Bucket, document: str
) -> None:
    """A test must not pass because a condition is ignored."""
    with pytest.raises(ClientError, match="MalformedPolicy"):
        bucket.client.put_bucket_policy(Bucket=bucket.name, Policy=document)
