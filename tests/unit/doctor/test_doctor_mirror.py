# SPDX-License-Identifier: Apache-2.0
"""Doctor's check of the mirror: one that takes no copies is a warning, and nothing remains in a good one."""

from __future__ import annotations

import pytest
from swansong_bucket.errors import Permanent
from swansong_tools.doctor import store as of_store
from swansong_tools.doctor.findings import Finding, examine

from testkit.memory_store import MemoryStore
from tests.unit.doctor.test_doctor import installation


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    made = MemoryStore()
    monkeypatch.setattr(of_store, "open_mirror", lambda *_args, **_options: made)
    return made


def findings(mirror: str | None) -> list[Finding]:
    vm = installation(mirror={} if mirror is None else {"url": mirror})
    return list(examine(vm, [each for each in of_store.CHECKS if each.name == "mirror"]))


def checked() -> Finding:
    (finding,) = findings("gs://other/a")
    return finding


def test_without_a_mirror_there_is_no_check() -> None:
    assert findings(None) == []


def test_a_good_mirror_is_left_unchanged(store: MemoryStore) -> None:
    """The claim of the rehearsal is written and deleted."""
    assert checked().level == "ok"
    assert store.objects == {}
    assert "put" in {what for what, _ in store.requests}


@pytest.mark.fault("M01")
@pytest.mark.parametrize("call", ["list", "put"])
def test_a_mirror_that_refuses_requests_is_a_warning(store: MemoryStore, call: str) -> None:
    """No checkpoint is lost, and the finding has the answer of the mirror."""

    def before(what: str, _key: str) -> None:
        if what == call:
            raise Permanent(f"{call}: 403 AccessDenied")

    store.before = before
    finding = checked()
    assert finding.level == "warning"
    assert "one copy only" in finding.found
    assert "403 AccessDenied" in finding.found


def test_a_mirror_without_create_if_absent_is_a_warning(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a store must not become the primary one."""
    put = store.put
    monkeypatch.setattr(store, "put", lambda key, data, **_options: put(key, data))
    assert "ignores create-if-absent" in checked().found
