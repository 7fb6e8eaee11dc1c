# SPDX-License-Identifier: Apache-2.0
"""The cost of a run in money: GPU time, storage and requests, at given prices.

Pure.  docs/operations/loss.md has the model.  An amount is None where its price is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from swansong_bucket.config.values import InvalidValue, key, text

from swansong_tools.economics.loss import HOUR_S, Interruption, Loss

GB_BYTES = 2**30
"""S3 and GCS bill storage by this unit."""
MONTH_S = 365.25 / 12 * 24 * HOUR_S
LIST_CURRENCY = "USD"
PRICE_MAX = 1e6


def _price(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value < PRICE_MAX:
        return float(value)
    raise InvalidValue("is not a price", f"give a number such as 1.20, from 0 to {PRICE_MAX:g}")


_currency = text(r"[A-Za-z$€£¥]{1,8}", "give a code such as EUR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices in one currency; None for an unknown price.  The names are the keys of ``--price``."""

    currency: str = key(_currency, LIST_CURRENCY, about="Currency of all prices.")
    spot: float | None = key(
        _price, None, about="Of one GPU for an hour, on a spot VM.", example="1.20"
    )
    on_demand: float | None = key(
        _price, None, about="Of one GPU for an hour, on demand.", example="3.90"
    )
    gb_month: float | None = key(
        _price, None, about="Of 2^30 stored bytes for a month.", example="0.023"
    )
    writes: float | None = key(
        _price, None, about="Of 1,000 writes: PUT, POST, LIST.", example="0.005"
    )
    reads: float | None = key(_price, None, about="Of 1,000 reads: GET, HEAD.", example="0.0004")


LIST_PRICES = {
    "s3": Prices(gb_month=0.023, writes=0.005, reads=0.0004),
    "gs": Prices(gb_month=0.020, writes=0.005, reads=0.0004),
}
"""List prices by the scheme of a store: S3 Standard in us-east-1, GCS Standard in one US region."""


def with_list_prices(prices: Prices, store_url: str) -> Prices:
    """The prices, completed by the list prices of the store if they are in the same currency."""
    listed = LIST_PRICES.get(store_url.partition("://")[0])
    if listed is None or prices.currency != listed.currency:
        return prices
    missing = {
        item.name: getattr(listed, item.name)
        for item in fields(Prices)
        if getattr(prices, item.name) is None
    }
    return replace(prices, **missing)


def of_gpus(gpu_s: float, gpu_hour: float | None) -> float | None:
    """Cost of this GPU time at the price of a GPU hour."""
    return None if gpu_hour is None else gpu_s / HOUR_S * gpu_hour


def of_storage(prices: Prices, size_bytes: float, stored_s: float = MONTH_S) -> float | None:
    """Cost of these bytes for this time, which is a month by default."""
    if prices.gb_month is None:
        return None
    return size_bytes / GB_BYTES * stored_s / MONTH_S * prices.gb_month


def of_requests(prices: Prices, writes: float, reads: float) -> float | None:
    if prices.writes is None or prices.reads is None:
        return None
    return (writes * prices.writes + reads * prices.reads) / 1000


def costs(loss: Loss, prices: Prices) -> dict[str, float | None]:
    """The cost of the GPU time of a run, by part.

    ``spot`` is all GPU time for which the VMs existed, at the spot price.  ``interruptions`` is the share of
    it that was lost to interruptions, and ``saves`` the share in which training stood still for other
    checkpoints.
    ``on_demand`` is the productive GPU time at the on-demand price: the same work without interruptions.
    While the cloud has no VM, one VM of the job is not paid for.
    """
    unpaid = unpaid_gpu_s(loss)
    return {
        "spot": of_gpus(max(0.0, loss.gpu_s - unpaid), prices.spot),
        "interruptions": of_gpus(max(0.0, loss.lost_gpu_s - unpaid), prices.spot),
        "saves": of_gpus(loss.parts_gpu_s["saves"], prices.spot),
        "on_demand": of_gpus(loss.productive_gpu_s, prices.on_demand),
    }


def saved(on_demand: float | None, *spent: float | None) -> float | None:
    """The savings of a run on spot VMs against on-demand; negative if spot cost more.

    Args:
        spent: the GPU time at the spot price, which must be known, then further costs, if they are known.
    """
    if on_demand is None or spent[0] is None:
        return None
    return on_demand - sum(amount or 0.0 for amount in spent)


def unpaid_gpu_s(loss: Loss) -> float:
    """GPU time of the run for which no VM existed."""
    return sum(_unpaid_gpu_s(each) for each in loss.interruptions)


def _unpaid_gpu_s(each: Interruption) -> float:
    """GPU time without a VM; a machine without a boot in this time was there all along."""
    is_new_vm = each.parts_s.get("boot") is not None
    return each.ranks / each.nodes * (each.parts_s["cloud"] or 0.0) if is_new_vm else 0.0
