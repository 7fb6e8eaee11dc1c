# SPDX-License-Identifier: Apache-2.0
"""Calls the heartbeat URL at an interval, while all is well."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
from swansong_bucket.errors import SwansongError
from swansong_bucket.util.printable import printable
from swansong_bucket.util.threads import lasting_thread

from swansongd.config.notify import NotifyConfig
from swansongd.notifications import secret_files
from swansongd.notifications.delivery import Deliverer, HttpRequest
from swansongd.observe.status import HeartbeatStatus

_RETRY_S_MAX = 30.0
_LOOK_S = 1.0
"""Interval at which a silent heartbeat looks whether all is well again."""

_log = structlog.get_logger(__name__)


def request_for(config: NotifyConfig) -> HttpRequest:
    """The request of a heartbeat.

    Raises:
        SwansongError: the file with the address cannot be used.
    """
    url = secret_files.address(
        config.heartbeat_url, config.heartbeat_url_file, allow_http=config.allow_http
    )
    has_secret = config.heartbeat_url_file is not None
    return HttpRequest(url, method="GET", ca_bundle=config.ca_bundle, has_secret=has_secret)


class Heartbeat:
    """One thread that calls the URL.

    Args:
        config: with a heartbeat.
        why_silent: the reason against a call; empty if all is well.
    """

    def __init__(self, config: NotifyConfig, why_silent: Callable[[], str]) -> None:
        self._config = config
        self._why_silent = why_silent
        self._deliverer = Deliverer()
        self._never = threading.Event()
        self._sent = 0
        self._failed = 0
        self._silent = ""
        self._last_error = ""

    def start(self) -> None:
        lasting_thread("notify-heartbeat", self._run).start()

    def status(self) -> HeartbeatStatus:
        return HeartbeatStatus(
            sent=self._sent,
            failed=self._failed,
            silent=self._silent or None,
            last_error=self._last_error or None,
        )

    def _run(self) -> None:
        while True:
            self._never.wait(self._beat())

    def _beat(self) -> float:
        """Call the URL if all is well; returns the seconds to the next attempt."""
        self._silent = str(printable(self._why_silent()))
        if self._silent:
            return _LOOK_S
        interval_s = self._config.heartbeat_interval_s
        try:
            self._deliverer.send(request_for(self._config))
        except SwansongError as error:
            self._note_failure(error.line())
            return min(interval_s, _RETRY_S_MAX)
        except Exception as error:  # its text may contain a secret
            self._note_failure(type(error).__name__)
            return min(interval_s, _RETRY_S_MAX)
        self._sent += 1
        self._last_error = ""
        return interval_s

    def _note_failure(self, reason: str) -> None:
        self._failed += 1
        reason = str(printable(reason))
        if reason != self._last_error:  # log each reason once
            _log.warning("heartbeat_failed", reason=reason)
        self._last_error = reason
