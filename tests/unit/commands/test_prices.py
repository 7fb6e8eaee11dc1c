# SPDX-License-Identifier: Apache-2.0
"""``--price`` and ``--prices``: what counts first, and errors that name the key, the value and the fix."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from swansong_bucket.errors import ConfigError
from swansong_tools.commands.prices import add_prices, money, prices_of
from swansong_tools.economics.cost import Prices


def prices(*words: str) -> Prices:
    parser = argparse.ArgumentParser()
    add_prices(parser)
    return prices_of(parser.parse_args(words))


def test_an_argument_counts_before_the_file(tmp_path: Path) -> None:
    """The file has the other prices, and the currency."""
    file = tmp_path / "prices.toml"
    file.write_text('currency = "EUR"\nspot = 1.2\non_demand = 4\n')
    found = prices("--prices", str(file), "--price", "spot=0.9", "--price", "reads=0")
    assert found == Prices(currency="EUR", spot=0.9, on_demand=4, reads=0)
    assert prices() == Prices()


@pytest.mark.fault("OA02")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spott=1", "--price.spott: unknown key; did you mean spot?"),
        ("gpu=1", "valid names are currency, spot, on_demand, gb_month, writes, reads"),
        ("spot", "--price.spot: is not a price (got ''); give a number such as 1.20"),
        ("spot=1,20", "--price.spot: is not a price (got '1,20')"),
        ("spot=nan", "--price.spot: is not a price (got nan)"),
        ("spot=-1", "--price.spot: is not a price (got -1.0)"),
        ("spot=1e300", "from 0 to 1e+06"),
        ("currency=", "--price.currency: has an invalid format (got ''); give a code such as EUR"),
        ("=", "--price.: unknown key"),
    ],
)
def test_an_error_names_key_value_and_fix(text: str, message: str) -> None:
    """Each error is one line."""
    with pytest.raises(ConfigError) as raised:
        prices("--price", text)
    (problem,) = raised.value.problems
    assert message in problem


@pytest.mark.fault("OA02")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"spot = true", "spot: is not a price (got True)"),
        (b"[spot]\nx = 1", "spot: is not a price (got {'x': 1})"),
        (b"spot = inf", "spot: is not a price (got inf)"),
        (b"currency = 3", "currency: has an invalid format (got 3)"),
        (b"spot = ", "parsing"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"#" * 2**20 + b"#", "it has more than 1048576 bytes"),
    ],
)
def test_a_bad_file_is_a_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    """The error names the file."""
    file = tmp_path / "prices.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"prices\.toml") as raised:
        prices("--prices", str(file))
    assert message in str(raised.value)


def test_all_errors_come_at_once() -> None:
    """One run of the command shows every invalid price."""
    with pytest.raises(ConfigError) as raised:
        prices("--price", "spot=x", "--price", "reads=y")
    assert len(raised.value.problems) == 2


def test_amounts_are_short() -> None:
    """Two decimals, and two digits for small amounts."""
    shown = [money(amount, "EUR") for amount in (0, 1234.5, -0.5, 0.0123, 1e-9)]
    assert shown == ["0.00 EUR", "1,234.50 EUR", "-0.50 EUR", "0.012 EUR", "0.000000 EUR"]
