# SPDX-License-Identifier: Apache-2.0
"""The sections of the configuration that a bucket needs: where it is, and what is kept in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swansong_bucket.config import values as read
from swansong_bucket.config.values import key as _key

ORPHANS_AFTER_S_MIN = 24 * 3600.0

_section = dataclass(frozen=True, slots=True, kw_only=True)


@_section
class StoreAccess:
    """How to reach a store: the keys that a store and its mirror share."""

    url: str | None = _key(
        read.store_url,
        None,
        about="Second store, which receives a copy of each commit: another region, another cloud, "
        "or a file system. It has the same forms as `store.url`. See docs/operations/mirror.md.",
        unset="no mirror",
        example="gs://my-mirror/prefix",
    )
    endpoint: str | None = _key(
        read.http_url,
        None,
        about="Address of an S3-compatible server, of an emulator, or of the blob service of an "
        "account in another cloud of Azure.",
        unset="the cloud's",
        example="https://minio.example.org:9000",
    )
    region: str | None = _key(
        read.text(r"[a-z0-9-]{1,40}", "give a region such as us-east-1"),
        None,
        about="Region of the bucket. The key saves a request at the start.",
        unset="the SDK's",
        example="us-east-1",
    )
    profile: str | None = _key(
        read.text(r"[^\x00-\x1f\]]{1,128}", "give a profile of the AWS configuration"),
        None,
        about="Profile of the AWS configuration files in /etc/swansong/aws: see "
        "docs/operations/permissions.md. The daemon reads all sources of credentials again when "
        "the store refuses the credentials.",
        unset="the VM's role",
        example="training",
    )
    ca_bundle: Path | None = _key(
        read.path,
        None,
        about="PEM file of the certificate authorities to trust for the store.",
        unset="the system's",
        example="/etc/ssl/certs/our-ca.pem",
    )
    addressing: Literal["auto", "path", "virtual"] = _key(
        read.one_of("auto", "path", "virtual"),
        "auto",
        about="Position of an S3 bucket in URLs: `path` (https://HOST/BUCKET), `virtual` "
        "(https://BUCKET.HOST), or `auto`: `virtual` on AWS, `path` with an endpoint.",
    )


@_section
class StoreConfig(StoreAccess):
    """The store of checkpoints."""

    url: str = _key(
        read.store_url,
        about="Store of the checkpoints: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
        "az://ACCOUNT/CONTAINER/PREFIX, or file:///PATH for a mounted file system. The store must "
        "outlive the VM: a directory of the boot disk is good for a trial only. A directory needs "
        "a drop-in of the unit: see docs/operations/stores.md.",
        example="file:///var/lib/swansong/store",
    )
    signing_key_file: Path | None = _key(
        read.path,
        None,
        about="File with a key of at least 32 bytes that signs all records of the run, the same "
        "on all its VMs. Only the daemon's user may read the file: `(umask 077; openssl rand 32 "
        ">FILE)`. With a key, the daemon ignores records without its signature. See "
        "docs/operations/permissions.md.",
        unset="no signature",
        example="/etc/swansong/signing.key",
    )
    lock_days: int = _key(
        read.days,
        0,
        about="Days for which the store refuses to delete a committed checkpoint, by Object Lock "
        "of S3 or object retention of GCS; 0 for none. Objects that a newer commit references are "
        "extended. The bucket needs the feature: see docs/operations/stores.md.",
    )
    lock_mode: Literal["governance", "compliance"] = _key(
        read.one_of("governance", "compliance"),
        "governance",
        about="`governance`: a special right can end the retention early. `compliance`: nothing "
        "can, so a wrong value costs money until its end.",
    )


@_section
class MirrorConfig(StoreAccess):
    """A second store, if `mirror.url` is set."""

    background_bytes_per_s: float | None = _key(
        read.rate,
        0,
        about='Maximum rate of the copies, such as "50MB" per second; 0 for no limit. Copies '
        "pause while checkpoints are sent, and the limit does not apply after the verdict of an "
        "evacuation.",
    )
    connections: int = _key(
        read.connections,
        4,
        about="Maximum number of concurrent connections to the mirror. Each connection holds a "
        "chunk in memory.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """The commits that `swansong prune` keeps.

    A commit stays if at least one rule keeps it; 0 turns a rule off.
    Prune always keeps the newest whole commit and everything newer, the newest healthy commit, and pins.
    See docs/operations/retention.md.
    """

    keep_last: int = _key(read.count, 3, about="The newest whole commits.")
    keep_within_s: float = _key(
        read.duration, "24h", about="All commits that are younger than this, at least an hour."
    )
    keep_starts_s: float = _key(
        read.duration,
        "7d",
        about="The last whole commit of each day (UTC) of each start of the training that is younger "
        "than this, and the newest older one.",
    )
    """Without a signing key, another writer can plant newer commits of the run."""
    keep_hourly: int = _key(
        read.count,
        24,
        about="The last whole commit of each of the newest hours (UTC) that have one.",
    )
    keep_daily: int = _key(read.count, 7, about="The same for days.")
    keep_weekly: int = _key(read.count, 4, about="The same for weeks.")
    keep_monthly: int = _key(read.count, 0, about="The same for months.")
    keep_every_steps: int | None = _key(
        read.steps, 0, about="The first whole commit of each interval of this many steps."
    )
    keep_best: int = _key(
        read.count, 1, about="The best whole commits by `retention.best_metric`: the lowest values."
    )
    best_metric: str = _key(
        read.text(r"[^\x00-\x1f]{1,100}", "give a metric such as loss"),
        "loss",
        about="Loss or metric of `guard.step()`.",
    )
    best_is_highest: bool = _key(
        read.yes_or_no,
        False,
        about="The highest values are the best, as for an accuracy.",
    )
    orphans_after_s: float = _key(
        read.duration,
        "7d",
        about="Age at which an object that no manifest names is deleted, at least a day. No flush "
        "may last longer. Daemons and `swansong prune` need the same value.",
    )
    in_daemon: bool = _key(
        read.yes_or_no,
        False,
        about="The daemon prunes every six hours, on the first VM of the job. Its role then needs "
        "the right to delete.",
    )
