# SPDX-License-Identifier: Apache-2.0
"""The options ``--price`` and ``--prices`` of commands that show money."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swansong_bucket.errors import ConfigError

from swansong_tools.economics.cost import Prices

PRICE_MAX = 1e6
_KEYS = ("currency", "on_demand", "spot", "gb_month", "writes", "reads")
_CURRENCY = re.compile(r"[A-Za-z$€£¥]{1,8}")
_FILE_BYTES_MAX = 2**16


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
    problems: list[str] = []
    found = {} if args.prices is None else _of_file(args.prices, problems)
    for text in args.price:
        found |= _valid(f"--price {text:.80}", _split(text), problems)
    if problems:
        raise ConfigError(problems)
    return Prices(**found)


def money(amount: float, currency: str) -> str:
    """Format an amount as ``1,234.50 USD``; small amounts keep two digits."""
    decimals = 2 if amount == 0 or abs(amount) >= 0.1 else 1 - math.floor(math.log10(abs(amount)))
    return f"{amount:,.{min(decimals, 6)}f} {currency}"


def _split(text: str) -> Mapping[str, Any]:
    key, _, value = text.partition("=")
    if key == "currency":
        return {key: value}
    try:
        return {key: float(value)}
    except ValueError:
        return {key: value}


def _of_file(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        if len(data) > _FILE_BYTES_MAX:
            raise ConfigError([f"reading {path} failed: more than {_FILE_BYTES_MAX} bytes"])
        return _valid(str(path), tomllib.loads(data.decode()), problems)
    except OSError as error:
        raise ConfigError([f"reading {path} failed: {error.strerror}"]) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError([f"parsing {path} failed: {error}"]) from None


def _valid(where: str, body: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The valid prices; each other one becomes a problem."""
    found: dict[str, Any] = {}
    for key, value in body.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(_KEYS)}"
            problems.append(f"{where}: unknown key (got {key!r:.80}); {remedy}")
        elif (problem := _problem(key, value)) is not None:
            problems.append(f"{where}: {key} {problem[0]} (got {value!r:.80}); {problem[1]}")
        else:
            found[key] = value
    return found


def _problem(key: str, value: Any) -> tuple[str, str] | None:
    """The problem of a value, and its fix."""
    if key == "currency":
        is_valid = isinstance(value, str) and _CURRENCY.fullmatch(value)
        return None if is_valid else ("is not a currency", "give a code such as EUR")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value < PRICE_MAX:
        return None
    return "is not a price", f"give a number such as 1.20, from 0 to {PRICE_MAX:g}"
