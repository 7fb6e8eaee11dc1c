# SPDX-License-Identifier: Apache-2.0
"""The keys of a run, from two listings that leave out its data.

Every writer of the bucket can create objects, so the number of keys is limited, and other keys are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from swansongd.bucket import catalog
from swansongd.bucket.catalog import Commit
from swansongd.bucket.keys import CommitKey, RunKeys
from swansongd.errors import Permanent
from swansongd.stores.base import ObjectInfo, ObjectStore

KEYS_MAX = 200_000
"""Limit of the keys in one listing of a run."""


@dataclass(slots=True)
class Listing:
    """The keys of a run, without those of its data."""

    commits: list[Commit] = field(default_factory=list)
    """Newest first, complete or not."""
    claims: dict[int, ObjectInfo] = field(default_factory=dict)
    farewells: dict[str, ObjectInfo] = field(default_factory=dict)
    resumptions: dict[int, ObjectInfo] = field(default_factory=dict)
    pins: int = 0
    foreign: int = 0
    """Keys that no swansong of this version writes."""
    newest_age_s: float | None = None
    """Age of the newest object; None if the store returns no ages."""

    @property
    def is_run(self) -> bool:
        return bool(self.claims or self.commits)


def listed(store: ObjectStore, keys: RunKeys) -> Listing:
    """List a run with two requests, or one for each further 1,000 keys.

    Raises:
        Permanent: the run has too many keys.
        StoreError: the listing failed.
    """
    found = Listing()
    manifests: list[tuple[ObjectInfo, CommitKey]] = []
    for info in _bounded(store, keys.commits, ""):
        commit = keys.parse_commit(info.key)
        if commit is not None:
            manifests.append((info, commit))
        elif not catalog.is_folder(info):
            found.foreign += 1
    # All records have greater keys than the data, so one listing after the data has all of them.
    after_data = f"{keys.data.removesuffix('/')}0"
    infos = [info for info, _ in manifests]
    for info in _bounded(store, f"{keys.run}/", after_data):
        if (generation := keys.parse_generation(info.key)) is not None:
            found.claims[generation] = info
        elif keys.parse_farewell(info.key) is not None:
            found.farewells[info.key] = info
        elif (generation := keys.parse_resumption(info.key)) is not None:
            found.resumptions[generation] = info
        elif keys.parse_pin(info.key) is not None:
            found.pins += 1
        else:
            is_known = info.key.startswith(keys.probes) or catalog.is_folder(info)
            found.foreign += not is_known
            continue
        infos.append(info)
    found.commits = catalog.grouped(manifests)
    found.newest_age_s = _newest_age_s(infos)
    return found


def _bounded(store: ObjectStore, prefix: str, after: str) -> Iterator[ObjectInfo]:
    for number, info in enumerate(store.list(prefix, after=after)):
        if number == KEYS_MAX:
            raise Permanent(
                f"list {prefix}: more than {KEYS_MAX} keys",
                hint="Prune the run, and delete objects that no swansong wrote",
            )
        yield info


def _newest_age_s(infos: Iterable[ObjectInfo]) -> float | None:
    ages_s = [info.age_s for info in infos]
    known_s = [age_s for age_s in ages_s if age_s is not None]
    return min(known_s, default=None) if len(known_s) == len(ages_s) else None
