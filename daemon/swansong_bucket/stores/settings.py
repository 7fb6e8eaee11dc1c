# SPDX-License-Identifier: Apache-2.0
"""Settings of a bucket that decide whether checkpoints remain, for the tools.

The SDKs of the clouds form the requests and parse the responses.  Their own clients read a body of any size,
and Google's follows redirects; so the requests are sent as those of the data path are.

Each method raises Permanent without the right to read the setting: unknown is not absent.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleRule:
    """A rule that is in force."""

    name: str
    """Its id; empty if it has none."""
    prefixes: tuple[str, ...] = ("",)
    """The rule applies to keys that begin with one of them, from the start of the bucket."""
    deletes: bool = False
    """It deletes objects by age or date."""
    storage_classes: tuple[str, ...] = ()
    """Classes of S3 to which the rule moves objects."""
