# SPDX-License-Identifier: Apache-2.0
"""Compares the steps that a resume repeats with the same steps of the interrupted start.

A VM trains on after its last checkpoint, and the next VM repeats these steps.  So each rank digests the 1st,
2nd, 4th, 8th ... step after each checkpoint.  The daemon keeps the newest digests, and its farewell contains
them.  After a restore, a rank asks for the digests of the start that it continues, digests the same steps,
and says whether they were repeated to the bit, and otherwise what differed first.

The comparison needs no knowledge of the script: whatever a resume does not restore changes a batch, a
generator, a learning rate, the loss or the weights.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile
from typing import Any

from swansong import bounds
from swansong._log import log
from swansong.protocol import Compared, Digested, Message, Redone, RedoneQuery
from swansong.rank_files import Snapshots, pack, take_generators

Part = str | Callable[[], str | None] | None
"""A part of a digest, or the function that computes it in another thread; None: it is unknown."""

CAUSES = ("batch", "rates", "random", "loss", "weights")
"""Kinds of parts in the order of causes: another batch changes the loss, and a loss changes no batch."""
CLOSE = 1e-3
"""Largest relative difference of a loss that kernels without a fixed order of additions explain."""
BUDGET = 0.01
"""Share of the training time that digests of the weights may take."""
PAGE = "docs/trainers/checks.md#redone-steps"


def digest(*contents: bytes) -> str:
    """Return a digest of 8 bytes: it detects errors, and no attack."""
    hashed = hashlib.blake2b(digest_size=8)
    for each in contents:
        hashed.update(len(each).to_bytes(8, "big") + each)
    return hashed.hexdigest()


def digests_of_generators() -> dict[str, Part]:
    """Return the digests of the global generators."""
    states = pack(take_generators())
    return {f"random.{name}": digest(repr(state).encode()) for name, state in states.items()}


# ---------------------------------------------------------------- comparison


Digests = Mapping[int, Mapping[str, str]]
"""Parts by step."""


def parsed(text: str) -> tuple[int, dict[str, str]]:
    """Return step and parts of the digest of a step."""
    step, *parts = text.split(" ")
    return int(step), dict(each.split("=", 1) for each in parts)


def compare(before: Digests, again: Digests, rank: int | None = None) -> Compared | None:
    """Compare the digests of an interrupted start and of the start that repeats its steps.

    Steps whose losses are close count as equal, until a loss or a step was equal to the bit: after that, the
    order of additions in the kernels is known to be fixed.

    Args:
        before: of the interrupted start.
        again: of the start that repeats its steps.
        rank: for the text, in a job of several ranks.

    Returns:
        The result for the common steps up to the first one that differs; None without a common step.
    """
    steps = sorted(before.keys() & again.keys())
    is_exact, is_close, furthest, harmless = False, False, 0.0, ""
    for step in steps:
        names = _differing(before[step], again[step])
        kinds = {_kind(name) for name in names}
        has_weights = any(_kind(name) == "weights" for name in before[step].keys() & again[step])
        if not kinds & ({"batch", "rates", "weights"} | (set() if has_weights else {"loss"})):
            # A thread may draw the numbers, and the loss may be an average that the script reports.
            harmless = harmless or next(iter(names), "")
            is_exact |= has_weights
            continue
        gap = _gap(before[step], again[step])
        # An equal loss with other weights is no rounding: it shows an optimizer outside of the state.
        if kinds <= {"loss", "weights"} and not is_exact and gap is not None and 0 < gap <= CLOSE:
            is_close, furthest = True, max(furthest, gap)
            continue
        where = "" if rank is None else f" on rank {rank}"
        cause = _cause(names[0], is_exact)
        text = f"step {step} differs{where} from the interrupted run: {cause}; see {PAGE}"
        return Compared(steps[0], step, True, text)
    if not steps:
        return None
    text = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    text += " as before"
    if is_close:
        text += f" within {furthest:.1g} of the loss, and not to the bit"
    elif harmless:
        text += f", except for {harmless}, which has changed neither batches nor weights"
    return Compared(steps[0], steps[-1], False, text)


def _differing(before: Mapping[str, str], again: Mapping[str, str]) -> list[str]:
    """Names of the parts that differ, causes first."""
    found = [name for name in before if name in again and before[name] != again[name]]
    return sorted(found, key=lambda name: (CAUSES.index(_kind(name)), name))


def _gap(before: Mapping[str, str], again: Mapping[str, str]) -> float | None:
    """Relative difference of the losses; None if one is unknown."""
    try:
        one, other = float(before["loss"]), float(again["loss"])
    except (KeyError, ValueError):
        return None
    gap = 0.0 if one == other else abs(one - other) / max(abs(one), abs(other))
    return gap if math.isfinite(gap) else None


def _kind(name: str) -> str:
    kind = name.partition(".")[0]
    return kind if kind in CAUSES else CAUSES[-1]


def _cause(part: str, is_exact: bool) -> str:
    kind, _, name = part.partition(".")
    if kind == "batch":
        return f"the batch is another one (loader {name})"
    if kind == "rates":
        return f"a learning rate or another option is another one ({name})"
    if kind == "random":
        return f"the random numbers are other ones (generator {name})"
    what = f"{kind} of {name}" if name else kind
    if is_exact:
        return (
            f"the {what}, although the steps before it were equal to the bit: a state that is not saved,"
            " kernels without a fixed order of additions, or faulty memory"
        )
    return f"the {what}: a state that is not saved, or kernels without a fixed order of additions"


# ---------------------------------------------------------------- one rank


class RedoneSteps:
    """Digests steps of this rank, and compares them after a restore.

    The thread of the training loop takes what the next step changes, and the background thread does the rest.

    Args:
        send: sends a message to the daemon, without blocking.
        rank: of this process.
        world_size: number of ranks of the job.
    """

    def __init__(self, send: Callable[[Message], bool], rank: int, world_size: int) -> None:
        self.next_step = bounds.NEVER
        """The next step to digest."""
        self.is_wanted = False
        """Whether the daemon takes digests."""
        self.comparison: Compared | None = None
        """The result; None before it is known."""
        self._send = send
        self._rank, self._world_size = rank, world_size
        self._base = 0
        """Step of the newest checkpoint."""
        self._lock = threading.Lock()
        self._ticking = threading.Lock()
        self._taken: list[tuple[int, dict[str, Part], Callable[[], bool]]] = []
        """Steps whose parts are not computed yet, and whether the GPUs have completed them."""
        self._unsent: list[str] = []
        self._unreported: Compared | None = None
        self._query: RedoneQuery | None = None
        """The query without an answer."""
        self._before: dict[int, dict[str, str]] = {}
        self._again: dict[int, dict[str, str]] = {}
        self._weights_s = 0.0
        """Time that the last digest of the weights took."""
        self._weighed_mono_s = -math.inf

    @property
    def facts(self) -> dict[str, float]:
        """The result as numbers, for the manifests of later checkpoints; empty before it is known."""
        found = self.comparison
        return {} if found is None else {"redone_to": found.last, "redone_differs": found.differs}

    # ------------------------------------------------------------ the training loop

    def begin(self, step: int) -> None:
        """Train from ``step``; nothing is compared until :meth:`ask`."""
        with self._lock:
            self._query = self.comparison = self._unreported = None
            self._before, self._again, self._taken, self._unsent = {}, {}, [], []
        self.saved(step)

    def saved(self, step: int) -> None:
        """A checkpoint of ``step`` was taken: digest the steps after it."""
        self._base = step
        self._plan(step)

    def ask(self, parent: str, generation: int) -> None:
        """Ask the daemon for the digests of the start whose checkpoint was loaded."""
        with self._lock:
            self._query = RedoneQuery(self._rank, parent, generation)
        self.resend()

    def note(self, step: int, loss: Any, state: Snapshots) -> None:
        """Take the parts of this step's digest, between two steps."""
        self._plan(step)
        if not self.is_wanted or step > bounds.STEP_MAX:
            return
        try:
            begun_mono_s = time.monotonic()
            with_weights = step in self._before or self._is_cheap()
            parts = {**digests_of_generators(), **state.digests(with_weights=with_weights)}
            if with_weights:
                self._weighed_mono_s = time.monotonic()
                self._weights_s = self._weighed_mono_s - begun_mono_s
            gpus = state.gpus()
            if getattr(loss, "is_cuda", False):
                gpus = gpus | {loss.device}
            if _is_readable(loss):
                held = loss.detach() if hasattr(loss, "detach") else loss
                parts["loss"] = lambda: _number(held)
            is_ready = _completion(gpus)
        except Exception as error:  # a digest must not cost training a step
            self.stop()
            log.warning("steps are not digested any more: %r", error)
            return
        with self._lock:
            self._taken = [*self._taken, (step, parts, is_ready)][-bounds.DIGESTS_MAX :]

    def _plan(self, step: int) -> None:
        since = max(0, step - self._base)
        following = [self._base + (1 << since.bit_length()) if since else self._base + 1]
        following += [each for each in self._before if each > step]
        self.next_step = min(following)

    def stop(self) -> None:
        """Digest no further step."""
        self.next_step = bounds.NEVER

    def _is_cheap(self) -> bool:
        return self._weights_s <= BUDGET * (time.monotonic() - self._weighed_mono_s)

    # ------------------------------------------------------------ background thread

    def resend(self) -> None:
        """Send the query that has no answer yet, also after a reconnect."""
        query = self._query
        if query is not None and self.is_wanted:
            self._send(query)

    def expect(self, answer: Redone) -> None:
        """Take the daemon's answer."""
        found = dict(map(parsed, answer.digests))
        with self._lock:
            if self._query is None or answer.parent != self._query.parent:
                return
            self._query = None
            self._before = found
            if found:  # the loop may be at any step: it looks at its next one, and plans the others
                self.next_step = 0

    def tick(self) -> None:
        """Complete the digests so far, send them, and compare."""
        self._advance(is_over=False)

    def end(self) -> None:
        """Report what could be compared: no further step follows."""
        self.stop()
        self._advance(is_over=True)

    def _advance(self, *, is_over: bool) -> None:
        with self._ticking:
            with self._lock:
                # This thread also answers the daemon, so it never waits for a GPU.
                taken = list(takewhile(lambda each: each[2](), self._taken))
                self._taken = self._taken[len(taken) :]
                again, before, unsent = self._again, self._before, self._unsent
            for step, parts, _ in taken:
                again[step] = {
                    name: value for name, part in parts.items() if (value := _value(part))
                }
                facts = (f"{name}={value}" for name, value in again[step].items())
                unsent.append(" ".join([str(step), *facts]))
            for step in sorted(again.keys() - before.keys())[: -bounds.DIGESTS_MAX]:
                del again[step]
            del unsent[: -bounds.DIGESTS_MAX]
            if unsent and self._send(Digested(list(unsent))):
                unsent.clear()
            self._compare(before, again, is_over=is_over)

    def _compare(
        self, before: dict[int, dict[str, str]], again: dict[int, dict[str, str]], *, is_over: bool
    ) -> None:
        if before and again and self.comparison is None:
            found = compare(before, again, self._rank if self._world_size > 1 else None)
            is_complete = max(again) >= max(before)
            if found is not None and (found.differs or is_complete or is_over):
                log.log(logging.WARNING if found.differs else logging.INFO, "%s", found.text)
                self.comparison = self._unreported = found
        report = self._unreported
        if report is not None and self._send(report):
            self._unreported = None


def _is_readable(loss: Any) -> bool:
    """Whether a read blocks on no device, once the GPUs are complete; as it may with an array of JAX."""
    kind = getattr(getattr(loss, "device", None), "type", "")
    is_plain = isinstance(loss, int | float) or type(loss).__module__ == "numpy"
    return is_plain or kind in ("cpu", "cuda")


def _completion(gpus: Collection[Any]) -> Callable[[], bool]:
    """Return a function that says, without blocking, whether these GPUs have completed their work so far."""
    if not gpus:
        return lambda: True
    cuda = sys.modules["torch"].cuda
    events = []
    for gpu in gpus:
        event = cuda.Event()
        event.record(cuda.current_stream(gpu))
        events.append(event)

    def is_complete() -> bool:
        try:
            return all(event.query() for event in events)
        except RuntimeError:  # a GPU has failed
            return False

    return is_complete


def _value(part: Part) -> str | None:
    if not callable(part):
        return part
    try:
        return part()
    except Exception as error:  # such as a device that has failed
        log.debug("a part of a step's digest is unknown: %r", error)
        return None


def _number(loss: Any) -> str | None:
    try:
        return f"{float(loss):.9g}"
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
