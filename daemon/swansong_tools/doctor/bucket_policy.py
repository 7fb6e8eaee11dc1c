# SPDX-License-Identifier: Apache-2.0
"""The bucket policy of S3 that enforces create-if-absent, as in packer/permissions.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from swansong_bucket.format.keys import RunKeys

_HARMLESS = {"bool": {"s3:objectcreationoperation": ["true"]}}
"""A condition that exempts only requests which create no object."""


def statements(bucket: str, keys: RunKeys, prefix: str) -> list[dict[str, Any]]:
    """The statements of packer/permissions/aws-bucket-policy.json for a run.

    Args:
        prefix: of the store's URL: empty, or with a ``/`` at its end.
    """
    commits, generations = (
        f"arn:aws:s3:::{bucket}/{prefix}{below}*" for below in (keys.commits, keys.generations)
    )
    denied = {"Effect": "Deny", "Principal": "*"}
    return [
        {
            "Sid": "SwansongCreatesOnce",
            **denied,
            "Action": "s3:PutObject",
            "Resource": [commits, generations],
            "Condition": {"Null": {"s3:if-none-match": "true"}},
        },
        {
            "Sid": "SwansongKeepsClaims",
            **denied,
            "Action": ["s3:DeleteObject", "s3:DeleteObjectVersion"],
            "Resource": generations,
        },
    ]


def added(
    policy: Mapping[str, Any] | None, bucket: str, keys: RunKeys, prefix: str
) -> dict[str, Any]:
    """The policy with the statements for this run; existing statements stay.

    A new statement gets a number if its name is taken: of another run, for example.
    """
    own = statements(bucket, keys, prefix)
    kept = [] if policy is None else _listed(policy.get("Statement", []))
    taken = {each.get("Sid") for each in kept if isinstance(each, dict)}
    for statement in own:
        number, sid = 2, statement["Sid"]
        while statement["Sid"] in taken:
            statement["Sid"], number = f"{sid}{number}", number + 1
    return {"Version": "2012-10-17", "Statement": [*kept, *own]}


def enforces_create_if_absent(
    policy: Mapping[str, Any] | None, bucket: str, keys: RunKeys, prefix: str
) -> bool:
    """Whether the policy denies every account a PutObject without If-None-Match for manifests and claims."""
    found = [] if policy is None else _listed(policy.get("Statement", []))
    resources = [
        f"arn:aws:s3:::{bucket}/{prefix}{below}x" for below in (keys.commits, keys.generations)
    ]
    return all(
        any(_denies(each, resource) for each in found if isinstance(each, dict))
        for resource in resources
    )


def _denies(statement: Mapping[str, Any], resource: str) -> bool:
    condition = _lower(statement.get("Condition", {}))
    null = condition.pop("null", {})
    return (
        statement.get("Effect") == "Deny"
        and statement.get("Principal") in ("*", {"AWS": "*"}, {"AWS": ["*"]})
        and any(_is_like("s3:putobject", each.lower()) for each in _texts(statement, "Action"))
        and any(_is_like(resource, each) for each in _texts(statement, "Resource"))
        and null == {"s3:if-none-match": ["true"]}
        and condition in ({}, _HARMLESS)
    )


def _texts(statement: Mapping[str, Any], name: str) -> list[str]:
    return [each for each in _listed(statement.get(name, [])) if isinstance(each, str)]


def _lower(condition: Any) -> dict[str, Any]:
    """A condition block with names in lower case, and lists of values."""
    if not isinstance(condition, dict):
        return {"?": {}}
    return {
        operator.lower(): {
            key.lower(): [str(value).lower() for value in _listed(values)]
            for key, values in (pairs if isinstance(pairs, dict) else {}).items()
        }
        for operator, pairs in condition.items()
    }


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _is_like(text: str, pattern: str) -> bool:
    parts = [{"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern]
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None
