# SPDX-License-Identifier: Apache-2.0
"""The check of the mirror: it can be listed and written, and it honours create-if-absent.

No checkpoint depends on the mirror, so its failures are warnings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from swansong_bucket.errors import ConfigError, StoreError
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.opening import open_mirror
from swansongd.config.config import Config

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Check, Judgement, Level, of_error, ok, warning
from swansong_tools.doctor.rehearsal import Rehearsal, RetryingBriefly

_LIMIT_S = 30.0


def checks(config: Config, path: Path) -> Iterator[Check]:
    """The check of the mirror, if there is one.  It must run as the daemon.

    Args:
        path: configuration file.
    """
    if config.mirror.url is not None:
        yield Check(
            family="store", name="mirror", judge=lambda: judge(config, path), limit_s=_LIMIT_S
        )


def judge(config: Config, path: Path) -> Judgement:
    """Claim a generation of a rehearsal in the mirror, and delete it."""
    edit = fixes.edit(path)
    try:
        mirror = open_mirror(config.mirror, connections=1)
        assert mirror is not None
        return _rehearsed(mirror, config.run.name, edit)
    except (ConfigError, StoreError) as error:
        found = of_error(error, edit)
        return replace(
            found,
            level=Level.WARNING,
            found=f"commits have one copy only: {found.found}",
        )


def _rehearsed(mirror: ObjectStore, run: str, edit: str) -> Judgement:
    store = RetryingBriefly(mirror)
    rehearsal = Rehearsal(store, run)
    try:
        store.check()
        honours_if_absent = rehearsal.claim()
        rehearsal.clean_up()
    finally:
        rehearsal.close()
    if honours_if_absent:
        return ok(f"{store.url} can be listed and written, and honours create-if-absent")
    return warning(
        f"{store.url} ignores create-if-absent: after a promotion two VMs could overwrite each other's"
        " commits. Set mirror.url to a store that honours If-None-Match",
        edit,
    )
