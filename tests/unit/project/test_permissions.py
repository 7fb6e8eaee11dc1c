# SPDX-License-Identifier: Apache-2.0
"""The permissions of a VM are exactly those that the code needs, each with a reason."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest
import yaml
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.s3 import settings
from swansongd.sources import asg

from testkit import REPOSITORY

PERMISSIONS = REPOSITORY / "packer" / "permissions"

# Permissions that the clouds document for each method of the store's contract: of S3, and of GCS.
NEEDS: dict[str, tuple[set[str], set[str]]] = {
    # After a refused create the store reads the existing object.
    "put": ({"PutObject"}, {"objects.create", "objects.get", "objects.list"}),
    "get": ({"GetObject"}, {"objects.get"}),
    "get_range": ({"GetObject"}, {"objects.get"}),
    # With the right to list, the store distinguishes a missing object from a missing bucket.
    "head": ({"GetObject", "ListBucket"}, {"objects.get", "objects.list"}),
    "list": ({"ListBucket"}, {"objects.list"}),
    "page": ({"ListBucket"}, {"objects.list"}),
    "folders": ({"ListBucket"}, {"objects.list"}),
    "create": ({"PutObject", "GetObject"}, {"objects.create", "objects.get", "objects.list"}),
    "check": ({"ListBucket"}, {"objects.list"}),
    "warm": ({"ListBucket"}, {"objects.list"}),
    # Only doctor deletes objects, those of its rehearsal, and works without the permission.
    "delete": (set(), set()),
    "delete_many": (set(), set()),
    # In a file of their own, for store.lock_days.
    "lock": (set(), set()),
}

# Permissions of each further AWS operation, under its name in our code or in boto3.
OPERATIONS: dict[str, set[str]] = {
    "GetBucketLifecycleConfiguration": {"s3:GetLifecycleConfiguration"},
    "GetBucketVersioning": {"s3:GetBucketVersioning"},
    "GetBucketPolicy": {"s3:GetBucketPolicy"},
    "GetObjectLockConfiguration": {"s3:GetBucketObjectLockConfiguration"},
    "record_lifecycle_action_heartbeat": {"autoscaling:RecordLifecycleActionHeartbeat"},
    "complete_lifecycle_action": {"autoscaling:CompleteLifecycleAction"},
}
OTHER_ROLES = ("aws-vm-lock.json", "aws-prune.json", "aws-exporter.json")
OTHER_GCP_ROLES = (
    "gcp-vm-lock.yaml",
    "gcp-prune.yaml",
    "gcp-prune-delete.yaml",
    "gcp-exporter.yaml",
)
PAGES = ("README.md", "prune.md", "exporter.md")


def statements(file: str = "aws-vm.json") -> list[dict[str, Any]]:
    policy = json.loads((PERMISSIONS / file).read_text())
    assert set(policy) == {"Version", "Statement"}
    assert policy["Version"] == "2012-10-17"
    found: list[dict[str, Any]] = policy["Statement"]
    return found


def actions(statement: dict[str, Any]) -> list[str]:
    named = statement["Action"]
    return [named] if isinstance(named, str) else named


def aws(file: str = "aws-vm.json") -> set[str]:
    allowing = [each for each in statements(file) if each["Effect"] == "Allow"]
    return {action for statement in allowing for action in actions(statement)}


def gcp(file: str = "gcp-vm.yaml") -> list[str]:
    role = yaml.safe_load((PERMISSIONS / file).read_text())
    assert set(role) == {"title", "description", "stage", "includedPermissions"}
    found: list[str] = role["includedPermissions"]
    return found


def operations(module: Any) -> set[str]:
    """The AWS operations that a module names."""
    return set(
        re.findall(
            r'"(Get[A-Z][a-zA-Z]+|[a-z]+_lifecycle_action[a-z_]*)"', inspect.getsource(module)
        )
    )


def test_every_method_of_the_contract_has_its_permissions() -> None:
    """A new kind of request needs a row in this table."""
    methods = {
        name
        for name, member in vars(ObjectStore).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    assert methods == set(NEEDS)


@pytest.mark.fault("S21")
def test_aws_policy_allows_what_the_code_does_and_no_more() -> None:
    """Each operation in the code has its permission, except doctor's delete: no duplicates, no wildcards."""
    assert operations(settings) | operations(asg) == set(OPERATIONS)
    needed = {f"s3:{action}" for on_s3, _ in NEEDS.values() for action in on_s3}
    listed = [action for statement in statements() for action in actions(statement)]
    assert sorted(listed) == sorted(needed.union(*OPERATIONS.values()))
    assert not [action for action in listed if "*" in action or "Delete" in action]


@pytest.mark.fault("S21")
def test_aws_policy_is_limited_to_prefix_and_group() -> None:
    """The resources are objects below the prefix, its listing, one bucket and one group."""
    resources = {statement["Sid"]: statement["Resource"] for statement in statements()}
    assert resources == {
        "Checkpoints": "arn:aws:s3:::BUCKET/PREFIX/*",
        "Listing": "arn:aws:s3:::BUCKET",
        "AboutTheBucket": "arn:aws:s3:::BUCKET",
        "LifecycleHook": "arn:aws:autoscaling:*:*:autoScalingGroup:*:autoScalingGroupName/GROUP",
    }
    assert {statement["Effect"] for statement in statements()} == {"Allow"}
    (listing,) = (s for s in statements() if s["Sid"] == "Listing")
    assert listing["Condition"] == {"StringLike": {"s3:prefix": "PREFIX/*"}}


@pytest.mark.fault("S21")
def test_gcp_role_allows_what_the_code_does_and_no_more() -> None:
    """The permissions of all methods, sorted, without duplicates, without delete."""
    needed = {f"storage.{permission}" for _, on_gcs in NEEDS.values() for permission in on_gcs}
    assert gcp() == sorted(needed)
    assert "storage.objects.delete" not in gcp()


@pytest.mark.fault("S21")
def test_azure_role_allows_what_the_code_does_and_no_more() -> None:
    """Each permission of GCS has its action of Azure, all in the page; none overwrites or deletes."""
    actions = {
        "objects.create": "blobs/add/action",
        "objects.get": "blobs/read",
        "objects.list": "blobs/read",
    }
    needed = {actions[permission] for _, on_gcs in NEEDS.values() for permission in on_gcs}
    role = json.loads((PERMISSIONS / "azure-vm.json").read_text())
    where = "Microsoft.Storage/storageAccounts/blobServices/containers/"
    assert role["Actions"] == role["NotActions"] == role["NotDataActions"] == []
    assert sorted(role["DataActions"]) == sorted(f"{where}{action}" for action in needed)
    readme = (PERMISSIONS / "README.md").read_text()
    assert set(re.findall(r"^\| `(blobs/[a-z/]+)` \|", readme, re.MULTILINE)) == needed


@pytest.mark.fault("K09")
def test_the_prune_roles_allow_what_prune_does_and_no_more() -> None:
    """It lists, reads, asks for retentions and deletes; it writes nothing."""
    used = ("get", "list")
    on_s3 = {action for name in used for action in NEEDS[name][0]}
    deleting = {"DeleteObject", "GetObjectRetention", "GetBucketObjectLockConfiguration"}
    assert aws("aws-prune.json") == {f"s3:{action}" for action in on_s3 | deleting}
    on_gcs = {permission for name in used for permission in NEEDS[name][1]}
    assert gcp("gcp-prune.yaml") == sorted(f"storage.{each}" for each in {*on_gcs, "buckets.get"})
    assert gcp("gcp-prune-delete.yaml") == ["storage.objects.delete"]


def test_the_exporter_roles_allow_what_the_exporter_does_and_no_more() -> None:
    """It lists and reads: on S3 only the objects below four folders of a run."""
    used = ("get", "head", "page", "folders")
    assert aws("aws-exporter.json") == {
        f"s3:{action}" for name in used for action in NEEDS[name][0]
    }
    (reading,) = (s for s in statements("aws-exporter.json") if s["Sid"] == "Records")
    assert [resource.split("/*/")[1] for resource in reading["Resource"]] == [
        f"{folder}/*" for folder in ("commits", "farewells", "generations", "resumptions")
    ]
    on_gcs = {permission for name in used for permission in NEEDS[name][1]}
    assert gcp("gcp-exporter.yaml") == sorted(f"storage.{each}" for each in on_gcs)


def test_each_permission_has_its_reason() -> None:
    """The tables of the pages list exactly the permissions of the files, each with a reason."""
    readme = "\n".join((PERMISSIONS / page).read_text() for page in PAGES)
    rows = re.findall(r"^\| `([a-z0-9]+[:.][A-Za-z.]+)` \| (.+) \|$", readme, re.MULTILINE)
    others = [aws(file) for file in OTHER_ROLES]
    on_gcp = [gcp(file) for file in OTHER_GCP_ROLES]
    wanted = [name for names in (aws(), gcp(), *others, *on_gcp) for name in names]
    assert sorted(name for name, _ in rows) == sorted(wanted)
    assert min(len(reason) for _, reason in rows) > 15
