# SPDX-License-Identifier: Apache-2.0
"""One rank's session with the daemon of its VM.

The channel's background thread receives all messages and answers them.  The training loop only reads the
resulting state.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass

from swansong import openat, protocol
from swansong._checkpoint.redone import RedoneSteps
from swansong._checkpoint.restore_query import RestoreClient
from swansong._checkpoint.staging import remove_leftovers
from swansong._daemon.daemon_channel import Channel, socket_path
from swansong._log import log
from swansong._ranks.agreement import Agreement, Ranks
from swansong._ranks.choice import RestoreChoice
from swansong._ranks.rendezvous import Rendezvous
from swansong._ranks.rounds import RoundRunner
from swansong._ranks.start import TrainingStart


@dataclass(frozen=True)
class GuardOptions:
    """Arguments of :func:`swansong.attach`, which describes them."""

    run: str
    every_steps: int | None
    every_s: float | None
    socket: str | os.PathLike[str] | None
    stop_after_save: bool
    spike: float | None


class DaemonSession:
    """Dispatches the daemon's messages to the agreement of the ranks and to the restore client.

    Args:
        ranks: position of this process in the job.
        options: of the guard.
        tick: called at least once a second, connected or not, and when the start becomes known.
    """

    def __init__(self, ranks: Ranks, options: GuardOptions, tick: Callable[[], None]) -> None:
        self.ranks = ranks
        self.welcome = protocol.Welcome(options.run, staging="")
        """The daemon's last answer to Hello; before the first one, and after the end, without ``staging``."""
        self.staging: str | None = None
        """Staging directory of the run; None before the welcome, after the end, and while it is unusable."""
        self._trouble = ""
        """The reason why the directory that the daemon has named cannot be used."""
        self.is_fenced = False
        self.last_committed: protocol.Committed | None = None
        capabilities = {
            "periodic": options.every_steps is None and options.every_s is None,
            "follow_ups": not options.stop_after_save,
        }
        self._capabilities = [name for name, is_given in capabilities.items() if is_given]
        path, is_expected = socket_path(options.socket)
        self.channel = Channel(
            path,
            expected=is_expected,
            hello=self.hello,
            connected=self._connected,
            handle=self._handle,
            tick=self._ticked,
        )
        self._tick = tick
        self.start = TrainingStart(ranks, self.channel.send, path)
        self.agreement = Agreement(ranks.world_size, options.every_steps, self._answer)
        self.rendezvous: Rendezvous | None = None
        """With the ranks of the other VMs; None in a job on one VM."""
        self._rounds: RoundRunner | None = None
        choice = None
        if ranks.nodes > 1:
            self.rendezvous = Rendezvous(ranks, self.channel.send, self._met)
            self._rounds = RoundRunner(self.rendezvous, self.agreement)
            choice = RestoreChoice(self.rendezvous)
        self.restore = RestoreClient(self.channel.send, self.start, choice)
        self.redone = RedoneSteps(self.channel.send, ranks.rank, ranks.world_size)

    def hello(self) -> protocol.Hello:
        """Return the first message of each connection: identity and progress of this rank."""
        fields = {**self.ranks.position(), **self.start.fields()}
        return protocol.Hello(
            run=self.welcome.run,
            step=int(self.agreement.step),
            capabilities=list(self._capabilities),
            **fields,
        )

    def rolled_back(self) -> None:
        """Continue after a rollback, which has fenced the generation before itself."""
        self.is_fenced = False
        # Until the new start has a checkpoint, the newest commit is one that the ranks have rolled back from.
        self.agreement.periodic_is_due()

    def end(self, reason: str) -> None:
        """Disconnect from the daemon, and leave the job of the ranks."""
        self.staging, self.welcome = None, dataclasses.replace(self.welcome, staging="")
        self.redone.end()
        if self._rounds is not None:
            self._rounds.close()
        self.agreement = Agreement(1, None, lambda _: None)
        self.channel.close(protocol.Bye(reason))

    # ------------------------------------------------------------ background thread

    def _ticked(self) -> None:
        self._use_staging()
        self._tick()

    def _answer(self, message: protocol.Message) -> object:
        rounds = self._rounds
        return self.channel.send(message) if rounds is None else rounds.answer(message)

    def _met(self, start_id: str) -> None:
        """Begin the start of a job over several VMs; in the thread of the rounds."""
        self.start.learn(start_id)
        self._tick()  # reports the start before the first round

    def _connected(self) -> None:
        self.start.resend()
        if self._rounds is not None:
            self._rounds.resend()
        self.restore.resend()
        self.agreement.resend()

    def _handle(self, message: protocol.Message, fd: int = -1) -> None:
        if isinstance(message, protocol.ShardVerified):
            self.restore.receive_shard(message, fd)
            return
        if fd >= 0:
            os.close(fd)
        if isinstance(message, protocol.Welcome):
            self._welcomed(message)
        elif isinstance(message, protocol.Request):
            if self.staging is None:
                self.channel.send(
                    protocol.Declined(message.id, "the trainer cannot write to staging")
                )
            elif self._rounds is not None:
                self._rounds.request(message)
            elif not self.start.id:
                self.channel.send(
                    protocol.Declined(message.id, "rank 0 of this job is not connected")
                )
            else:
                self.agreement.request(message)
        elif isinstance(message, protocol.Target | protocol.Withdrawn) and self._rounds is not None:
            pass  # over several VMs only a round decides, and its decision is final
        elif isinstance(message, protocol.Target):
            self.agreement.target(message)
        elif isinstance(message, protocol.Withdrawn):
            self.agreement.withdraw(message.request_id)
        elif isinstance(message, protocol.NotRequested):
            self.agreement.not_requested()
        elif isinstance(message, protocol.StartDrawn):
            if self.rendezvous is None:
                self.start.learn(message.start_id)
        elif isinstance(message, protocol.Finished):
            if self.rendezvous is not None:
                self.rendezvous.finished(message)
        elif isinstance(message, protocol.Committed):
            # A healthy checkpoint can be committed after newer ones.
            self.last_committed = max(message, self.last_committed or message, key=_place)
        elif isinstance(message, protocol.Redone):
            self.redone.expect(message)
        elif isinstance(message, protocol.Fenced):
            if not self.is_fenced:
                log.warning("another VM has taken the run over (generation %s)", message.generation)
            self.is_fenced = True
        elif isinstance(message, (protocol.Restoring, protocol.Restored, protocol.Refused)):
            if isinstance(message, protocol.Refused) and message.reason != self.start.refusal:
                self.start.refused(message.reason)  # repeated at each attempt to connect
                log.warning(
                    "the daemon at %s refuses this process: %s", self.channel.path, message.reason
                )
            self.restore.receive(message)

    def _welcomed(self, welcome: protocol.Welcome) -> None:
        self.welcome = welcome
        self.start.refused("")
        self.redone.is_wanted = welcome.takes_digests
        self.redone.resend()
        if self._rounds is not None:
            self._rounds.start()
        self._trouble = ""
        self._use_staging()

    def _use_staging(self) -> None:
        """Use the staging directory that the daemon named; each tick tries again what failed."""
        staging = self.welcome.staging
        if not staging or self.staging == staging:
            return
        if not os.access(staging, os.R_OK | os.W_OK | os.X_OK):
            self._cannot_save(
                f"cannot write to {staging}: it is missing, or this user has no permission; restart the"
                " daemon, or add this user to the group that owns it (see ls -ld) and log in again"
            )
            return
        try:
            os.close(openat.open_absolute(staging, owners=self.channel.trusted_uids))
            remove_leftovers(staging, self.ranks.rank)
        except OSError as error:
            self._cannot_save(
                f"cannot use the staging directory: {error}; it must be an absolute path to a directory that"
                " root, this user or the daemon's user owns"
            )
            return
        self.staging = staging

    def _cannot_save(self, reason: str) -> None:
        if reason != self._trouble:
            self._trouble = reason
            log.warning("%s; training continues without checkpoints", reason)
            self.channel.send(protocol.Failed("", int(self.agreement.step), reason))


def _place(commit: protocol.Committed) -> tuple[int, int, bool]:
    """The place of a commit in the order of the run."""
    return commit.generation, commit.step, commit.is_final
