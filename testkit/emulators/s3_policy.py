# SPDX-License-Identifier: Apache-2.0
"""Policies of the strict S3: of the bucket, and of the caller's role.

A request needs an Allow of the role, and no Deny, as in
IAM/latest/UserGuide/reference_policies_evaluation-logic.html.  Conditions are those of
AmazonS3/latest/userguide/conditional-writes-enforce.html and conditional-delete-enforce.html.  A policy with
any other element is refused: a test must not trust a condition that is not evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from testkit.emulators.s3_request import S3Error
from testkit.emulators.store_control import Call

_ELEMENTS = {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
_KEYS = {"s3:if-none-match", "s3:if-match", "s3:objectcreationoperation", "s3:prefix"}
_OPERATORS = {"Null", "Bool", "StringEquals", "StringNotEquals", "StringLike"}
_BUCKET_ACTIONS = {
    "GET": {
        "lifecycle": "GetLifecycleConfiguration",
        "versioning": "GetBucketVersioning",
        "object-lock": "GetBucketObjectLockConfiguration",
        "policy": "GetBucketPolicy",
        "location": "GetBucketLocation",
    },
    "PUT": {
        "lifecycle": "PutLifecycleConfiguration",
        "versioning": "PutBucketVersioning",
        "object-lock": "PutBucketObjectLockConfiguration",
        "policy": "PutBucketPolicy",
    },
}


def parsed(document: bytes | str) -> dict[str, Any]:
    """A policy; raises S3Error if it has an element that is not evaluated here."""
    try:
        policy = json.loads(document)
        statements = _listed(policy["Statement"])
        if not statements:
            raise ValueError("no statement")
        for statement in statements:
            if statement.keys() - _ELEMENTS or statement["Effect"] not in ("Allow", "Deny"):
                raise ValueError(statement)
            if not _listed(statement["Action"]) or not _listed(statement["Resource"]):
                raise ValueError(statement)
            for operator, pairs in statement.get("Condition", {}).items():
                if operator not in _OPERATORS or {key.lower() for key in pairs} - _KEYS:
                    raise ValueError(operator)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise S3Error(400, "MalformedPolicy", str(error)[:200]) from None
    return {"Statement": statements}


def action_of(call: Call, names: set[str], key: str) -> str:
    """The permission that a request needs: service-authorization/latest/reference/list_amazons3.html."""
    if not key:
        for name, action in _BUCKET_ACTIONS.get(call.method, {}).items():
            if name in names:
                return f"s3:{action}"
        return "s3:ListBucket"
    match call.method:
        case "GET" if "retention" in names:
            return "s3:GetObjectRetention"
        case "PUT" if "retention" in names:
            return "s3:PutObjectRetention"
        case "DELETE":
            return "s3:DeleteObject"
        case "GET" | "HEAD":
            return "s3:GetObject"
    return "s3:PutObject"


def context_of(call: Call, names: set[str]) -> dict[str, str]:
    """The condition keys of a request; one that the request does not have is absent."""
    found = {
        f"s3:{name}": call.headers[name]
        for name in ("if-none-match", "if-match")
        if name in call.headers
    }
    if call.method in ("PUT", "POST"):
        # False for operations that create no object: they accept no condition.
        found["s3:objectcreationoperation"] = "false" if "uploads" in names else "true"
    prefix = call.parameter("prefix")
    if prefix is not None:
        found["s3:prefix"] = prefix
    return found


def expect_allowed(
    role: Mapping[str, Any] | None,
    bucket_policy: Mapping[str, Any] | None,
    action: str,
    resource: str,
    context: Mapping[str, str],
) -> None:
    """Raise S3Error unless the role allows the action, and no policy denies it.

    Args:
        role: policy of the caller; None for an administrator.
        resource: its ARN.
    """
    policies = [policy for policy in (role, bucket_policy) if policy is not None]
    effects = [
        statement["Effect"]
        for policy in policies
        for statement in policy["Statement"]
        if _applies(statement, action, resource, context)
    ]
    if "Deny" in effects or (role is not None and "Allow" not in effects):
        raise S3Error(403, "AccessDenied", f"{action} on {resource} is not allowed")


def _applies(
    statement: Mapping[str, Any], action: str, resource: str, context: Mapping[str, str]
) -> bool:
    return (
        any(_is_like(action.lower(), each.lower()) for each in _listed(statement["Action"]))
        and any(_is_like(resource, each) for each in _listed(statement["Resource"]))
        and all(
            _holds(operator, key.lower(), [str(each) for each in _listed(wanted)], context)
            for operator, pairs in statement.get("Condition", {}).items()
            for key, wanted in pairs.items()
        )
    )


def _holds(operator: str, key: str, wanted: list[str], context: Mapping[str, str]) -> bool:
    found = context.get(key)
    if operator == "Null":
        return (found is None) == (wanted[0].lower() == "true")
    if operator == "StringNotEquals":
        return found not in wanted
    if found is None:
        return False
    if operator == "StringLike":
        return any(_is_like(found, each) for each in wanted)
    if operator == "Bool":
        return found.lower() in [each.lower() for each in wanted]
    return found in wanted


def _is_like(text: str, pattern: str) -> bool:
    """Whether the text matches; an asterisk matches slashes, too."""
    parts = [{"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern]
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
