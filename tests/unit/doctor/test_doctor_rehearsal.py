# SPDX-License-Identifier: Apache-2.0
"""Doctor's rehearsal of a checkpoint: a store that fails any step of a checkpoint is a failure."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from swansong_bucket.errors import NotFound, Permanent
from swansong_bucket.stores.base import ObjectInfo, Page, Sink
from swansong_tools.doctor import rehearsal
from swansong_tools.doctor import store as of_store
from swansong_tools.doctor.findings import Finding, examine
from swansong_tools.doctor.installation import Installation, Options, own_account
from swansongd.config.config import Config, parse

from testkit.memory_store import MemoryStore

STEPS = ["write", "create-if-absent", "upload", "commit", "read back", "delete"]


class Altered(MemoryStore):
    """Returns wrong bytes for keys that contain ``flipped``, and has lost those that contain ``hidden``."""

    def __init__(self) -> None:
        super().__init__()
        self.flipped = self.hidden = "no such key"
        self._flipping = threading.Lock()
        """Two readers of one key would flip its first byte back."""

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        if self.hidden in key:
            raise NotFound(key)
        with self._flipping:
            whole = self.objects[key]
            if self.flipped in key:
                self.objects[key] = bytes([whole[0] ^ 1]) + whole[1:]
            super().get_range(key, offset, size_bytes, sink)
            self.objects[key] = whole

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        page = super().page(prefix, token, after=after)
        return Page([info for info in page.infos if self.hidden not in info.key], page.token)

    def head(self, key: str) -> ObjectInfo | None:
        return None if self.hidden in key else super().head(key)

    def refuses(self, call: str, word: str) -> None:
        """Refuse this call from now on for keys that contain the word."""

        def before(what: str, key: str) -> None:
            if what == call and word in key:
                raise Permanent(f"{call}: 405 MethodNotAllowed")

        self.before = before


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Altered:
    made = Altered()
    monkeypatch.setattr(of_store, "open_store", lambda *_args, **_options: made)
    return made


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """The configuration of a VM; after the test, staging and temporary directory must be empty."""
    names = ("staging", "store", "scratch")
    for name in names:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    yield parse(
        {
            "run": {"name": "x" * 100},
            "staging": {"path": str(tmp_path / "staging")},
            "store": {"url": (tmp_path / "store").as_uri()},
            "flush": {"connections": 1},
            "deadline": {"reserve_s": 1.0},
        }
    )
    assert [path for name in names for path in (tmp_path / name).iterdir()] == []


def rehearsed(config: Config, *, speed: bool = False) -> dict[str, Finding]:
    """The findings of the steps, by name; with ``speed``, that of the bandwidth as well."""
    options = Options(trial=True, speed=speed)
    vm = Installation(path=Path("/c"), configured=config, user=own_account(), options=options)
    found = {finding.name: finding for finding in examine(vm, of_store.CHECKS)}
    return {name: found[name] for name in (*STEPS, *(["speed"] if speed else []))}


def failures(findings: dict[str, Finding]) -> list[str]:
    return [name for name, finding in findings.items() if finding.level == "failure"]


def test_a_good_store_is_left_unchanged(config: Config, store: Altered) -> None:
    """Each step is ok, also for the longest run name; no object remains, also of a measurement."""
    store.objects["other"] = b"kept"
    findings = rehearsed(config, speed=True)
    assert "GB fit into the 24 s of a notice" in findings["speed"].found
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert store.objects == {"other": b"kept"}
    assert {"put", "create", "list", "get"} <= {what for what, _ in store.requests}


@pytest.mark.fault("O07")
@pytest.mark.parametrize(
    ("call", "word", "step"),
    [
        ("put", "/generations/", "write"),
        ("create", "/data/", "upload"),
        ("put", "/commits/", "commit"),
        ("get", "/commits/", "commit"),
        ("list", "/commits/", "commit"),
        ("get", "/data/", "read back"),
    ],
)
def test_a_request_that_the_store_refuses_fails_its_step(
    config: Config, store: Altered, call: str, word: str, step: str
) -> None:
    """The one failure contains the store's answer and a fix; objects of earlier steps are deleted."""
    store.refuses(call, word)
    findings = rehearsed(config)
    assert failures(findings) == [step]
    assert "405 MethodNotAllowed" in findings[step].found
    assert findings[step].fix
    assert store.objects == {}


def flip_data(store: Altered) -> None:
    store.flipped = "/data/"


def hide_commits(store: Altered) -> None:
    store.hidden = "/commits/"


def lose_data(store: Altered) -> None:
    store.hidden = "/data/"


def forget_conditions(store: Altered) -> None:
    put = store.put
    store.put = lambda key, data, if_absent=False: put(key, data)  # type: ignore[method-assign]


@pytest.mark.fault("O14", "O15", "G08", "G10")
@pytest.mark.parametrize(
    ("fault", "step"),
    [
        (flip_data, "read back"),
        (hide_commits, "commit"),
        (lose_data, "read back"),
        (forget_conditions, "create-if-absent"),
    ],
)
def test_a_faulty_store_fails_its_step(
    config: Config, store: Altered, fault: Callable[[Altered], None], step: str
) -> None:
    """The store accepts all requests, but returns other bytes, lists less, or ignores create-if-absent."""
    fault(store)
    assert failures(rehearsed(config)) == [step]


@pytest.mark.fault("O02")
def test_a_store_that_hangs_times_out(
    config: Config, store: Altered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that never finishes fails its step; the bucket is cleaned up."""
    may_return = threading.Event()
    brief = [replace(c, limit_s=0.2) if c.name == "upload" else c for c in of_store.CHECKS]
    monkeypatch.setattr(of_store, "CHECKS", brief)
    store.before = lambda what, _key: what == "create" and may_return.wait()
    try:
        findings = rehearsed(config)
    finally:
        may_return.set()
    assert failures(findings) == ["upload"]
    assert "after 0.2 s" in findings["upload"].found
    assert store.objects == {}


@pytest.mark.fault("S21")
def test_without_the_right_to_delete_the_finding_names_what_remains(
    config: Config, store: Altered
) -> None:
    """Little more than the set of the rehearsal."""
    store.refuses("delete", "")
    findings = rehearsed(config)
    assert failures(findings) == []
    left_bytes = sum(map(len, store.objects.values()))
    assert 0 <= left_bytes - rehearsal.SET_BYTES < 10_000
    assert f" {left_bytes} bytes stay below" in findings["delete"].found
