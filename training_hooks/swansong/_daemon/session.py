# SPDX-License-Identifier: Apache-2.0
"""What this rank and the daemon of its VM say to each other; the training loop only reads what came of it.

All that is heard is heard in the channel's background thread, and answered there at once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from collections.abc import Callable

from swansong import openat
from swansong._checkpoint.restore import RestoreClient
from swansong._checkpoint.staging import remove_leftovers
from swansong._daemon.channel import Channel, socket_path
from swansong._ranks.agreement import Agreement, Ranks
from swansong._ranks.choice import RestoreChoice
from swansong._ranks.rendezvous import Rendezvous
from swansong._ranks.rounds import RoundRunner
from swansong.protocol import (
    Bye,
    Committed,
    Declined,
    Failed,
    Fenced,
    Finished,
    Hello,
    Message,
    Refused,
    Request,
    Restored,
    Restoring,
    Target,
    Welcome,
    Withdrawn,
)

log = logging.getLogger("swansong")


class DaemonSession:
    """One rank's; its parts are the channel, the agreement of the ranks, and the question where to go on.

    Args:
        ranks: which part of the job this process is.
        run: name of the run; empty takes the daemon's.
        every_steps: periodic checkpoints at multiples of this step.
        plans_periodic: whether the trainer, and not the daemon, says when periodic checkpoints are due.
        socket: where the daemon listens, if somebody says so.
        tick: called at least once a second, connected or not.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        run: str,
        every_steps: int | None,
        plans_periodic: bool,
        socket: str | os.PathLike[str] | None,
        tick: Callable[[], None],
    ) -> None:
        self.ranks = ranks
        self.run = run
        self.staging: str | None = None
        """Where to write checkpoints; None before the welcome, and after the end."""
        self.start_id = secrets.token_hex(8)
        """Of this start of the training: tells the daemon which sets are of the current line of states."""
        self.naming_secret = ""
        """Goes into the names of sets, so that other users cannot compute them; the same for all ranks."""
        self.grace_s = 0.0
        """Shortest notice that is to be expected; 0 when nobody knows."""
        self.is_fenced = False
        self.refusal = ""
        """Why the daemon refused this process the last time; empty while it does not."""
        self.last_committed: Committed | None = None
        self._capabilities = [] if plans_periodic else ["periodic"]
        path, is_expected = socket_path(socket)
        self.channel = Channel(
            path,
            expected=is_expected,
            hello=self.hello,
            connected=self._connected,
            handle=self._handle,
            tick=tick,
        )
        self.agreement = Agreement(ranks.world_size, every_steps, self._answer)
        self.rendezvous: Rendezvous | None = None
        """With the ranks of the other VMs; None in a job on one VM."""
        self._rounds: RoundRunner | None = None
        choice = None
        if ranks.nodes > 1:
            self.rendezvous = Rendezvous(ranks, self.channel.send)
            self._rounds = RoundRunner(self.rendezvous, self.agreement)
            choice = RestoreChoice(self.rendezvous)
        self.restore = RestoreClient(self.channel.send, choice)

    def hello(self) -> Hello:
        """Who this is, and how far it has come."""
        return Hello(
            run=self.run,
            step=int(self.agreement.step),
            start_id=self.start_id,
            capabilities=list(self._capabilities),
            **dataclasses.asdict(self.ranks),
        )

    def rolled_back(self, ranks: Ranks) -> None:
        """Training has gone back: say under which attempt it goes on.  What fenced it was our own."""
        self.ranks = ranks
        self.is_fenced = False
        # The first checkpoint of the new generation: without it, what was taken back would still be
        # the newest one that is committed.
        self.agreement.periodic_is_due()
        self.channel.send(self.hello())

    def end(self, reason: str) -> None:
        """Take leave of the daemon and of the other ranks."""
        self.staging = None
        if self._rounds is not None:
            self._rounds.close()
        self.agreement = Agreement(1, None, lambda _: None)
        self.channel.close(Bye(reason))

    def forked(self) -> None:
        """In the child of a fork, which is no rank: do nothing, and hold no connection."""
        self.staging = None
        self.channel.forked()
        if self._rounds is not None:
            self._rounds.forked()
        self.agreement = Agreement(1, None, lambda _: None)

    # ------------------------------------------------------------ background thread

    def _answer(self, message: Message) -> object:
        rounds = self._rounds
        return self.channel.send(message) if rounds is None else rounds.answer(message)

    def _connected(self) -> None:
        if self._rounds is not None:
            self._rounds.resend()
        self.restore.resend()
        self.agreement.resend()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self._welcomed(message)
        elif isinstance(message, Request):
            if self.staging is None:
                self.channel.send(Declined(message.id, "the trainer cannot write to staging"))
            elif self._rounds is not None:
                self._rounds.request(message)
            else:
                self.agreement.request(message)
        elif isinstance(message, Target | Withdrawn) and self._rounds is not None:
            pass  # over several VMs only a round decides, and its decision is final
        elif isinstance(message, Target):
            self.agreement.target(message)
        elif isinstance(message, Withdrawn):
            self.agreement.withdraw(message.request_id)
        elif isinstance(message, Finished):
            if self.rendezvous is not None:
                self.rendezvous.finished(message.job_start_id)
        elif isinstance(message, Committed):
            self.last_committed = message
        elif isinstance(message, Fenced):
            if not self.is_fenced:
                log.warning("another VM has taken the run over (generation %s)", message.generation)
            self.is_fenced = True
        elif isinstance(message, (Restoring, Restored, Refused)):
            if isinstance(message, Refused) and message.reason != self.refusal:
                self.refusal = message.reason  # each attempt to connect gets it again
                log.warning("the daemon at %s refuses us: %s", self.channel.path, message.reason)
            self.restore.receive(message)

    def _welcomed(self, welcome: Welcome) -> None:
        self.refusal = ""
        self.run = welcome.run
        self.grace_s = welcome.grace_s
        self.naming_secret = welcome.naming_secret
        if self._rounds is not None:
            self._rounds.start()
        if self.staging == welcome.staging:
            return
        if not os.access(welcome.staging, os.R_OK | os.W_OK | os.X_OK):
            self._cannot_save(
                f"cannot write to {welcome.staging}: add this user to the group that owns it (see ls -ld)"
                " and log in again"
            )
            return
        try:
            os.close(openat.open_absolute(welcome.staging, owners=self.channel.trusted_uids))
        except OSError as error:
            self._cannot_save(
                f"cannot use the staging directory: {error}; it must be an absolute path to a directory of"
                " root, of this user or of the daemon's user"
            )
            return
        remove_leftovers(welcome.staging, self.ranks.rank)
        self.staging = welcome.staging

    def _cannot_save(self, reason: str) -> None:
        log.warning("%s; training continues without checkpoints", reason)
        self.channel.send(Failed("", int(self.agreement.step), reason))
