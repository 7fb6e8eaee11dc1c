# SPDX-License-Identifier: Apache-2.0
"""The options ``--price`` and ``--prices`` of commands that show money."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from swansong_bucket.errors import ConfigError
from swansongd.config.config import read_section, read_toml

from swansong_tools.economics.cost import Prices


def add_prices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=(
            "a price, such as spot=1.20: of one GPU for an hour (on_demand, spot), of 2^30 bytes stored "
            "for a month (gb_month), of 1,000 requests (writes, reads); currency=EUR names the currency"
        ),
    )
    parser.add_argument(
        "--prices",
        type=Path,
        metavar="FILE",
        help="TOML file with these keys; --price overrides it",
    )


def prices_of(args: argparse.Namespace) -> Prices:
    """The prices of the command line and of the file.

    Raises:
        ConfigError: lists every price that is not valid.
    """
    tables = [("--price", _split(text)) for text in args.price]
    if args.prices is not None:
        hint, form = "name another file with --prices", "give prices as in spot = 1.20"
        tables.insert(0, (str(args.prices), read_toml(args.prices, hint=hint, form=form)))
    problems: list[str] = []
    found: dict[str, Any] = {}
    for where, table in tables:
        valid = read_section(where, Prices, table, problems)
        found |= {key: valid[key] for key in table if key in valid}
    if problems:
        raise ConfigError(problems)
    return Prices(**found)


def money(amount: float, currency: str) -> str:
    """Format an amount as ``1,234.50 USD``; small amounts keep two digits."""
    decimals = 2 if amount == 0 or abs(amount) >= 0.1 else 1 - math.floor(math.log10(abs(amount)))
    return f"{amount:,.{min(decimals, 6)}f} {currency}"


def _split(text: str) -> dict[str, Any]:
    key, _, value = text.partition("=")
    if key == "currency":
        return {key: value}
    try:
        return {key: float(value)}
    except ValueError:
        return {key: value}
