# SPDX-License-Identifier: Apache-2.0
"""The configuration, the store and the signals of a command that reads the bucket."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from swansong_bucket.errors import ConfigError, Stopped, Transient
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.retention import locks
from swansong_bucket.runs import catalog, signing
from swansong_bucket.runs.signing import SigningKey
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.opening import open_mirror, open_store
from swansong_bucket.stores.wrappers.retry import Retrying
from swansong_bucket.transfer.reader import CONNECTIONS
from swansongd.config.config import Config, load
from swansongd.flush.claim_record import expect_recorded_store
from swansongd.observe import log
from swansongd.staging.scan import OWN_DIRECTORY

_CALL_BUDGET_S = 30.0
"""Time in which one failed call to the store is retried."""
_CALL_BUDGET_WITH_MIRROR_S = 10.0
"""The same if there is a mirror, from which the command continues."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The configuration, its store, and the selected run."""

    config: Config
    store: ObjectStore
    keys: RunKeys
    stop: threading.Event
    """Set by SIGINT or SIGTERM; a second signal ends the process immediately."""
    connections: int
    """Maximum number of connections to the store.  No trainer needs a share of them."""
    signing_key: SigningKey | None = None


def opened_store(args: argparse.Namespace) -> tuple[Config, ObjectStore, RunKeys]:
    """The configuration, its store without retries, and the selected run; for one request."""
    log.configure("console", "warning")
    config = load(args.config)
    return config, open_store(config.store, connections=1), RunKeys(args.run or config.run.name)


@contextmanager
def opened(args: argparse.Namespace, *, may_be_new: bool = False) -> Iterator[Opened]:
    """Read the configuration, open the store, and turn the first signal into ``stop``.

    Args:
        may_be_new: the command has an answer for a run that the store does not have.

    Raises:
        ConfigError: the configuration is not valid.
        NothingToRestore: the store does not have the run: its name may be mistyped.
        Stopped: a request failed after a signal.
    """
    log.configure("console", "warning")
    config = load(args.config)
    connections = max(CONNECTIONS, config.flush.connections)
    store = open_store(
        config.store,
        connections=connections,
        lock=locks.of(config.store),
    )
    own = config.staging.path / config.run.name / OWN_DIRECTORY
    expect_recorded_store(store, own, config.run.name)
    key = signing.load(config.store.signing_key_file)
    budget_s = _CALL_BUDGET_S if config.mirror.url is None else _CALL_BUDGET_WITH_MIRROR_S
    stop = threading.Event()
    before = stop_on_signals(stop)
    try:
        here = Opened(
            config=config,
            store=_retrying(store, key, budget_s, stop),
            keys=RunKeys(args.run or config.run.name),
            stop=stop,
            connections=connections,
            signing_key=key,
        )
        if not may_be_new:
            catalog.expect_run(here.keys, here.store)
        yield here
    except Transient as error:
        if stop.is_set():  # after a stop, no request is sent again
            raise Stopped(f"stopped, after a request had failed: {error}") from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_on_signals(stop: threading.Event) -> dict[int, Any]:
    """Turn the first SIGINT or SIGTERM into ``stop``; a second one ends the process immediately.

    Returns:
        The handlers from before, by signal.
    """

    def on_signal(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # first: the next signal may interrupt this function
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    return {number: signal.signal(number, on_signal) for number in numbers}


def perhaps_mirror(here: Opened) -> ObjectStore | None:
    """The mirror of the configuration, with retries; None without one."""
    mirror = open_mirror(here.config.mirror, connections=here.connections)
    if mirror is None:
        return None
    return _retrying(mirror, here.signing_key, _CALL_BUDGET_S, here.stop)


def _retrying(
    store: ObjectStore, key: SigningKey | None, budget_s: float, stop: threading.Event
) -> ObjectStore:
    return Retrying(signing.signed(store, key), budget_s=budget_s, stop=stop)


def mirror_of(here: Opened) -> ObjectStore:
    """As :func:`perhaps_mirror`; raises ConfigError without a mirror."""
    mirror = perhaps_mirror(here)
    if mirror is None:
        raise ConfigError(["mirror.url: is missing (got nothing); name the second store"])
    return mirror
