# SPDX-License-Identifier: Apache-2.0
"""All errors of the daemon, with the exit codes of commands.

::

    SwansongError
    ├── ConfigError              2   the configuration is wrong; lists every problem
    ├── Unreachable             13   the daemon does not answer on its socket
    ├── FencedError             14   a newer generation of this run exists
    ├── StagingError            15   the staging directory or a restore target cannot be used
    ├── StoreError              16   the object store refused or failed
    │   ├── Transient                a retry may succeed
    │   ├── Permanent                fails until an operator fixes the cause
    │   ├── NotFound                 the key (or the bucket) does not exist
    │   ├── TooLarge                 the object exceeds the limit for small objects
    │   ├── Exists                   create-if-absent found an object under the key
    │   ├── Changed                  a conditional delete found another object under the key
    │   └── Locked                   the store keeps the object until a date
    ├── NothingToRestore        17   the run has no whole commit
    ├── CorruptError             8   stored bytes or a manifest do not match their digest
    │   ├── MissingError             an object was deleted since it was listed
    │   └── UnreadableError          the store refuses one object, and returns others
    ├── Stopped                  9   a stop was requested during the operation
    └── Unready                 12   ``swansong doctor`` found a failure

The message of an error states the problem, ``hint`` the fix, ``command`` the shell command in the hint.

systemd gives the codes 3 to 7, 64 to 78, 200 to 244 and 255 names of its own, of the LSB and of BSD: it would
show 6 as NOTCONFIGURED.  Swansong uses only 75 of these, because its name TEMPFAIL fits.  The name of 2,
INVALIDARGUMENT, fits as well.
"""

from __future__ import annotations

EXIT_CODES = {
    0: "success, or the daemon was stopped",
    1: "a fault of swansong, with a trace in the log; please report it",
    2: "the configuration or the command line is not valid; each problem is printed",
    8: "stored bytes or a manifest do not match their digest, or an object has an unknown key",
    9: "the command was stopped before it finished, or the notice was withdrawn",
    10: "notify --wait, drill --wait, run: PARTIAL, at most an older commit exists",
    11: "notify --wait, drill --wait, run: LOST, the run has no commit",
    12: "doctor found a failure",
    13: "the daemon does not answer on its socket",
    14: "a newer generation owns the run: another VM has taken it over",
    15: "staging, the target of a restore, or the output cannot be used",
    16: "the store refused a request or failed",
    17: "nothing to restore: the run has no whole commit, or the store has no such run",
    18: "finished: the run has not ended",
    19: "notify --wait, drill --wait, run: NO_TRAINING, no training was seen on this VM",
    75: "run: a checkpoint is saved, and the same command line resumes the run, here or elsewhere",
}
DAEMON_EXIT_CODES = (0, 1, 2, 14, 15, 16)


class SwansongError(Exception):
    """Base of all errors; ``str()`` is one line for a person, ``hint`` the fix.

    ``command`` is right whenever this error occurs, so doctor offers it as the fix.  A command for one case
    only is words of the hint.
    """

    exit_code = 1
    kind = "fault"
    """Kind of the error in metrics and in the log: the same text for equal causes."""

    def __init__(self, message: str, *, hint: str = "", command: str = "") -> None:
        super().__init__(message)
        self.advise(hint, command)

    def advise(self, hint: str, command: str = "") -> None:
        """Set the fix: words, and a command that follows them."""
        self.hint = f"{hint}: `{command}`" if command else hint
        self.command = command

    def line(self) -> str:
        """The message and the fix, in one line."""
        return f"{str(self).removesuffix('.')}. {self.hint}" if self.hint else str(self)


class ConfigError(SwansongError):
    """The configuration is unusable.  ``problems`` has one line for each problem."""

    exit_code = 2

    def __init__(self, problems: list[str], *, hint: str = "") -> None:
        super().__init__("; ".join(problems), hint=hint)
        self.problems = problems


class Unreachable(SwansongError):
    exit_code = 13


class FencedError(SwansongError):
    """Generation ``own`` may not commit any more: generation ``newer`` has taken the run over.

    The numbers are equal when the claim of this VM was deleted, and another VM has claimed its number.
    """

    exit_code = 14
    kind = "fenced"

    def __init__(self, own: int, newer: int) -> None:
        super().__init__(
            f"generation {newer} has taken the run over from generation {own}"
            if newer != own
            else f"another VM has claimed generation {own}, after the claim of this VM was deleted",
            hint="This VM must not write any more; the run continues on another VM",
        )
        self.own = own
        self.newer = newer


class StagingError(SwansongError):
    exit_code = 15
    kind = "staging"


class StoreError(SwansongError):
    exit_code = 16
    kind = "refused"


class Transient(StoreError):
    """``retry_after_s`` is the pause that the store requested, if any."""

    kind = "transient"

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Permanent(StoreError):
    pass


class Forbidden(Permanent):
    """The credentials lack a right."""


class NotFound(Permanent):
    kind = "not_found"


class TooLarge(Permanent):
    kind = "too_large"


class Exists(Permanent):
    kind = "exists"


class Changed(Permanent):
    kind = "changed"


class Locked(Permanent):
    """``until_unix_s``: end of the retention by the store's clock; None if the store does not return it."""

    kind = "locked"

    def __init__(self, message: str, *, hint: str = "", until_unix_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.until_unix_s = until_unix_s


class NothingToRestore(SwansongError):
    """``is_fresh``: the run has no complete commit, so a start from scratch loses nothing.

    ``is_damaged``: a commit of the selection is damaged.
    """

    exit_code = 17

    def __init__(
        self, message: str, *, hint: str = "", is_fresh: bool = False, is_damaged: bool = False
    ) -> None:
        super().__init__(message, hint=hint)
        self.is_fresh = is_fresh
        self.is_damaged = is_damaged


class CorruptError(SwansongError):
    exit_code = 8
    kind = "corrupt"


class MissingError(CorruptError):
    pass


class UnreadableError(CorruptError):
    """Readers skip the commit of such an object, but must not conclude that the run has no commit."""


class Stopped(SwansongError):
    exit_code = 9


class Unready(SwansongError):
    exit_code = 12
