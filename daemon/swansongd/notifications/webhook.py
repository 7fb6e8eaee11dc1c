# SPDX-License-Identifier: Apache-2.0
"""Sends notifications to the webhook, one after another, with retries."""

from __future__ import annotations

import threading
from random import SystemRandom

import structlog

from swansongd.config.notify import PAGERDUTY_URL, NotifyConfig
from swansongd.errors import SwansongError
from swansongd.notifications import secret_files
from swansongd.notifications.bodies import of_preset, read_template
from swansongd.notifications.delivery import Deliverer, NotDelivered, Request
from swansongd.notifications.outbox import Outbox
from swansongd.notifications.record import Record
from swansongd.observe.notifications import Notification, Origin

NAME = "webhook"
ATTEMPTS_MAX = 10
"""Over about four minutes."""
_BACKOFF_S = 1.0
_BACKOFF_S_MAX = 60.0

_log = structlog.get_logger(__name__)
_random = SystemRandom()


def request_for(config: NotifyConfig, origin: Origin, notification: Notification) -> Request:
    """The request that reports this notification.  The files with secrets and the template are read now.

    Raises:
        SwansongError: one of them cannot be used.
    """
    token = "" if config.token_file is None else secret_files.token(config.token_file)
    url, file = config.webhook_url, config.webhook_url_file
    if url is None and file is None:
        url = PAGERDUTY_URL
    address = secret_files.address(url, file, allow_http=config.allow_http)
    if config.template_file is not None:
        body = read_template(config.template_file).body(origin, notification)
    else:
        body = of_preset(config.preset, origin, notification, token=token)
    headers = {"Content-Type": body.content_type}
    if token and config.preset != "pagerduty":
        headers["Authorization"] = f"Bearer {token}"
    return Request(
        address,
        data=body.data,
        headers=headers,
        ca_bundle=config.ca_bundle,
        has_secret=bool(token or file),
    )


class Webhook:
    """One thread that sends the notifications of its outbox.  Each is sent at least once, or given up.

    Args:
        config: with a webhook.
        origin: of all notifications.
        record: remembers what was sent.
        backoff_s: bound of the first pause between attempts; it doubles with each one.
    """

    def __init__(
        self,
        config: NotifyConfig,
        origin: Origin,
        record: Record,
        *,
        deliverer: Deliverer | None = None,
        backoff_s: float = _BACKOFF_S,
    ) -> None:
        self.outbox = Outbox()
        self._config = config
        self._origin = origin
        self._record = record
        self._deliverer = deliverer or Deliverer()
        self._backoff_s = backoff_s

    def start(self) -> None:
        threading.Thread(target=self._run, name="notify-webhook", daemon=True).start()

    def put(self, notification: Notification) -> None:
        """Queue a notification, unless its kind is not wanted or it was sent already."""
        is_wanted = notification.kind.value in self._config.kinds
        if is_wanted and not self._record.has(_key(notification)):
            self.outbox.put(notification)

    def _run(self) -> None:
        while True:
            entry = self.outbox.take()
            notification = entry.notification
            try:
                self._deliverer.send(request_for(self._config, self._origin, notification))
            except NotDelivered as error:
                if not error.is_permanent and entry.attempts < ATTEMPTS_MAX:
                    wait_s = self._wait_s(entry.attempts, error.retry_after_s)
                    self.outbox.retry(wait_s, str(error))
                else:
                    self._give_up(notification, str(error), entry.attempts)
            except SwansongError as error:
                self._give_up(notification, error.line(), entry.attempts)
            except Exception as error:  # its text may contain a secret
                self._give_up(notification, type(error).__name__, entry.attempts)
            else:
                self._record.add(_key(notification))
                self.outbox.finish()
                _log.info("notification_sent", kind=notification.kind.value, attempt=entry.attempts)

    def _give_up(self, notification: Notification, reason: str, attempts: int) -> None:
        self._record.add(_key(notification))
        self.outbox.finish(reason)
        _log.error(
            "notification_failed",
            kind=notification.kind.value,
            summary=notification.summary,
            reason=reason,
            attempts=attempts,
        )

    def _wait_s(self, attempts: int, retry_after_s: float | None) -> float:
        bound_s = min(self._backoff_s * 2 ** (attempts - 1), _BACKOFF_S_MAX)
        # Not all VMs of a group that lose their receiver try again at the same time.
        return max(_random.uniform(bound_s / 2, bound_s), retry_after_s or 0.0)


def _key(notification: Notification) -> str:
    return f"{NAME} {notification.key}"
