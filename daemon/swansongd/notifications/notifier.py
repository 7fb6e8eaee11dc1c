# SPDX-License-Identifier: Apache-2.0
"""The observer of decisions that hands notifications to the threads that send them."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable

from swansong_bucket.util.threads import lasting_thread

from swansongd.config.notify import NotifyConfig
from swansongd.core.state import State
from swansongd.notifications.delivery import warm
from swansongd.notifications.exec_command import Command
from swansongd.notifications.heartbeat import Heartbeat
from swansongd.notifications.sent import SentNotifications
from swansongd.notifications.webhook import Webhook
from swansongd.observe.accounting import MeasuredResume, Training
from swansongd.observe.all_well import Stretch, continued, why_silent
from swansongd.observe.conditions import Watch
from swansongd.observe.facts import StepsCompared
from swansongd.observe.notifications import (
    Notification,
    Origin,
    caused,
    of_comparison,
    of_resume,
)
from swansongd.observe.observer import Observation
from swansongd.observe.status import NotificationsStatus

SETTLE_S = 15.0
"""A condition that holds, or has ended, for a shorter time causes no notification."""
_LOOK_S = 1.0
_WARM_S = 5.0
"""Imports for the first notification begin this long after the start, which has more urgent work."""
_KILL_S = 0.5


class Notifier:
    """Sees each decision, and queues the notifications that it causes.

    Args:
        config: with a webhook, a heartbeat or a command.
        run, vm: of this daemon.
        record: remembers what earlier daemons of this boot have sent.
        settle_s: see :data:`SETTLE_S`.
        training: returns the progress of the training; by default there is none.
        metrics_failure: returns why ``metrics.listen`` is not served.
    """

    def __init__(
        self,
        config: NotifyConfig,
        *,
        run: str,
        vm: str,
        record: SentNotifications,
        settle_s: float = SETTLE_S,
        training: Callable[[], Training] = Training,
        metrics_failure: Callable[[], str] = str,
    ) -> None:
        origin = Origin(run=run, vm=vm, host=platform.node())
        self._config = config
        self._record = record
        self._webhook = Webhook(config, origin, record) if config.has_webhook else None
        self._command = Command(config, origin, record) if config.exec else None
        self._heartbeat = Heartbeat(config, self._why_silent) if config.has_heartbeat else None
        self._watch = Watch(settle_s, set(record.begun))
        self._training = training
        self._metrics_failure = metrics_failure
        self._latest: tuple[State, float] | None = None
        self._stretch: Stretch | None = None
        self._never = threading.Event()

    def start(self) -> None:
        """Start the threads."""
        for sender in (self._webhook, self._command, self._heartbeat):
            if sender is not None:
                sender.start()
        lasting_thread("notify-watch", self._look).start()

    def observe(self, observation: Observation) -> None:
        """Queue the notifications of one decision.  No IO: it takes microseconds."""
        before, after, event, actions, now_mono_s = observation
        self._latest = (after, now_mono_s)
        self._stretch = continued(self._stretch, after, now_mono_s)
        found = caused(
            before,
            after,
            actions,
            step=self._training().step,
            now_mono_s=now_mono_s,
            wall_s=time.time(),
        )
        if isinstance(event, StepsCompared):
            compared = of_comparison(event, after, time.time())
            found += [] if compared is None else [compared]
        for made in found:
            self._put(made)

    def resumed(self, measured: MeasuredResume) -> None:
        """Queue the notification of a resume.  No IO."""
        made = of_resume(measured, time.time())
        if made is not None:
            self._put(made)

    def status(self) -> NotificationsStatus:
        return NotificationsStatus(
            webhook=None if self._webhook is None else self._webhook.outbox.status(),
            exec=None if self._command is None else self._command.outbox.status(),
            heartbeat=None if self._heartbeat is None else self._heartbeat.status(),
            limited=0 if self._webhook is None else self._webhook.limited,
        )

    def begin_close(self) -> None:
        """The daemon ends: the webhook and the command begin with all that is queued.  Does not block."""
        for sender in (self._webhook, self._command):
            if sender is not None:
                sender.outbox.begin_drain()

    def close(self, *, webhook_by_mono_s: float, command_by_mono_s: float) -> None:
        """Wait for notices and verdicts until these instants, then kill a command that runs."""
        if self._webhook is not None:
            self._webhook.outbox.drain(max(0.0, webhook_by_mono_s - time.monotonic()))
        if self._command is not None:
            self._command.outbox.drain(max(0.0, command_by_mono_s - time.monotonic()))
            self._command.stop()
            self._command.outbox.drain(_KILL_S)

    def _put(self, notification: Notification) -> None:
        if self._webhook is not None:
            self._webhook.put(notification)
        if self._command is not None:
            self._command.put(notification)

    def _look(self) -> None:
        """Watch the conditions, beside the decision loop: their computation takes a millisecond."""
        if not self._never.wait(_WARM_S) and (self._webhook or self._heartbeat):
            warm()
        while not self._never.wait(_LOOK_S):
            self._look_once()

    def _look_once(self) -> None:
        if self._latest is None:
            return
        state, _ = self._latest
        due = self._watch.look(
            state,
            step=self._training().step,
            now_mono_s=time.monotonic(),
            wall_s=time.time(),
            metrics_failure=self._metrics_failure(),
            told=frozenset() if self._webhook is None else self._webhook.open,
        )
        for made in due:
            self._put(made)
        self._record.set_begun(frozenset(self._watch.begun))

    def _why_silent(self) -> str:
        if self._latest is None:
            return "the daemon has just started"
        state, decided_mono_s = self._latest
        return why_silent(
            state,
            self._stretch,
            decided_mono_s=decided_mono_s,
            now_mono_s=time.monotonic(),
            heartbeat_interval_s=self._config.heartbeat_interval_s,
            metrics_failure=self._metrics_failure(),
        )
