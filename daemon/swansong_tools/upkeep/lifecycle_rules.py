# SPDX-License-Identifier: Apache-2.0
"""Lifecycle rules that fit the layout of a run, and the judgement of existing rules.  Pure.

A rule knows the age of an object, and neither commits nor pins.  So no rule deletes: retention does.  After
:data:`OLD_DAYS` the objects that retention has left are those of old and pinned commits, which move to a
cheaper class from which a restore still reads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swansong_bucket.format.keys import RunKeys
from swansong_bucket.stores.settings import LifecycleRule

OLD_DAYS = 30
"""The shortest time for which S3 and GCS bill the first of these classes, too."""
S3_CLASSES = ("STANDARD_IA", "GLACIER_IR")
GCS_CLASSES = ("NEARLINE", "COLDLINE", "ARCHIVE")
"""Classes for old data, the default first.  A restore reads from each of them at once."""
VERSIONS_DAYS = 30
"""Time in which a deleted object can be brought back, in a bucket with versions."""
PROBES_DAYS = 7
_OFFLINE = {"GLACIER", "DEEP_ARCHIVE"}
"""Classes of S3 from which no request reads at once.  All classes of GCS can be read at once."""


def class_problem(name: str, classes: Sequence[str]) -> str:
    """Why old data cannot be in a storage class, with the fix; empty if it can.

    Args:
        classes: the classes of the store.
    """
    if name in classes:
        return ""
    problem = (
        "no restore reads from it"
        if name in _OFFLINE
        else "is not a class for old checkpoints in this store"
    )
    return f"{problem} (got {name!r:.60}); use {' or '.join(classes)}, which are read at once"


def for_s3(keys: RunKeys, prefix: str, old_class: str = S3_CLASSES[0]) -> dict[str, Any]:
    """The configuration for ``aws s3api put-bucket-lifecycle-configuration``.

    Args:
        prefix: of the store's URL: empty, or with a ``/`` at its end.
        old_class: one of :data:`S3_CLASSES`.
    """

    def rule(name: str, below: str, **action: Any) -> dict[str, Any]:
        of_rule = {"ID": f"swansong-{keys.run}-{name}", "Status": "Enabled"}
        return {**of_rule, "Filter": {"Prefix": prefix + below}, **action}

    run = f"{keys.run}/"
    return {
        "Rules": [
            rule("old", keys.data, Transitions=[{"Days": OLD_DAYS, "StorageClass": old_class}]),
            rule(
                "versions",
                run,
                NoncurrentVersionExpiration={"NoncurrentDays": VERSIONS_DAYS},
                Expiration={"ExpiredObjectDeleteMarker": True},
            ),
            rule("probes", keys.probes, Expiration={"Days": PROBES_DAYS}),
        ]
    }


def for_gcs(keys: RunKeys, prefix: str, old_class: str = GCS_CLASSES[0]) -> dict[str, Any]:
    """The configuration for ``gcloud storage buckets update --lifecycle-file``; see :func:`for_s3`."""

    def rule(action: str, below: str, *, to: str = "", **condition: Any) -> dict[str, Any]:
        kind = {"type": action, **({"storageClass": to} if to else {})}
        return {"action": kind, "condition": {**condition, "matchesPrefix": [prefix + below]}}

    run = f"{keys.run}/"
    return {
        "rule": [
            rule(
                "SetStorageClass",
                keys.data,
                to=old_class,
                age=OLD_DAYS,
                matchesStorageClass=["STANDARD"],
            ),
            rule("Delete", run, daysSinceNoncurrentTime=VERSIONS_DAYS),
            rule("Delete", keys.probes, age=PROBES_DAYS),
        ]
    }


def harmful(rules: Sequence[LifecycleRule], keys: RunKeys, prefix: str) -> list[str]:
    """One line for each rule that deletes checkpoints by age, or moves them where no restore reads."""
    found = []
    for rule in rules:
        name = f"the rule {rule.name!r:.80}" if rule.name else "a rule without a name"
        where = _meets(rule, keys, prefix)
        if where is None:
            continue
        on = f"of objects below {where!r:.200}" if where else "of all objects of the bucket"
        if rule.deletes:
            found.append(f"{name} {on} deletes checkpoints by age, also protected and pinned ones")
        found += [
            f"{name} {on} moves checkpoints to {offline}: no restore reads"
            for offline in sorted(_OFFLINE.intersection(rule.storage_classes))
        ]
    return found


def _meets(rule: LifecycleRule, keys: RunKeys, prefix: str) -> str | None:
    """The prefix by which a rule applies to objects of the run; None if it applies to rehearsals only."""
    run, probes = f"{prefix}{keys.run}/", prefix + keys.probes
    return next(
        (
            each
            for each in rule.prefixes
            if (run.startswith(each) or each.startswith(run)) and not each.startswith(probes)
        ),
        None,
    )
