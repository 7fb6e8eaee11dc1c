# SPDX-License-Identifier: Apache-2.0
"""Doctor's checks of the bucket, and ``swansong lifecycle``: each printed command makes its check succeed."""

from __future__ import annotations

import json
import shlex
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.stores.settings import LifecycleRule
from swansong_tools.commands.main import main
from swansong_tools.doctor import bucket_policy as bucket
from swansong_tools.doctor import store as of_store
from swansong_tools.doctor.findings import Judgement, Level
from swansong_tools.doctor.installation import Installation, own_account
from swansong_tools.upkeep import lifecycle_rules
from swansongd.config.config import Config, parse

from testkit import REPOSITORY
from testkit.store_backends import Cloud

from .test_store_locks import client_of

KEYS = RunKeys("run")
EXPIRES = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}}


class Place:
    """A new bucket of an emulator, and doctor's checks of it."""

    def __init__(self, cloud: Cloud, **features: int) -> None:
        self.cloud = cloud
        self.name = f"settings-{uuid.uuid4().hex[:12]}"
        cloud.order("bucket", name=self.name, **features)
        scheme = "s3" if cloud.is_s3 else "gs"
        self.store = {
            "url": f"{scheme}://{self.name}/p",
            "endpoint": cloud.server.url,
            "region": "us-east-1",
        }
        self.client: Any = client_of(cloud) if cloud.is_s3 else None

    def config(self, **store: object) -> Config:
        tables = {"run": {"name": "run"}, "staging": {"path": "/s"}}
        return parse({**tables, "store": {**self.store, **store}})

    def judged(self, **store: object) -> dict[str, Judgement]:
        vm = Installation(path=Path("/c"), configured=self.config(**store), user=own_account())
        return {each.name: each.probe(vm) for each in of_store.SETTINGS}

    def levels(self, **store: object) -> dict[str, Level]:
        return {name: found.level for name, found in self.judged(**store).items()}


@pytest.fixture
def s3(open_cloud: Callable[[str], Cloud]) -> Place:
    return Place(open_cloud("s3"))


def option(command: str, name: str) -> str:
    """The value of an option in a printed command."""
    words = shlex.split(command)
    return words[words.index(name) + 1]


def test_each_printed_command_makes_its_check_succeed(s3: Place) -> None:
    """A new bucket of S3 lacks all settings; the values in the printed commands satisfy doctor."""
    found = s3.judged(lock_days=30)
    assert [found[name].level for name in found] == ["ok", "warning", "failure", "warning"]
    assert "Status=Enabled" in found["versioning"].fix
    s3.client.put_bucket_versioning(Bucket=s3.name, VersioningConfiguration={"Status": "Enabled"})
    assert "put-object-lock-configuration" in found["object lock"].fix
    s3.client.put_object_lock_configuration(
        Bucket=s3.name, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled"}
    )
    s3.client.put_bucket_policy(
        Bucket=s3.name, Policy=option(found["bucket policy"].fix, "--policy")
    )
    assert set(s3.levels(lock_days=30).values()) == {Level.OK}


@pytest.mark.fault("K10")
def test_a_setting_that_cannot_be_read_is_unknown(s3: Place) -> None:
    """Without the rights, no finding is ok; nothing is guessed."""
    statement = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "*"}
    s3.cloud.order("role", policy=json.dumps({"Statement": [statement]}))
    found = s3.judged(lock_days=30)
    assert {judged.level for judged in found.values()} == {Level.SKIPPED}
    assert all(judged.found.startswith("unknown") for judged in found.values())


@pytest.mark.fault("K05")
def test_a_role_that_cannot_lock_is_a_failure(s3: Place) -> None:
    """Every write of such a daemon would fail; doctor finds out without writing."""
    place = Place(s3.cloud, lock=1)
    may = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    may_not = {"Effect": "Deny", "Action": "s3:PutObjectRetention", "Resource": "*"}
    s3.cloud.order("role", policy=json.dumps({"Statement": [may, may_not]}))
    found = place.judged(lock_days=30)["object lock"]
    assert found.level is Level.FAILURE
    assert "aws-vm-lock.json" in found.fix


@pytest.mark.fault("K11")
def test_a_rule_that_deletes_checkpoints_by_age_is_a_failure(s3: Place) -> None:
    """The rule is named; it counts although other rules fit."""
    rules = [*lifecycle_rules.for_s3(KEYS, "p/")["Rules"], EXPIRES]
    s3.client.put_bucket_lifecycle_configuration(
        Bucket=s3.name, LifecycleConfiguration={"Rules": rules}
    )
    found = s3.judged()["lifecycle rule"]
    assert found.level is Level.FAILURE
    assert "the rule 'old' of all objects of the bucket deletes checkpoints by age" in found.found


def test_settings_of_a_foreign_s3_are_read(open_cloud: Callable[[str], Cloud]) -> None:
    """Settings that another client has set are read; those of a new bucket are absent."""
    cloud, name = open_cloud("seaweedfs"), f"settings-{uuid.uuid4().hex[:12]}"
    client = client_of(cloud)
    client.create_bucket(Bucket=name)
    settings = cloud.open(bucket=name).settings
    assert not settings.is_versioned()
    assert not settings.has_lock()
    assert settings.lifecycle_rules() == []
    assert settings.policy() is None
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    rule = {**EXPIRES, "Filter": {"Prefix": "p/"}}
    client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": [rule]})
    assert settings.is_versioned()
    assert settings.lifecycle_rules() == [LifecycleRule(name="old", prefixes=("p/",), deletes=True)]


@pytest.mark.fault("K10")
@pytest.mark.parametrize("how", ["empty", "half", "foreign"])
def test_a_damaged_setting_is_unknown(s3: Place, how: str) -> None:
    """boto3 alone reads an empty document, or the page of a proxy, as a bucket without rules."""
    place = Place(s3.cloud, lock=1)
    rules = lifecycle_rules.for_s3(KEYS, "p/")
    place.client.put_bucket_lifecycle_configuration(Bucket=place.name, LifecycleConfiguration=rules)
    policy = json.dumps(bucket.added(None, place.name, KEYS, "p/"))
    place.client.put_bucket_policy(Bucket=place.name, Policy=policy)
    for setting in ("lifecycle", "versioning", "object-lock", "policy"):
        place.cloud.order("spoil", how=how, method="GET", match=f"?{setting}")
    assert set(place.levels(lock_days=30).values()) == {Level.SKIPPED}
    assert set(place.levels(lock_days=30).values()) == {Level.OK}


def test_too_many_rules_are_unknown(s3: Place) -> None:
    """S3 has up to 1,000 rules; a response with more is not judged."""
    rules = [{**EXPIRES, "ID": str(number)} for number in range(1001)]
    s3.client.put_bucket_lifecycle_configuration(
        Bucket=s3.name, LifecycleConfiguration={"Rules": rules}
    )
    assert s3.levels()["lifecycle rule"] is Level.SKIPPED


@pytest.mark.fault("K11")
def test_each_transition_of_a_rule_counts(s3: Place) -> None:
    """A rule that moves objects to a readable class first, and offline later, is a failure."""
    moves = [{"Days": 30, "StorageClass": "STANDARD_IA"}, {"Days": 90, "StorageClass": "GLACIER"}]
    rule = {"ID": "cold", "Status": "Enabled", "Filter": {"Prefix": ""}, "Transitions": moves}
    s3.client.put_bucket_lifecycle_configuration(
        Bucket=s3.name, LifecycleConfiguration={"Rules": [rule]}
    )
    found = s3.judged()["lifecycle rule"]
    assert found.level is Level.FAILURE
    assert "moves checkpoints to GLACIER" in found.found


def test_gcs_settings(open_cloud: Callable[[str], Cloud]) -> None:
    """The same checks on GCS; the role of the VM cannot overwrite, so no policy is needed."""
    cloud = open_cloud("gcs")
    bare = Place(cloud)
    assert list(bare.levels(lock_days=30).values()) == ["ok", "warning", "failure", "warning"]
    cloud.order("role", delete=0)
    whole = Place(cloud, retention=1, versioning=1)
    for old_class in lifecycle_rules.GCS_CLASSES:
        set_rules(whole, lifecycle_rules.for_gcs(KEYS, "p/", old_class))
        assert set(whole.levels(lock_days=30).values()) == {Level.OK}
    expires = {"action": {"type": "Delete"}, "condition": {"age": 30}}
    set_rules(whole, {"rule": [expires]})
    assert whole.levels()["lifecycle rule"] is Level.FAILURE
    cloud.order("role", delete=0, settings=0)
    found = whole.judged(lock_days=30)
    unknown = [name for name, judged in found.items() if judged.found.startswith("unknown")]
    assert unknown == ["lifecycle rule", "versioning", "object lock"]


def set_rules(place: Place, rules: dict[str, Any]) -> None:
    where = f"{place.cloud.server.url}/storage/v1/b/{place.name}"
    requests.patch(where, json={"lifecycle": rules}, timeout=10).raise_for_status()


# ---------------------------------------------------------------- swansong lifecycle


@pytest.mark.fault("K11")
def test_swansong_lifecycle_prints_rules_and_warns(
    s3: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The printed rules satisfy doctor; a harmful existing rule is named; unreadable rules are unknown."""
    file = tmp_path / "swansong.toml"
    store = "\n".join(f'{name} = "{value}"' for name, value in s3.store.items())
    file.write_text(f'[run]\nname = "run"\n[staging]\npath = "/s"\n[store]\n{store}\n')
    words = ["--config", str(file), "lifecycle"]
    s3.client.put_bucket_lifecycle_configuration(
        Bucket=s3.name, LifecycleConfiguration={"Rules": [EXPIRES]}
    )
    assert main([*words, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["existing"] == ["old"]
    assert "deletes checkpoints by age" in told["warnings"][0]
    assert main(words) == 0
    shown = capfd.readouterr()
    assert "put-bucket-lifecycle-configuration" in shown.out
    assert "deletes checkpoints by age" in shown.err
    assert "replaces all 1 existing rules" in shown.err
    s3.client.put_bucket_lifecycle_configuration(
        Bucket=s3.name, LifecycleConfiguration=told["rules"]
    )
    assert s3.levels()["lifecycle rule"] is Level.OK
    assert main([*words, "--class", "GLACIER_IR", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["rules"]["Rules"][0]["Transitions"] == [{"Days": 30, "StorageClass": "GLACIER_IR"}]
    s3.client.put_bucket_lifecycle_configuration(
        Bucket=s3.name, LifecycleConfiguration=told["rules"]
    )
    assert s3.levels()["lifecycle rule"] is Level.OK
    assert main([*words, "--class", "DEEP_ARCHIVE"]) == 2
    refused = capfd.readouterr().err
    assert "--class: no restore reads from it (got 'DEEP_ARCHIVE'); use STANDARD_IA or" in refused
    statement = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "*"}
    s3.cloud.order("role", policy=json.dumps({"Statement": [statement]}))
    assert main([*words, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["existing"] is None
    assert told["warnings"][0].startswith("unknown")


def test_our_own_rules_harm_nothing() -> None:
    """They delete rehearsals only."""
    own = [LifecycleRule(name="probes", prefixes=("p/run/probes/",), deletes=True)]
    assert lifecycle_rules.harmful(own, KEYS, "p/") == []


@pytest.mark.fault("K11")
@pytest.mark.parametrize(
    "prefix", ["", "p/", "p/ru", "p/run/", "p/run/data/00000001/", "p/run/pro"]
)
def test_a_rule_harms_by_any_overlap(prefix: str) -> None:
    """Also one of a part of the run, or of a longer prefix in which the run lies."""
    rule = LifecycleRule(name="x", prefixes=("elsewhere/", prefix), deletes=True)
    assert len(lifecycle_rules.harmful([rule], KEYS, "p/")) == 1
    moves = LifecycleRule(name="x", prefixes=(prefix,), storage_classes=("STANDARD_IA", "GLACIER"))
    assert len(lifecycle_rules.harmful([moves], KEYS, "p/")) == 1
    near = LifecycleRule(name="x", prefixes=(prefix,), storage_classes=("STANDARD_IA",))
    assert lifecycle_rules.harmful([near], KEYS, "p/") == []


# ---------------------------------------------------------------- policies


def test_the_statements_are_those_of_the_file() -> None:
    """packer/permissions has the same statements, for a reader without doctor."""
    file = (REPOSITORY / "packer/permissions/aws-bucket-policy.json").read_text()
    wanted = json.loads(file.replace("BUCKET", "b").replace("PREFIX", "p").replace("RUN", "run"))
    assert bucket.added(None, "b", KEYS, "p/") == wanted


def test_existing_statements_stay() -> None:
    """Also those of another run, which have the same names."""
    first = bucket.added(None, "b", RunKeys("other"), "p/")
    both = bucket.added(first, "b", KEYS, "p/")
    assert both["Statement"][:2] == first["Statement"]
    names = [statement["Sid"] for statement in both["Statement"]]
    assert len(set(names)) == len(names) == 4
    for keys in (RunKeys("other"), KEYS):
        assert bucket.enforces_create_if_absent(both, "b", keys, "p/")


@pytest.mark.parametrize(
    "change",
    [
        {"Effect": "Allow"},
        {"Principal": {"AWS": "arn:aws:iam::1:role/x"}},
        {"Action": "s3:DeleteObject"},
        {"Resource": "arn:aws:s3:::b/p/run/commits/*"},
        {"Condition": {}},
        {"Condition": {"Null": {"s3:if-none-match": "false"}}},
        {"Condition": {"Null": {"s3:if-none-match": "true"}, "StringEquals": {"aws:x": "y"}}},
        {"Condition": []},
    ],
    ids=str,
)
def test_a_weaker_statement_does_not_count(change: dict[str, Any]) -> None:
    """Each condition that lets an overwrite pass is noticed."""
    statement = {**bucket.statements("b", KEYS, "p/")[0], **change}
    assert not bucket.enforces_create_if_absent({"Statement": statement}, "b", KEYS, "p/")


def test_a_wider_statement_counts() -> None:
    """A wildcard over all runs, and the exemption of requests that create no object."""
    null = {"Null": {"s3:If-None-Match": "true"}, "Bool": {"s3:ObjectCreationOperation": "true"}}
    statement = {
        "Effect": "Deny",
        "Principal": {"AWS": "*"},
        "Action": "s3:Put*",
        "Resource": "arn:aws:s3:::b/*",
        "Condition": null,
    }
    assert bucket.enforces_create_if_absent({"Statement": [statement]}, "b", KEYS, "p/")
