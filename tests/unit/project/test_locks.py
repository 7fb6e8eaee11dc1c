# SPDX-License-Identifier: Apache-2.0
"""The lock files: each package from an index has one version and known hashes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.utils import canonicalize_name

from testkit import REPOSITORY
from testkit.wheelhouse import installed_dependencies

DAEMON = REPOSITORY / "constraints.txt"
DEVELOPER = REPOSITORY / "requirements" / "dev.txt"
LOCKS = [DAEMON, DEVELOPER, REPOSITORY / "requirements" / "jax.txt"]
_PINNED = re.compile(
    r"([a-z0-9][a-z0-9-]*)==([^\s;]+)(?: ; (.+?))?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
)


@dataclass(frozen=True)
class Pin:
    version: str
    marker: str
    hashes: frozenset[str]

    def applies(self) -> bool:
        return not self.marker or Marker(self.marker).evaluate()


def pins(lock: Path) -> dict[str, list[Pin]]:
    """The pins of each package, one per marker."""
    found: dict[str, list[Pin]] = {}
    for name, version, marker, hashes in _PINNED.findall(lock.read_text()):
        known = frozenset(re.findall(r"sha256:([0-9a-f]+)", hashes))
        found.setdefault(name, []).append(Pin(version, marker, known))
    return found


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_lock_has_pinned_versions_with_hashes_and_nothing_else(lock: Path) -> None:
    """Each requirement has one version and a hash; the file contains no option, address or path."""
    assert pins(lock)
    rest = _PINNED.sub("", lock.read_text())
    assert [line for line in rest.splitlines() if not line.startswith("#")] == []
    assert "://" not in rest


def test_every_package_that_provisioning_installs_has_a_hash() -> None:
    """The lock contains all runtime and build dependencies, in the versions that the tests use."""
    locked = pins(DAEMON)
    for name, distribution in installed_dependencies().items():
        (pin,) = (pin for pin in locked[canonicalize_name(name)] if pin.applies())
        assert pin.version == distribution.version, name


def test_tests_run_with_the_daemons_lock() -> None:
    """Each pin of the daemon's lock is also in the developer's lock, with the same hashes."""
    developer = pins(DEVELOPER)
    assert {name: developer.get(name) for name in pins(DAEMON)} == pins(DAEMON)
