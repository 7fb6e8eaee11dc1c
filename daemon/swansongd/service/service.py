# SPDX-License-Identifier: Apache-2.0
"""The composition root: builds the parts, runs the decision loop, and carries out its actions.

The main thread is the decision loop.  Only this thread changes the state and pings systemd's watchdog.  Its
only blocking call is the bounded wait for the next event.  Every other thread is a daemon thread: it does
blocking IO and posts events.  The process exits without waiting for them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import structlog
from swansong import protocol
from swansong_bucket.errors import StagingError
from swansong_bucket.model import DRILL, NoticeKind, Verdict
from swansong_bucket.util.threads import lasting_thread

import swansongd
from swansongd.config.config import Config, MetricsConfig
from swansongd.core import gpus, lifecycle_hook, notices
from swansongd.core.events import (
    Action,
    CancelFlush,
    CheckComplete,
    CheckFence,
    ClaimGeneration,
    CommitFailed,
    CommitManifest,
    Conclude,
    Exit,
    FlushFailed,
    Log,
    Mark,
    NoticeRaised,
    NoticeWithdrawn,
    PredecessorDenied,
    Prune,
    Rescan,
    Send,
    SetAside,
    SignalTrainer,
    SourceChanged,
    StartFlush,
    StopRequested,
    Tick,
    WithdrawClaim,
    WokeUp,
)
from swansongd.core.state import Predecessor, Settings, StartState, State
from swansongd.core.transition import EXIT_STOPPED
from swansongd.flush.committer import Committer
from swansongd.host.fdstore import FdStore
from swansongd.host.sdnotify import SystemdNotifier
from swansongd.notifications.notifier import Notifier
from swansongd.notifications.sent import SentNotifications, record_file
from swansongd.observe import log as logs
from swansongd.observe.accounting import Accounting, MeasuredResume, last_report
from swansongd.observe.all_well import DECIDED_S
from swansongd.observe.build_status import status_line, status_of
from swansongd.observe.decision_log import DecisionLog
from swansongd.observe.facts import Fact, Observed
from swansongd.observe.observer import Observation, Observer
from swansongd.observe.phase import phase_of
from swansongd.observe.samples import FlushSamples
from swansongd.observe.snapshot import Snapshot
from swansongd.observe.stall import StallWatch
from swansongd.observe.status import to_json
from swansongd.observe.step_digests import RedoneWatch
from swansongd.observe.tally import Tally
from swansongd.observe.timeline import recorded
from swansongd.restore.answers import Resume
from swansongd.restore.context import RestoreContext
from swansongd.restore.digests_query import RedoneAnswers
from swansongd.restore.predecessor import PredecessorWatch
from swansongd.restore.prefetch import Prefetch
from swansongd.service import signal_reader
from swansongd.service.decisions import Decisions
from swansongd.service.inbox import Inbox
from swansongd.service.storage import Storage
from swansongd.sources import host, logind, manual
from swansongd.sources.azure import AzureSource
from swansongd.sources.polled import PolledSource
from swansongd.sources.selection import (
    notice_kinds,
    open_lifecycle_hook,
    open_sources,
    shortest_grace_s,
    unknown_firmware,
)
from swansongd.staging.observe import StagingObserver
from swansongd.staging.prepare import open_restored, prepare
from swansongd.staging.remover import Remover
from swansongd.staging.seal import Scanner
from swansongd.trainers import users
from swansongd.trainers.channel import TrainerChannel
from swansongd.trainers.signals import SignalSender
from swansongd.util import boot

if TYPE_CHECKING:
    from swansongd.observe.metrics import Metrics

_TICK_S = 1.0
_TICK_URGENT_S = 0.1
_SLEEP_NOTED_S = 2.0
_EXIT_DRAIN_S = 2.0
_EXIT_WEBHOOK_S = 1.0
_EXIT_COMMAND_S = 4.0
"""A command that orders the next VM, and began at the notice of a shutdown, needs seconds."""
_STOP_EXTENSION_S = 10.0
"""Longer than one pass of the decision loop, and longer than the end of the daemon takes."""

_HANGS = "the decision loop hangs"

_log = structlog.get_logger(__name__)


class Service:
    """The daemon.

    Args:
        config: as loaded.

    Raises:
        ConfigError: a user of ``trainer.users`` does not exist, or the store's URL makes no sense.
        StagingError: staging cannot be used.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._born_mono_s = self._turned_mono_s = time.monotonic()
        self._asleep_s = _asleep_s()
        self._inbox = Inbox()
        self._post = self._inbox.put
        self._decision_log = DecisionLog()
        self._samples = FlushSamples()
        self._accounting = Accounting(self._record_resume, self._conclude)
        self._tally = Tally()
        self._redone = RedoneWatch(self._decision_log)
        self._stop = threading.Event()
        self._exit: Exit | None = None
        boot_id = boot.boot_id()
        self._notifier = SystemdNotifier(os.environ)
        self._fdstore = FdStore(self._notifier, os.environ, boot_id=boot_id)
        self._staging = prepare(config.staging.path, config.run.name)
        self._fdstore.use_directory(self._staging.own_fd)
        # Before a trainer can take the name: the daemon could not move a FUSE mount aside.
        with suppress(OSError):
            os.close(open_restored(self._staging.fd))
        vm = self._staging.vm(boot_id)
        self._storage = Storage(
            config,
            self._staging,
            self._post,
            state=lambda: self._state,
            boot_id=boot_id,
            vm=vm,
            stop=self._stop,
            shared=_shared_directory(),
        )
        self._flush, self._committer = self._storage.flush, self._storage.committer
        gpus_before = self._fdstore.gpus()
        if config.sources.gpu == "off":
            self._fdstore.forget_gpus()
            gpus_before = None
        cloud_sources = open_sources(
            config.sources, config.deadline, boot_id=boot_id, gpus_before=gpus_before
        )
        kinds = notice_kinds(cloud_sources, config.sources, config.deadline)
        first = _first_state(config, self._committer, vm, kinds)
        if gpus_before is not None:
            first = gpus.resumed(first, gpus_before)
        self._decisions = Decisions(first, _log)
        self._notifications = (
            Notifier(
                config.notify,
                run=config.run.name,
                vm=vm,
                record=SentNotifications(record_file(self._staging.own_fd), boot_id=boot_id),
                training=lambda: self._accounting.training,
                metrics_failure=lambda: "" if self._metrics is None else self._metrics.failure,
            )
            if config.notify.has_receiver
            else None
        )
        uids = users.uids_of(config.trainer.users)
        self._signal_sender = (
            None
            if config.trainer.signal == "none"
            else SignalSender(
                config.trainer,
                users.may_be_signalled(uids, os.geteuid()),
                boot_id=boot_id,
                post=self._post,
            )
        )
        self._observer = StagingObserver(
            Scanner(
                self._staging.path,
                run_fd=self._staging.fd,
                allowed_uids=users.may_connect(uids),
                settle_s=config.trainer.settle_s,
                monotonic=time.monotonic,
            ),
            self._post,
            _log,
            before=lambda: None if self._signal_sender is None else self._signal_sender.look(),
            replaced=self._restart_in_new_staging,
        )
        self._remover = Remover(self._staging.fd, self._observer.rescan)
        context = RestoreContext(
            self._storage.backend,
            self._storage.keys,
            self._staging,
            lambda: self._state,
            self._stop,
            post=self._post,
            mirror=self._storage.mirror,
            fetched=self._storage.known.seed,
            claim_refusal=lambda: self._committer.refusal,
            rescan=self._observer.rescan,
        )
        self._resume = Resume(context)
        self._prefetch = Prefetch(
            context, self._resume.downloads, is_enabled=config.restore.prefetch
        )
        self._resume.answered = self._prefetch.answered
        self._predecessor = PredecessorWatch(context, self._committer.owns, self._resume.wait_for)
        self._redone_answers = RedoneAnswers(
            context, self._redone, lambda: self._resume.restored_generation
        )
        self._channel = TrainerChannel(
            config.trainer.socket,
            run=config.run.name,
            staging=self._staging.path,
            allowed_uids=users.may_connect(uids),
            post=self._post,
            answer=self._answer,
            log=_log,
            is_signed=config.store.signing_key_file is not None,
            naming_secret=self._staging.naming_secret,
            listener_fd=self._fdstore.listener_fd(config.trainer.socket),
        )
        self._logind = logind.LogindSource(
            bus=config.sources.system_bus or logind.SYSTEM_BUS,
            wanted_delay_s=config.deadline.shutdown_delay_s,
            stop_grace_s=config.deadline.sigterm_grace_s,
            boot_id=boot_id,
            monotonic=time.monotonic,
            lock_fd=self._fdstore.lock_fd(),
            store_lock=self._fdstore.store_lock,
        )
        self._asg_hook = open_lifecycle_hook(config.sources)
        self._sources = [
            *cloud_sources,
            self._logind,
        ]
        self._channel.grace_s = shortest_grace_s(
            self._sources, assumed_grace_s=config.deadline.assumed_grace_s
        )
        self._metrics = self._open_metrics(config.metrics)
        self._observers: tuple[Observer, ...] = tuple(
            observer
            for observer in (
                self._accounting,
                self._tally,
                self._samples,
                self._redone,
                StallWatch(self._decision_log),
                self._notifications,
                None if self._metrics is None else self._metrics.counters,
            )
            if observer is not None
        )

    def run(self) -> int:
        """Run until an action or a signal ends the daemon.

        Returns:
            The exit code of the process.
        """
        signal_reader.handle(
            (signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
            lambda number: self._decisions.guarded("signal", partial(self._on_signal, number)),
        )
        self._prefetch.start()  # first: a trainer may wait for every byte of it
        if self._config.run.handover:
            self._predecessor.start()
        self._redone_answers.start()
        if self._signal_sender is not None:
            self._signal_sender.start()
        # After the process of a trainer without hooks: it may be suspect since a GPU failed.
        watched = {source.name for source in self._sources}
        earlier = self._fdstore.notices(time.monotonic(), watched | notices.UNWATCHED)
        for notice in earlier:
            self._post(NoticeRaised(notice))
        self._channel.start()
        if self._notifier.has_systemd:
            self._fdstore.store_listener(self._channel.share_listener())
        self._observer.start()
        self._storage.start()
        if self._metrics is not None:
            self._metrics.start()
        if self._asg_hook is not None:
            self._asg_hook.start()
        if self._notifications is not None:
            self._notifications.start()
        for source in self._sources:
            # It may have been withdrawn meanwhile.
            if isinstance(source, PolledSource | logind.LogindSource):
                source.has_earlier = any(notice.source == source.name for notice in earlier)
            lasting_thread(source.name, partial(source.run, self._post, self._stop)).start()
        _log.info(
            "started",
            version=swansongd.__version__,
            run=self._config.run.name,
            store=self._config.store.url,
            staging=str(self._staging.path),
            socket=str(self._config.trainer.socket),
            sources=[source.name for source in self._sources],
        )
        unknown = unknown_firmware(self._config.sources.cloud, now_mono_s=time.monotonic())
        if unknown is not None:
            self._post(SourceChanged(unknown))
        self._notifier.ready()
        # After ready(): nothing in staging may delay it.
        self._remover.start()
        try:
            while self._exit is None:
                self._turn()
        except Exception:
            # The restarted daemon continues from its records.  First a commit in flight may finish.
            _log.exception("decision_loop_fault", state=phase_of(self._state).value)
            self._committer.drain(_EXIT_DRAIN_S)
            return 1
        return self._leave(self._exit)

    # ------------------------------------------------------------------ the decision loop

    @property
    def _state(self) -> State:
        return self._decisions.state

    def _turn(self) -> None:
        self._turned_mono_s = time.monotonic()
        event = self._inbox.get(self._tick_s()) or Tick()
        now = time.monotonic()
        slept_s = _asleep_s() - self._asleep_s
        if slept_s > _SLEEP_NOTED_S:
            self._asleep_s += slept_s
            self._step(WokeUp(slept_s), now)
        self._step(event, now)
        self._decisions.guarded("hold", self._hold_or_release)
        if self._notifier.watchdog_interval_s is not None:
            self._notifier.watchdog()
        self._decisions.guarded(
            "status line", lambda: self._notifier.status(status_line(self._state, now))
        )

    def _store_notices(self) -> None:
        self._fdstore.store_notices(self._state.notices.live.values())

    def _store_records(self) -> None:
        self._fdstore.store_gpus(gpus.record_of(self._state))

    def _hold_or_release(self) -> None:
        """Extend the life of the VM during an evacuation, and stop extending it after the verdict."""
        evacuation = self._state.evacuation
        if evacuation is None:
            return
        if evacuation.verdict is not None:
            self._logind.release()
            return
        if self._asg_hook is not None and lifecycle_hook.needs_heartbeat(self._state):
            self._asg_hook.heartbeat()
        if host.NAME in self._state.notices.live:
            # Each call extends TimeoutStopSec= by this time only.  It is made in this loop, so systemd
            # kills a daemon that hangs.
            self._notifier.stopping(within_s=_STOP_EXTENSION_S)

    def _step(self, event: Observed, now: float) -> None:
        before = self._state
        actions = () if isinstance(event, Fact) else self._decisions.decide(event, now)
        # First: a daemon that dies after it sent a request must know the request's id at the next start.
        self._decisions.guarded("notices", self._store_notices)
        self._decisions.guarded("records", self._store_records)
        # Before the actions: a farewell among them has the training up to this event.
        self._decisions.guarded(
            "accounting", partial(self._accounting.record, before, self._state, event, now)
        )
        for action in actions:
            is_done = self._decisions.guarded(
                f"action {type(action).__name__}", partial(self._carry_out, action, now)
            )
            if not is_done and isinstance(action, StartFlush):
                self._post(FlushFailed(action.flush_id, "it could not be started", void=False))
            elif not is_done and isinstance(action, CommitManifest):
                reason = "it could not be started"
                self._post(CommitFailed(action.flush_id, reason, conflict=False))
        observation = Observation(before, self._state, event, actions, now)
        for observer in self._observers:
            self._decisions.guarded(
                f"observer {type(observer).__name__}", partial(observer.observe, observation)
            )

    def _tick_s(self) -> float:
        tick_s = _TICK_S if self._state.evacuation is None else _TICK_URGENT_S
        return min(tick_s, self._notifier.watchdog_interval_s or tick_s)

    def _restart_in_new_staging(self) -> None:
        """Trainers save elsewhere: end, so that the next daemon prepares the directory as at any start.

        Not while the open directory has sets that may still become commits.
        """
        if self._state.evacuation is None and not self._state.may_commit:
            self._post(StopRequested("staging was replaced", StagingError.exit_code))

    def _on_signal(self, number: int) -> None:
        arrived_mono_s = time.monotonic()
        if number == signal.SIGHUP:
            _log.warning("not_reloaded", hint="systemctl reload swansongd reads the configuration")
        elif number == signal.SIGINT:
            self._post(StopRequested("interrupted"))
        elif host.is_host_stopping(self._config.sources.system_bus or logind.SYSTEM_BUS):
            grace_s = self._config.deadline.sigterm_grace_s
            self._post(
                NoticeRaised(host.shutdown_notice(now_mono_s=arrived_mono_s, grace_s=grace_s))
            )
        else:
            self._post(StopRequested("stopped by the operator"))

    # ------------------------------------------------------------------ actions

    def _carry_out(self, action: Action, now: float) -> None:
        match action:
            case Send(message, connections):
                self._channel.send(connections, message)
            case SignalTrainer():
                assert self._signal_sender is not None
                self._signal_sender.send(action.request_id)
            case StartFlush():
                self._flush.start(
                    action.flush_id,
                    action.staged,
                    action.generation,
                    is_sealed=action.is_sealed,
                )
            case CancelFlush(flush_id):
                self._flush.cancel(flush_id)
            case CommitManifest():
                self._committer.commit(action)
            case ClaimGeneration():
                self._committer.claim(action)
            case WithdrawClaim():
                self._committer.withdraw_claim()
            case CheckComplete():
                self._committer.check_complete(action)
            case CheckFence():
                if self._state.generation is not None:
                    self._storage.check_fence()
            case Rescan():
                self._observer.rescan()
            case SetAside() | Prune():
                self._remover.submit(action)
            case Mark():
                if self._decision_log.mark(action, now):
                    self._storage.expedite()
            case Conclude():
                self._conclude(action, now)
            case Log():
                self._decision_log.write(action, now)
            case Exit():
                self._exit = action
            case _ as unreachable:
                assert_never(unreachable)
        if self._state.generation is not None:
            self._channel.set_generation(self._state.generation)

    def _conclude(self, conclusion: Conclude, now: float) -> None:
        if conclusion.is_final:
            self._decision_log.verdict(conclusion, now)
            is_complete = lifecycle_hook.is_complete(self._state, conclusion.verdict)
            if self._asg_hook is not None and is_complete:
                self._asg_hook.complete()
            for source in self._sources if conclusion.verdict is Verdict.SAFE else ():
                if isinstance(source, AzureSource):
                    source.settle(conclusion.notices)
        timeline, generation = self._decision_log.timeline, self._state.newest_generation
        assert timeline is not None
        if generation is not None:
            training = last_report(
                self._accounting.training,
                self._state,
                now_mono_s=time.monotonic(),
                now_wall_s=time.time(),
            )
            self._committer.farewell(
                generation,
                conclusion,
                recorded(
                    timeline,
                    self._state,
                    self._samples.taken(conclusion.evacuation_id, now),
                    node=self._accounting.training.node,
                    offset_s=time.time() - time.monotonic(),
                    is_over=training is not None and training.is_over,
                ),
                training=training,
                digests=self._redone.for_farewell(self._state, generation),
            )

    def _record_resume(self, measured: MeasuredResume) -> None:
        self._storage.ledger.record(
            measured, vm=self._state.settings.vm, daemon_mono_s=self._born_mono_s
        )
        if self._notifications is not None:
            self._notifications.resumed(measured)

    def _open_metrics(self, config: MetricsConfig) -> Metrics | None:
        if config.listen is None and config.textfile is None:
            return None
        from swansongd.observe.metrics import Metrics  # noqa: PLC0415 - slow to import

        return Metrics(config, self._figures, self._stop)

    @property
    def _hangs(self) -> bool:
        """Whether the decision loop has stopped, while the threads that serve figures still run."""
        return time.monotonic() - self._turned_mono_s > DECIDED_S

    def _figures(self) -> Snapshot:
        """The snapshot for metrics; RuntimeError if the loop hangs: an alert must fire then."""
        if self._hangs:
            raise RuntimeError(_HANGS)
        return self._snapshot()

    def _snapshot(self) -> Snapshot:
        """The figures of this moment, from any thread."""
        storage, faults = self._storage, self._decisions
        return Snapshot(
            run=self._config.run.name,
            version=swansongd.__version__,
            pid=os.getpid(),
            born_mono_s=self._born_mono_s,
            now_mono_s=time.monotonic(),
            now_wall_s=time.time(),
            state=self._state,
            training=self._accounting.training,
            tally=self._tally.figures,
            compared=self._redone.compared,
            decision_faults=faults.faults,
            last_fault=faults.last_fault,
            sources=tuple(source.name for source in self._sources),
            staging=self._staging.room(),
            bytes_referenced=storage.bytes_referenced,
            store_answered_mono_s=storage.health.answered_mono_s,
            store_errors=storage.health.errors,
            prefetch=self._prefetch.status(),
            mirror=None if storage.mirroring is None else storage.mirroring.status(),
            mirror_objects_taken=self._resume.downloads.from_mirror,
            prune=None if storage.pruner is None else storage.pruner.figures,
            pruned_mono_s=None if storage.pruner is None else storage.pruner.succeeded_mono_s,
            loss=storage.ledger.figures,
            log_lines_dropped=logs.dropped(),
            notifications=None if self._notifications is None else self._notifications.status(),
            metrics=None if self._metrics is None else self._metrics.status(),
        )

    def _status(self) -> protocol.Status:
        return protocol.Status(report=to_json(status_of(self._snapshot())))

    def _answer(self, message: protocol.Message, reply: Any) -> None:
        if isinstance(message, protocol.StatusQuery):
            if not self._hangs:  # the client must see that this daemon decides nothing
                reply(self._status())
        elif self._hangs and isinstance(message, protocol.FROM_OPERATOR):
            reply(protocol.Refused(_HANGS))
        elif isinstance(message, protocol.Notify):
            notice = manual.notice_of(message, now_mono_s=time.monotonic())
            self._post(NoticeRaised(notice))
            reply(protocol.Noted())
        elif isinstance(message, protocol.NotifyWithdrawn):
            for name in (manual.MANUAL, DRILL):
                self._post(NoticeWithdrawn(name, message.reason or "withdrawn by the operator"))
            reply(protocol.Noted())
        elif isinstance(message, protocol.TakeOver):
            self._post(PredecessorDenied("swansong takeover"))
            reply(protocol.Noted())
        elif isinstance(message, protocol.RestoreQuery):
            self._resume.ask(message, reply, self._post)
        elif isinstance(message, protocol.ShardsTaken):
            self._resume.take(message, reply)
        elif isinstance(message, protocol.RedoneQuery):
            self._redone_answers.ask(message, reply)

    def _leave(self, order: Exit) -> int:
        """End in bounded time: nothing here waits for a flush, a source or a trainer."""
        self._notifier.stopping(within_s=_STOP_EXTENSION_S)
        _log.info("stopping", reason=order.reason, code=order.code)
        if self._state.evacuation is not None:
            self._committer.drain(_EXIT_DRAIN_S)  # the farewell
        began_mono_s = time.monotonic()
        if self._notifications is not None:
            self._decisions.guarded("notifications", self._notifications.begin_close)
        self._storage.ledger.finish(_EXIT_DRAIN_S)
        if self._notifications is not None:
            close = partial(
                self._notifications.close,
                webhook_by_mono_s=began_mono_s + _EXIT_WEBHOOK_S,
                command_by_mono_s=began_mono_s + _EXIT_COMMAND_S,
            )
            self._decisions.guarded("notifications", close)
        if order.code == EXIT_STOPPED:
            self._fdstore.record_stop()
        self._stop.set()
        self._inbox.close()
        self._committer.close()
        # A command may wait for what ended the daemon.
        if not self._decisions.guarded("status", lambda: self._channel.close(self._status())):
            self._channel.close()
        if self._signal_sender is not None:
            self._signal_sender.stop()
        if self._metrics is not None:
            self._metrics.close()
        return order.code


def _first_state(
    config: Config,
    committer: Committer,
    vm: str,
    kinds: tuple[NoticeKind, ...],
) -> State:
    """The state that the decision loop begins with: the settings, and the recorded starts."""
    settings = Settings(
        reserve_s=config.deadline.reserve_s,
        signals_trainer=config.trainer.signal != "none",
        background_limit_bytes_per_s=config.flush.background_bytes_per_s,
        checkpoint_interval_s=config.run.checkpoint_interval_s,
        mtbf_s=config.run.mtbf_s,
        assumed_grace_s=config.deadline.assumed_grace_s,
        handover=config.run.handover,
        follow_ups=config.trainer.follow_ups,
        notice_kinds=kinds,
        stall_steps=config.trainer.stall_steps,
        stall_min_s=config.trainer.stall_min_s,
        vm=vm,
        boot_id=boot.boot_id(),
        booted_wall_ns=boot.booted_wall_ns(),
        ticks_per_s=os.sysconf("SC_CLK_TCK"),
    )
    predecessor = Predecessor() if config.run.handover else None
    return State(
        settings=settings, starts=StartState(known=committer.starts, predecessor=predecessor)
    )


def _shared_directory() -> Path | None:
    """The first ``RuntimeDirectory=`` of the unit, which all daemons of a VM share; None without systemd."""
    named = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(named) if named else None


def _asleep_s() -> float:
    """How long this VM has been suspended since it booted."""
    return boot.boottime_s() - time.monotonic()
