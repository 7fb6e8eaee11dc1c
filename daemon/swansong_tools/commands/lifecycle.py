# SPDX-License-Identifier: Apache-2.0
"""``swansong lifecycle``: print the lifecycle rules that fit a run, and warn of rules that harm it."""

from __future__ import annotations

import argparse

from swansong_bucket.errors import ConfigError, StoreError
from swansong_bucket.stores.gcs.store import GcsStore
from swansong_bucket.stores.s3.store import S3Store

from swansong_tools.commands.bucket_command import opened_store
from swansong_tools.commands.common import add_json, add_run, note, print_json
from swansong_tools.doctor import store_fixes
from swansong_tools.upkeep import lifecycle_rules

NOTES = """\
--json prints the rules, the command, the names of the existing rules (null: unknown) and warnings."""
EXAMPLES = {
    "Print the rules for the bucket of the configured run, with the command that sets them.": (
        "swansong lifecycle"
    ),
    "Write the rules to a file, for Terraform or another tool.": (
        "swansong lifecycle --json | jq .rules >rules.json"
    ),
    "Keep old and pinned commits in Glacier Instant Retrieval.": (
        "swansong lifecycle --class GLACIER_IR"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--class",
        dest="old_class",
        metavar="CLASS",
        help=f"storage class for data older than {lifecycle_rules.OLD_DAYS} days (default: the first): "
        f"{' or '.join(lifecycle_rules.S3_CLASSES)} on S3, {', '.join(lifecycle_rules.GCS_CLASSES)} on GCS",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    config, store, keys = opened_store(args)
    if not isinstance(store, (S3Store, GcsStore)):
        problem = (
            f"swansong lifecycle has rules for S3 and GCS only (got {config.store.url!r:.100})"
        )
        raise ConfigError([f"store.url: {problem}; set rules with the tools of your store"])
    settings = store.settings
    is_s3 = isinstance(store, S3Store)
    classes = lifecycle_rules.S3_CLASSES if is_s3 else lifecycle_rules.GCS_CLASSES
    old_class = classes[0] if args.old_class is None else args.old_class
    if problem := lifecycle_rules.class_problem(old_class, classes):
        raise ConfigError([f"--class: {problem}"])
    rules = (lifecycle_rules.for_s3 if is_s3 else lifecycle_rules.for_gcs)(
        keys, settings.prefix, old_class
    )
    command = store_fixes.put_lifecycle(config, rules)
    existing: list[str] | None = None
    harm: list[str] = []
    unknown = ""
    try:
        found = settings.lifecycle_rules()
    except StoreError as error:
        unknown = f"unknown: reading the existing rules failed: {error}"
    else:
        existing = [rule.name for rule in found]
        harm = lifecycle_rules.harmful(found, keys, settings.prefix)
    warnings = [*harm, *filter(None, [unknown])]
    if args.json:
        print_json({"rules": rules, "command": command, "existing": existing, "warnings": warnings})
        return 0
    print_json(rules)
    print(f"\n{command}")
    for line in warnings:
        note(f"warning: {line}")
    if existing is None or existing:
        count = "" if existing is None else f" {len(existing)}"
        note(
            f"the command replaces all{count} existing rules of the bucket: add those that you need"
        )
    return 0
