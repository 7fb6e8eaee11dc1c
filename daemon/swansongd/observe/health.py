# SPDX-License-Identifier: Apache-2.0
"""The health of a source or of the store, derived from single successes and failures."""

from __future__ import annotations

from collections.abc import Callable

from swansong_bucket.model import Health, SourceStatus

from swansongd.core.events import Event, SourceChanged


class HealthTracker:
    """Turns single successes and failures into health, and posts each change once.

    A change of the reason alone is posted as well; ``since_mono_s`` then stays the same.

    Args:
        source: glossary name of the source.
        blind_after_s: time without a valid answer after which the source counts as blind.
        monotonic: the clock.
        post: takes the SourceChanged events.
    """

    def __init__(
        self,
        source: str,
        *,
        blind_after_s: float,
        monotonic: Callable[[], float],
        post: Callable[[Event], None],
    ) -> None:
        self._source = source
        self._blind_after_s = blind_after_s
        self._monotonic = monotonic
        self._post = post
        self._last_good_mono_s = monotonic()
        self._status: SourceStatus | None = None

    def ok(self, reason: str = "answers") -> None:
        """The source gave a valid answer."""
        self._last_good_mono_s = self._monotonic()
        self._become(Health.OK, reason)

    def failed(self, reason: str) -> None:
        """The source could not be reached, or its answer was invalid.

        Use the same ``reason`` for the same cause: each new wording is posted.
        """
        blind = self._monotonic() - self._last_good_mono_s >= self._blind_after_s
        self._become(Health.BLIND if blind else Health.DEGRADED, reason)

    def degraded(self, reason: str) -> None:
        """The source answers, but is limited in some way."""
        self._last_good_mono_s = self._monotonic()
        self._become(Health.DEGRADED, reason)

    def unsupported(self, reason: str) -> None:
        """The source answered that this VM lacks the feature."""
        self._last_good_mono_s = self._monotonic()
        self._become(Health.UNSUPPORTED, reason)

    def _become(self, health: Health, reason: str) -> None:
        before = self._status
        if before is not None and (before.health, before.reason) == (health, reason):
            return
        is_same = before is not None and before.health is health
        self._status = SourceStatus(
            source=self._source,
            health=health,
            reason=reason,
            since_mono_s=before.since_mono_s if before and is_same else self._monotonic(),
        )
        self._post(SourceChanged(self._status))
