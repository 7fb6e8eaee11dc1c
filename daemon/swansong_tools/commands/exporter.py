# SPDX-License-Identifier: Apache-2.0
"""``swansong exporter``: serve metrics of runs, read from their buckets, on a machine without a trainer."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from swansong_bucket.config import values
from swansong_bucket.errors import ConfigError, Stopped, StoreError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.runs import catalog, signing
from swansong_bucket.runs.run import READS
from swansong_bucket.runs.signing import signed
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.opening import open_mirror, open_store
from swansongd.config.config import load
from swansongd.observe import log
from swansongd.observe.exposition import Exposition, registry_of

from swansong_tools.commands.bucket_command import stop_on_signals
from swansong_tools.commands.common import add_flag, argument, interval, run_argument, whole
from swansong_tools.commands.prices import add_prices, prices_of
from swansong_tools.economics.cost import Prices
from swansong_tools.exporter.own_health import ReadHealth, ReadOnly
from swansong_tools.exporter.readings import RUNS_AT_ONCE, StoreReader
from swansong_tools.exporter.run_metrics import ExporterCollector
from swansong_tools.exporter.stores import WatchedStore, load_stores, parse_stores

CONNECTIONS = RUNS_AT_ONCE * READS
INTERVAL_S_MIN = 5.0
_LISTEN = "127.0.0.1:9470"
_LOOK_S = 1.0
_RUNS_MAX = 200
_ACCESS = ("endpoint", "region", "profile", "ca_bundle")
_OF_A_STORE = ("mirror", "signing_key_file", *_ACCESS)

NOTES = "See docs/operations/monitoring.md."
EXAMPLES = {
    "Serve the metrics of all runs below a prefix.": (
        "swansong exporter --store s3://my-bucket/checkpoints"
    ),
    "Print the metrics of one run once.": (
        "swansong exporter --store s3://my-bucket/checkpoints --run my-run --once"
    ),
    "Read several stores, and show costs.": (
        "swansong exporter --stores /etc/swansong/stores.toml --price spot=1.20"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        action="append",
        default=[],
        type=argument(values.store_url),
        metavar="URL",
        help="store to read (default: that of the configuration); can be repeated",
    )
    parser.add_argument(
        "--mirror",
        type=argument(values.store_url),
        metavar="URL",
        help="mirror of the only --store, for its lag",
    )
    parser.add_argument("--endpoint", metavar="URL", help="address of the stores")
    parser.add_argument("--region", metavar="REGION", help="region of the stores")
    parser.add_argument("--profile", metavar="NAME", help="profile of the AWS configuration")
    parser.add_argument("--ca-bundle", metavar="FILE", help="certificate authorities of the stores")
    parser.add_argument(
        "--signing-key-file", metavar="FILE", help="key of the runs: only signed objects count"
    )
    parser.add_argument(
        "--stores",
        type=Path,
        metavar="FILE",
        help="TOML file with a table [[store]] for each store",
    )
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        type=run_argument,
        metavar="RUN",
        help="name of a run to read (default: all runs of the stores); can be repeated",
    )
    parser.add_argument(
        "--listen",
        type=argument(values.listen_address),
        default=values.listen_address(_LISTEN),
        metavar="ADDRESS",
        help=f"address of the metrics (default {_LISTEN}); unix:PATH for a socket",
    )
    parser.add_argument(
        "--interval",
        type=interval(INTERVAL_S_MIN, 24 * 3600.0, "5s to 1d"),
        default=60.0,
        metavar="TIME",
        help="time between two readings of a store, such as 60s (the default) or 5m; at least 5s",
    )
    parser.add_argument(
        "--runs-max",
        type=whole("a number of runs", 99_999),
        default=_RUNS_MAX,
        metavar="N",
        help=f"largest number of runs of a store (default {_RUNS_MAX})",
    )
    add_flag(parser, "--once", "read once, print the metrics, and exit")
    add_prices(parser)


def run(args: argparse.Namespace) -> int:
    log.configure("console" if sys.stderr.isatty() else "json", "warning" if args.once else "info")
    prices = prices_of(args)
    stop = threading.Event()
    stop_on_signals(stop)
    readers, healths = _readers(args, _watched(args), None if prices == Prices() else prices, stop)
    registry = registry_of(ExporterCollector(readers, healths))
    if args.once:
        results = [reader.read() for reader in readers]
        if stop.is_set():
            raise Stopped("the exporter was stopped before all stores were read")
        sys.stdout.write(generate_latest(registry).decode())
        if not all(results):
            return StoreError.exit_code
        for name in args.run:
            catalog.expect_run(RunKeys(name), *(reader.store for reader in readers))
        return 0
    for reader in readers:
        reader.start()
    Exposition(args.listen, registry, key="--listen", stop=stop).start()
    while not stop.wait(_LOOK_S):  # a signal that comes an instant before a wait does not end it
        pass
    log.flush(1.0)
    return 0


# ---------------------------------------------------------------- the stores


def _readers(
    args: argparse.Namespace,
    watched: Sequence[WatchedStore],
    prices: Prices | None,
    stop: threading.Event,
) -> tuple[list[StoreReader], list[ReadHealth]]:
    healths: dict[str, ReadHealth] = {}

    def read_only(store: ObjectStore) -> ReadOnly:
        return ReadOnly(store, healths.setdefault(store.url, ReadHealth(store.url)), stop)

    readers = []
    for each in watched:
        key = signing.load(each.store.signing_key_file)
        store = signed(open_store(each.store, connections=CONNECTIONS), key)
        mirror = open_mirror(each.mirror, connections=CONNECTIONS)
        readers.append(
            StoreReader(
                read_only(store),
                None if mirror is None else read_only(signed(mirror, key)),
                runs=tuple(dict.fromkeys(args.run)) or each.runs,
                interval_s=args.interval,
                runs_max=args.runs_max,
                prices=prices,
                stop=stop,
            )
        )
    return readers, list(healths.values())


def _watched(args: argparse.Namespace) -> tuple[WatchedStore, ...]:
    """The stores of the command line, of ``--stores``, or of the configuration."""
    given = [f"--{name.replace('_', '-')}" for name in _OF_A_STORE if getattr(args, name)]
    if args.store:
        if args.stores is not None:
            raise ConfigError(["--stores: cannot be combined with --store; use one of them"])
        if args.mirror and len(args.store) > 1:
            raise ConfigError(["--mirror: needs exactly one --store; use --stores for several"])
        return parse_stores({"store": [_table(args, url) for url in args.store]})
    if given:
        raise ConfigError(
            [f"{given[0]}: needs --store; without it the store is configured in a file"]
        )
    if args.stores is not None:
        return load_stores(args.stores)
    config = load(args.config)
    # A key belongs to one run: the other runs of the store have no valid signature.
    runs = (config.run.name,) if config.store.signing_key_file is not None else ()
    return (WatchedStore(store=config.store, mirror=config.mirror, runs=runs),)


def _table(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """The options as a table of the file of ``--stores``."""
    access = {name: value for name in _ACCESS if (value := getattr(args, name)) is not None}
    table: dict[str, Any] = {"url": url, **access}
    if args.signing_key_file is not None:
        table["signing_key_file"] = args.signing_key_file
    if args.mirror is not None:
        table["mirror"] = {"url": args.mirror, **access}
    return table
