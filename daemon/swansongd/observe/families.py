# SPDX-License-Identifier: Apache-2.0
"""Metric families, declared once with their labels and help, and filled with samples at a scrape."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds for times of an evacuation; grace periods are 25 to 120 s."""
_SUFFIX = {"counter": "_total", "info": "_info"}


@dataclass(frozen=True, slots=True)
class Family:
    """One metric."""

    name: str
    """With its suffix, as queries use it."""
    kind: str
    """``counter``, ``gauge``, ``histogram`` or ``info``."""
    help: str
    labels: tuple[str, ...] = ()
    """Besides the labels of all families."""

    def metric(self) -> Metric:
        """The family without samples, as prometheus_client has it."""
        return Metric(self.name.removesuffix(_SUFFIX.get(self.kind, "")), self.help, self.kind)


def counter(name: str, help_text: str, *labels: str) -> Family:
    return Family(name, "counter", help_text, labels)


def gauge(name: str, help_text: str, *labels: str) -> Family:
    return Family(name, "gauge", help_text, labels)


def histogram(name: str, help_text: str, *labels: str) -> Family:
    return Family(name, "histogram", help_text, labels)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of durations."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    """By bucket, not cumulative; the last one has no bound."""
    sum_s: float = 0.0

    def plus(self, seconds: float) -> Histogram:
        """The same with one more duration."""
        at = bisect_left(BUCKETS_S, seconds)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :])
        return Histogram(counts, self.sum_s + seconds)


class Sheet:
    """The samples of one scrape.

    Args:
        families: all that may get samples.
        fixed: labels of each sample.
    """

    def __init__(self, families: Iterable[Family], **fixed: str) -> None:
        self._families = {family.name: family for family in families}
        self._fixed = fixed
        self._metrics: dict[str, Metric] = {}

    def of(self, **fixed: str) -> Sheet:
        """The same sheet, with these fixed labels for further samples."""
        other = copy.copy(self)
        other._fixed = fixed  # noqa: SLF001 - a sheet, too
        return other

    def put(self, name: str, value: float | None, **labels: str) -> None:
        """Add a sample; None adds nothing."""
        if value is not None:
            self._metric(name, labels).add_sample(name, self._fixed | labels, float(value))

    def put_one_of(
        self, name: str, label: str, values: Iterable[str], chosen: str | None, **labels: str
    ) -> None:
        """Add a sample for each value of the label: 1 for the chosen one, 0 for the others.

        None adds nothing.
        """
        for value in values if chosen is not None else ():
            self.put(name, value == chosen, **{label: value}, **labels)

    def put_histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        """Add the samples of a histogram."""
        metric, all_labels = self._metric(name, labels), self._fixed | labels
        bounds = [*map(floatToGoString, BUCKETS_S), "+Inf"]
        totals = list(accumulate(histogram.counts))
        for bound, total in zip(bounds, totals, strict=True):
            metric.add_sample(f"{name}_bucket", {**all_labels, "le": bound}, total)
        metric.add_sample(f"{name}_count", all_labels, totals[-1])
        metric.add_sample(f"{name}_sum", all_labels, histogram.sum_s)

    def metrics(self, *, is_whole: bool = False) -> Sequence[Metric]:
        """All families with samples, in the order of their declaration.

        Args:
            is_whole: with the families without samples.
        """
        known = self._metrics
        return [
            known.get(name) or family.metric()
            for name, family in self._families.items()
            if is_whole or name in known
        ]

    def _metric(self, name: str, labels: dict[str, str]) -> Metric:
        family = self._families[name]
        assert set(labels) == set(family.labels), f"{name}: {sorted(labels)}"
        if name not in self._metrics:
            self._metrics[name] = family.metric()
        return self._metrics[name]
