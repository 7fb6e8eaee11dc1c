# SPDX-License-Identifier: Apache-2.0
"""The credentials of a store: how often their source is read, and what a refusal means."""

from __future__ import annotations

import time
from typing import Any

import pytest
from swansong_bucket.errors import Permanent, Transient
from swansong_bucket.stores import credentials
from swansong_bucket.stores.credentials import CredentialCache

from testkit.waiting import in_threads

pytestmark = pytest.mark.fault("O05")


class Source:
    """Credentials ``value``, or an error in their place; counts the reads."""

    def __init__(self) -> None:
        self.value: Any = "first"
        self.has_expired = False
        self.loads = self.fetches = 0
        self.cache: CredentialCache[str] = CredentialCache(
            "S3", load=self._load, fetch=self._fetch, has_expired=lambda _: self.has_expired
        )

    def _load(self) -> object:
        self.loads += 1
        time.sleep(0.01)  # as long as other threads need to get here
        return object()

    def _fetch(self, _source: object) -> str:
        self.fetches += 1
        if isinstance(self.value, Exception):
            raise self.value
        return str(self.value)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    """Credentials that are in use; they are read again at most once an hour."""
    monkeypatch.setattr(credentials, "_PAUSE_S", 3600.0)
    source = Source()
    in_threads(8, lambda _: source.cache.get())
    assert (source.loads, source.fetches) == (1, 1)
    return source


def refused(source: Source, used: str = "first", *, is_certain: bool = True) -> list[bool]:
    """Whether other credentials exist, for eight threads that the store has refused."""
    found: list[bool] = []
    in_threads(8, lambda _: found.append(source.cache.replace(used, is_certain=is_certain)))
    return found


@pytest.mark.parametrize("is_certain", [False, True])
def test_a_refusal_reads_the_source_once(source: Source, is_certain: bool) -> None:
    """Also if the store may only miss a right, and for any number of threads."""
    assert refused(source, is_certain=is_certain) == 8 * [False]
    assert source.loads == 2
    source.value = "second"
    assert refused(source, is_certain=is_certain) == 8 * [False], "no storm on the source"
    assert source.loads == 2


def test_other_credentials_are_found(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried; if they are refused as well, the source is not read again until the pause is over."""
    source.value = "second"
    assert refused(source) == 8 * [True]
    assert (source.cache.get(), source.loads) == ("second", 2)
    source.value = "third"
    assert refused(source, "second") == 8 * [False]
    assert source.loads == 2
    monkeypatch.setattr(credentials, "_PAUSE_S", 0.0)
    assert refused(source, "second") == 8 * [True]
    assert (source.cache.get(), source.loads) == ("third", 3)


def test_credentials_that_the_store_accepted_can_be_refused_again(source: Source) -> None:
    """A refusal of credentials that worked has a new cause, so the source is read at once."""
    source.value = "second"
    refused(source)
    source.value = "third"
    source.cache.accept("first")
    assert refused(source, "second") == 8 * [False]
    source.cache.accept("second")
    assert refused(source, "second") == 8 * [True]
    assert source.loads == 3


def test_a_source_that_does_not_respond(source: Source) -> None:
    """Transient if the credentials were refused; a missing right stays a missing right."""
    source.value = Transient("no response")
    assert refused(source, is_certain=False) == 8 * [False]
    with pytest.raises(Transient, match="no response"):
        source.cache.replace("first", is_certain=True)
    assert source.cache.get() == "first", "until they expire"
    source.has_expired = True
    with pytest.raises(Transient, match="no response"):
        source.cache.get()


def test_a_replaced_source(source: Source) -> None:
    """A key that was revoked while the credentials were in use: all sources are read again, once."""
    source.value, source.has_expired = Permanent("revoked", hint="Fix it"), True
    for _ in range(5):
        with pytest.raises(Permanent) as caught:
            source.cache.get()
        assert caught.value.hint == "Fix it"
    assert (source.loads, source.fetches) == (2, 3)
