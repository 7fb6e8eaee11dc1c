# SPDX-License-Identifier: Apache-2.0
"""Every wrapper of a store passes on each argument and each result."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
from swansong_bucket.stores.base import Body, ObjectInfo, ObjectStore
from swansong_bucket.stores.wrappers.retry import Retrying
from swansong_bucket.stores.wrappers.throttle import Throttled

WRAPPERS: dict[str, Callable[[Any], ObjectStore]] = {
    "Retrying": lambda store: Retrying(
        store, give_up_mono_s=lambda: float("inf"), stop=threading.Event()
    ),
    "Throttled": lambda store: Throttled(store, lambda: 1e12),
}
METHODS = [
    name
    for name, value in vars(ObjectStore).items()
    if inspect.isfunction(value) and not name.startswith("_") and name != "list"
]
"""All requests; a listing consists of pages."""
ARGUMENTS = {
    "key": "key",
    "prefix": "prefix/",
    "token": "token",
    "after": "after",
    "body": Body(b"data"),
    "data": memoryview(b"data"),
    "if_absent": True,
    "if_tag": "tag",
    "infos": [ObjectInfo("key", 4)],
    "offset": 3,
    "size_bytes": 4,
    "sink": object(),
}
WRAPPED = {"sink"}
"""Arguments that a wrapper may replace, to count the bytes."""


class Recorder:
    """A store that notes its calls; each call has another result."""

    url = "s3://bucket"

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any], object]] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            bound = inspect.signature(getattr(ObjectStore, name)).bind(self, *args, **kwargs)
            result = object()
            self.calls.append((name, dict(bound.arguments), result))
            return result

        return call


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", METHODS)
def test_arguments_and_results_pass(wrapper: str, name: str) -> None:
    store = Recorder()
    signature = inspect.signature(getattr(ObjectStore, name))
    given = {each: ARGUMENTS[each] for each in signature.parameters if each != "self"}
    positional = [
        v for k, v in given.items() if signature.parameters[k].kind.name != "KEYWORD_ONLY"
    ]
    named = {k: v for k, v in given.items() if signature.parameters[k].kind.name == "KEYWORD_ONLY"}
    result = getattr(WRAPPERS[wrapper](store), name)(*positional, **named)
    ((called, passed, returned),) = store.calls
    assert called == name
    assert {k: v for k, v in passed.items() if k not in {"self", *WRAPPED}} == {
        k: v for k, v in given.items() if k not in WRAPPED
    }
    assert set(passed) - {"self"} == set(given)
    if signature.return_annotation != "None":
        assert result is returned
