# SPDX-License-Identifier: Apache-2.0
"""The file of ``swansong exporter --stores``: stores to read, without a VM.

::

    [[store]]
    url = "s3://bucket/checkpoints"     # the keys are those of [store]
    runs = ["llm-7b"]                   # default: all runs
    mirror = { url = "gs://m/p" }       # the keys are those of [mirror]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swansong_bucket.config import values
from swansong_bucket.config.sections import MirrorConfig, StoreConfig
from swansong_bucket.config.values import InvalidValue
from swansong_bucket.errors import ConfigError
from swansongd.config.config import read_section, read_toml

STORES_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStore:
    """A store to read."""

    store: StoreConfig
    mirror: MirrorConfig
    runs: tuple[str, ...] = ()
    """Empty: all runs."""


def load_stores(path: Path) -> tuple[WatchedStore, ...]:
    """Read the file.

    Raises:
        ConfigError: the file is missing or not TOML, or contains a key or value that is not valid.
    """
    return parse_stores(read_toml(path, hint="name another file with --stores"))


def parse_stores(body: Mapping[str, object]) -> tuple[WatchedStore, ...]:
    """Turn parsed TOML into stores.

    Raises:
        ConfigError: lists every problem.
    """
    problems = [
        f"{name}: unknown key; the file has [[store]] only" for name in body if name != "store"
    ]
    tables = body.get("store")
    if not isinstance(tables, list) or not 0 < len(tables) <= STORES_MAX:
        problems.append(f"store: give 1 to {STORES_MAX} tables [[store]]")
        raise ConfigError(problems)
    found = [_store(f"store[{number}]", table, problems) for number, table in enumerate(tables)]
    stores = [each for each in found if each is not None]
    urls = [each.store.url.rstrip("/") for each in stores]
    problems += [
        f"store: {url} occurs twice; list its runs in one entry"
        for url in sorted({url for url in urls if urls.count(url) > 1})
    ]
    if problems:
        raise ConfigError(problems)
    return tuple(stores)


def _store(where: str, table: object, problems: list[str]) -> WatchedStore | None:
    if not isinstance(table, dict):
        problems.append(f"{where}: is not a table; start it with [[store]]")
        return None
    own = {key: value for key, value in table.items() if key not in ("runs", "mirror")}
    before = len(problems)
    store = read_section(where, StoreConfig, own, problems)
    mirror = read_section(f"{where}.mirror", MirrorConfig, table.get("mirror", {}), problems)
    runs = _runs(where, table.get("runs", []), problems)
    if len(problems) > before:
        return None
    return WatchedStore(store=StoreConfig(**store), mirror=MirrorConfig(**mirror), runs=runs)


def _runs(where: str, names: object, problems: list[str]) -> tuple[str, ...]:
    try:
        if not isinstance(names, list):
            raise InvalidValue("is not a list", 'give names such as ["my-run"]')
        return tuple(dict.fromkeys(str(values.run_name(name)) for name in names))
    except InvalidValue as error:
        problems.append(f"{where}.runs: {error.problem} (got {names!r:.80}); {error.remedy}")
        return ()
