# SPDX-License-Identifier: Apache-2.0
"""Sends notifications to the webhook, one after another, with retries."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import replace
from random import SystemRandom

import structlog
from swansong_bucket.errors import SwansongError
from swansong_bucket.util.threads import lasting_thread

from swansongd.config.notify import PAGERDUTY_URL, NotifyConfig
from swansongd.notifications import secret_files
from swansongd.notifications.bodies import of_preset, read_template
from swansongd.notifications.delivery import Deliverer, HttpRequest, NotDelivered
from swansongd.notifications.outbox import Outbox
from swansongd.notifications.sent import BEGUN_MAX, SentNotifications
from swansongd.observe.notifications import GROUPS, Notification, NotificationKind, Origin
from swansongd.util.rates import TokenBucket

NAME = "webhook"
AT_ONCE, PER_S = 20, 1 / 60
"""Notifications of one kind: at once, and on average.  A source may invent any number of notices."""
_KNOWN_MAX = 500
ATTEMPTS_MAX = 10
"""Over about four minutes."""
_BACKOFF_S = 1.0
_BACKOFF_S_MAX = 60.0

_log = structlog.get_logger(__name__)
_random = SystemRandom()


def request_for(config: NotifyConfig, origin: Origin, notification: Notification) -> HttpRequest:
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
    return HttpRequest(
        address,
        data=body.data,
        headers=headers,
        ca_bundle=config.ca_bundle,
        has_secret=bool(token or file),
    )


class Webhook:
    """One thread that sends the notifications of its outbox.  Each is sent at least once, or given up.

    A known notification is sent again if it ends a problem that is open for the receiver, and a verdict also
    if it opens one again: the last message about a problem always has its present state.

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
        record: SentNotifications,
        *,
        deliverer: Deliverer | None = None,
        backoff_s: float = _BACKOFF_S,
    ) -> None:
        self.outbox = Outbox()
        self.limited = 0
        """Notifications that were not queued, because there were too many of their kind."""
        self._known = OrderedDict.fromkeys(record.sent(NAME))
        kinds = {*config.kinds, *GROUPS}  # the group of a condition begins with its kind
        self._open = {each for each in record.begun if each.partition("/")[0] in kinds}
        self._rates: dict[str, TokenBucket] = {}
        self._lock = threading.Lock()
        self._config = config
        self._origin = origin
        self._record = record
        self._deliverer = deliverer or Deliverer()
        self._backoff_s = backoff_s

    def start(self) -> None:
        lasting_thread("notify-webhook", self._run).start()

    @property
    def open(self) -> frozenset[str]:
        """Groups whose last message was not their end."""
        with self._lock:
            return frozenset(self._open)

    def put(self, notification: Notification) -> None:
        """Queue a notification, unless it is known, of an unwanted kind, or one of too many."""
        with self._lock:
            if notification.ends:
                self._forget(notification.ends)
                if notification.group not in self._open:
                    notification = replace(notification, is_over=True)  # an end opens no problem
            if not self._is_due(notification):
                return
            if notification.key in self._known:  # another event, which needs another id
                again = f"{notification.key}/{notification.wall_s:.3f}"
                notification = replace(notification, key=again)
            self._known[notification.key] = None
            if len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
            self._open.discard(notification.group)
            if not notification.is_over and len(self._open) < BEGUN_MAX:
                self._open.add(notification.group)
            # Within the lock: the messages of a group keep the order of its states.
            self.outbox.put(notification)

    def _is_due(self, notification: Notification) -> bool:
        is_open = notification.group in self._open
        if is_open and notification.is_over:
            return True  # of any kind and at any rate: nothing else would close the problem
        if notification.kind.value not in self._config.kinds:
            return False
        is_back = notification.kind is NotificationKind.VERDICT and not (
            is_open or notification.is_over
        )
        if notification.key in self._known and not is_back:
            return False
        rate = self._rates.setdefault(notification.kind, TokenBucket(AT_ONCE, PER_S))
        is_admitted = rate.take(time.monotonic())
        self.limited += not is_admitted
        return is_admitted

    def _forget(self, beginning: str) -> None:
        """A notice that was withdrawn may come again."""
        for key in [key for key in self._known if key.startswith(beginning)]:
            del self._known[key]
        self._record.forget(f"{NAME} {beginning}")

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
