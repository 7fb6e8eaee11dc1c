# SPDX-License-Identifier: Apache-2.0
"""A ``DataLoader`` that resumes in the middle of an epoch."""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from swansong._log import log
from swansong._torch.change_counts import version
from swansong._torch.generators import find_generators
from swansong._torch.loop_names import names_of_loop
from swansong.rank_files import pack, set_generators, take_generators, unpack

_WRAPPED = ("base_dataloader", "_dataloader", "dataloader", "loader")
"""Attributes with the wrapped ``DataLoader``, in accelerate, Fabric and timm."""
_END = object()


class ResumableLoader:
    """Yields the batches of ``loader``, and saves the position in the epoch.

    After a restore, the first epoch begins with the generator states that it had before.  Batches that were
    already yielded are loaded again and dropped.  Samplers and workers then have the same state, bit by bit.
    With ``fixed_samples=True``, and without workers, only their indices are drawn.

    Each loop is one epoch.  The epoch ends at the next ``iter()``, or at :meth:`end_epoch`.  A checkpoint
    from between the last batch and the end of the epoch resumes there: the next ``iter()`` yields no batch,
    so the script repeats its work at the end of the epoch, such as validation.  A script that reports a step
    only after the loop ends the epoch with that step.

    A loop in which no step is reported, such as an evaluation or a look at the data, is no epoch: the next
    ``iter()`` returns to the position before it.

    All other attributes, such as ``dataset`` and ``batch_size``, are those of ``loader``.

    Args:
        loader: a ``torch.utils.data.DataLoader``, or a wrapper of one.  ``set_epoch`` of the loader and of
            its samplers is called if it exists.  Persistent workers are started again in each epoch.
        fixed_samples: whether the same index always gives the same sample.  If so, a resume does not load
            the earlier samples again.  By default it loads them if the loader has workers.
        batches_per_epoch: end each epoch after this number of batches.

    Raises:
        ValueError: no resume could repeat the order of the batches.
    """

    _resumed_loops = 0
    """Number of loops that began with a restored state, of all loaders."""
    saved: ClassVar[weakref.WeakSet[ResumableLoader]] = weakref.WeakSet()
    """The loaders of this process whose positions are saved."""
    _warned_of_foreign = False
    _warned_of_names = False

    def __init__(
        self,
        loader: Any,
        *,
        fixed_samples: bool | None = None,
        batches_per_epoch: int | None = None,
    ) -> None:
        self.loader = loader
        self.completed_steps: Callable[[], int] | None = None
        """Returns the number of reports of a step in this process; None without a guard."""
        self.copy_states: Callable[[], Any] = lambda: None
        """Copies other states after the last batch of each epoch."""
        self.copied_at_end: Any = None
        """The copy of the last loop."""
        self._inner = find_data_loader(loader)
        if self._inner is not None:
            _make_repeatable(self._inner)
        self._fixed_samples = fixed_samples
        self._limit = batches_per_epoch
        self._epoch = 0
        self._batches = 0
        self._begun_with: dict[str, Any] | None = None
        self._ended_with: dict[str, Any] | None = None
        self._is_ended = self._was_left = False
        self._opened_at: int | None = None
        self._drawn_with: deque[dict[str, Any]] = deque(maxlen=2)
        """Generator states before the last two batches; a wrapper may load one batch ahead."""
        self._has_steps = False
        self._steps_at_begin = self._steps_at_end = 0
        self._before: dict[str, Any] = {}
        """The position before the last loop."""
        self._yielded = 0
        """Number of batches of the last loop in this process."""
        self._stride = 1
        """Most batches that one step has taken."""
        self._steps_seen = self._since_step = 0
        self._has_warned = self._has_warned_of_steps = False
        self._restored: dict[str, Any] | None = None
        self._index_is_known = False
        self._last: tuple[list[torch.Tensor], list[int]] | None = None
        self._restored_checksum: int | None = None
        """The last batch's checksum, after a resume that has loaded no batch."""
        self._iteration: object = None
        self.drawn = 0
        """Number of batches that this process has yielded."""
        self._own = find_generators(loader)
        self._draws_here = self._inner is not loader or not self._inner.num_workers

    # ------------------------------------------------------------ the training loop

    @property
    def epoch(self) -> int:
        """Number of the current epoch or, after its loop, of the next one; counted from 0."""
        return self._epoch + (self._loop_is_over and not self._was_idle)

    @property
    def batches(self) -> int:
        """Number of batches of this epoch that were yielded; 0 after its loop."""
        self._index_is_known = True
        if self._loop_is_over:
            return self._before["_batches"] if self._was_idle else 0
        return self._batches

    @property
    def has_begun(self) -> bool:
        """Whether an epoch has begun, or has an iterator, in this process since the last restore."""
        return self._restored is None and (self._begun_with, self._iteration) != (None, None)

    @property
    def is_at_last_batch(self) -> bool:
        """Whether the loop has yielded the last batch of the epoch, and has not asked for another."""
        return self._restored is None and not self._loop_is_over and self._is_last(self._batches)

    @property
    def is_in_loop(self) -> bool:
        """Whether a loop over this loader has begun in this process and is not over."""
        return self._begun_with is not None and self._restored is None and not self._loop_is_over

    @property
    def _loop_is_over(self) -> bool:
        return self._restored is None and (self._is_ended or self._was_left)

    @property
    def repeats_end(self) -> bool:
        """Whether a checkpoint from now resumes at the end of the loop, before all that followed it."""
        is_ended = self._restored is None and self._is_ended
        return is_ended and self._steps == self._steps_at_end

    @property
    def _steps(self) -> int:
        return 0 if self.completed_steps is None else self.completed_steps()

    @property
    def _was_idle(self) -> bool:
        """Whether the last loop yielded batches for no step.

        The last batches of an epoch may be too few for a step that takes several, and ignite reports the
        step of the last batch after an evaluation.
        """
        if self.completed_steps is None or not self._yielded or self._steps > self._steps_at_begin:
            return False
        if self._is_ended:
            return self._yielded >= self._stride
        return self._was_left or not self._is_last(self._batches)

    def enumerate(self) -> Iterator[tuple[int, Any]]:
        """Return batches with their index in the epoch, which continues after a resume."""
        return enumerate(self, self.batches)

    def __len__(self) -> int:
        count = len(self.loader)
        return count if self._limit is None else min(count, self._limit)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the loader, such as ``dataset`` and ``batch_size``."""
        if name == "loader":  # not set yet, in copy or pickle
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._restored is None:
            self._finish_last_epoch()
        elif self._opened_at not in (None, ResumableLoader._resumed_loops):
            self.end_epoch()  # zip() ended with another loader, before it asked this one for a batch
        self._opened_at = ResumableLoader._resumed_loops
        self._iteration = iteration = object()
        return self._run(iteration)

    def end_epoch(self) -> None:
        """End the epoch now: a later checkpoint resumes at the start of the next epoch.

        Call it when the work at the end of the epoch is complete, if a resume must not repeat that work.
        """
        if self._begun_with is not None:
            self._epoch += 1
        self._batches = 0
        self._begun_with = self._ended_with = self._restored = self._last = self._iteration = None
        self._restored_checksum = None
        self._is_ended = self._was_left = self._has_steps = False
        self._opened_at = None
        self._drawn_with.clear()

    def drop_idle_loop(self) -> None:
        """Return to the position before the last loop if it is over and has reported no step."""
        if not (self._loop_is_over and self._was_idle):
            return
        self.return_to(self._before)
        self._iteration, self._yielded = None, 0
        if self._restored is not None:
            _pending.add(self)

    # ------------------------------------------------------------ the state

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the generator states that a resume needs."""
        if self._restored is not None:
            return self._restored
        self._note_step()
        steps = self._steps
        is_idle = self._loop_is_over and not any(each.is_in_loop for each in ResumableLoader.saved)
        if is_idle and steps > self._steps_at_end + 1 and not self._has_warned_of_steps:
            self._has_warned_of_steps = True
            log.warning(
                "%s steps were reported after the last loop over the loader, which a resume cannot repeat"
                " (itertools.cycle keeps the batches of its first pass); loop over the loader again:"
                " while True: for batch in loader",
                steps - self._steps_at_end,
            )
        is_over = self._loop_is_over and not self._has_steps and steps > self._steps_at_end
        if self._begun_with is None or is_over:
            # The work between two epochs may not be complete, so the next one does not set all generators.
            generators = {"all": {}, "own": self._take()["own"]}
            return {"epoch": self._epoch + is_over, "batches": 0, "resume_with": pack(generators)}
        return {
            "epoch": self._epoch,
            "batches": self._batches,
            "is_ended": self._is_ended,
            "was_left": self._was_left,
            "has_steps": self._has_steps or steps > self._steps_at_begin,
            "stride": self._stride,
            "begun_with": pack(self._begun_with),
            "drawn_with": pack(list(self._drawn_with)),
            "resume_with": pack(self._ended_with if self.repeats_end else self._take()),
            "checksum": self._restored_checksum if self._last is None else _checksum(*self._last),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this state at the next ``iter()``.

        Only ``epoch`` is required.  In an epoch that has begun, the first batch is drawn after the generators
        of the process are set to ``resume_with``, whatever was drawn since the restore.
        """
        self.end_epoch()
        self._restored = {"resume_with": None, "checksum": None, "was_left": False, **state}
        self._epoch = state["epoch"]
        self._batches = state.get("batches", 0)
        self._begun_with = unpack(state.get("begun_with"))
        self._is_ended = state.get("is_ended", False)
        self._drawn_with.extend(unpack(state.get("drawn_with", [])))
        self._has_steps = state.get("has_steps", False)
        self._stride = state.get("stride", 1)
        self._index_is_known = False
        _pending.add(self)

    def digest(self) -> str | Callable[[], str | None] | None:
        """Return a digest of the last batch, or the function that computes it from the batch's device.

        None without a batch, and for a batch that was changed in place.
        """
        if self._last is None:
            return None
        last = self._last

        def compute() -> str | None:
            checksum = _checksum(*last)
            return None if checksum is None else f"{checksum:08x}"

        return compute if any(tensor.is_cuda for tensor in last[0]) else compute()

    def place(self) -> dict[str, Any]:
        """Return the position without generators, for :meth:`return_to`; takes less than 2 us."""
        return {name: getattr(self, name) for name in _PLACE} | {"drawn": tuple(self._drawn_with)}

    def return_to(self, place: dict[str, Any]) -> None:
        """Return to a position for a last ``state_dict()``; the loop over the loader must not continue."""
        for name in _PLACE:
            setattr(self, name, place[name])
        self._drawn_with.clear()
        self._drawn_with.extend(place["drawn"])

    def set_generators(self) -> None:
        """Set the generators of a restored state now, for a framework that works before the next batch.

        The framework counts the batches itself.
        """
        self._index_is_known = True
        if self._restored is not None and self in _pending:
            self._resume_with(unpack(self._restored["resume_with"]))
            _pending.discard(self)

    # ------------------------------------------------------------ one epoch

    def _run(self, iteration: object) -> Iterator[Any]:
        # A framework may call iter() twice, so nothing is done before the first batch is asked for.
        self._check(iteration)
        self._before, self._yielded = self.place(), 0
        batches = self._begin()
        try:
            while self._limit is None or self._batches < self._limit:
                drawn_with = self._take() if self._draws_here else None
                batch = next(batches, _END)
                self._check(iteration)
                if batch is _END:
                    break
                if drawn_with is not None:
                    self._drawn_with.append(drawn_with)
                self.drawn += 1
                self._batches += 1
                self._yielded += 1
                self._since_step += 1
                self._last = _versions(batch)
                batches_yielded = self._batches
                steps_before = _steps_of_process() if self.completed_steps is None else 0
                yield batch
                self._note_step()
                if self.completed_steps is None and _steps_of_process() > steps_before:
                    self._warn_of_foreign_step()
                if self._iteration is None:  # end_epoch() was called
                    return
                if self._iteration is not iteration and self._is_last(batches_yielded):
                    return  # another loop has begun after the last batch of this one
                self._check(iteration)
        except GeneratorExit:
            if self._iteration is iteration:
                self._was_left = True
                self._end_loop()
            raise
        self._is_ended = True
        self._end_loop()
        self._warn_of_names(sys._getframe(1))  # noqa: SLF001 - as inspect does

    def _begin(self) -> Iterator[Any]:
        """Return the batches of the epoch that are not yielded yet."""
        restored, self._restored = self._restored, None
        self._own = find_generators(self.loader)
        self._steps_at_begin = self._steps_seen = self._steps
        self._since_step = 0
        ResumableLoader._resumed_loops += restored is not None
        if restored is not None and self._is_ended:
            self._restored_checksum = restored["checksum"]
            log.warning(
                "resumed after the last batch of epoch %s: the loop yields no batch, and the end of the"
                " epoch is repeated; an average of the epoch needs its sum and count in state.values",
                self._epoch,
            )
            self._resume_with(unpack(restored["resume_with"]))
            return iter(())
        for part in _samplers(self.loader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        if hasattr(self.loader, "_num_iter_calls"):  # Fabric gives this number to the sampler
            self.loader._num_iter_calls = self._epoch  # noqa: SLF001
        resume_with = None
        if restored is not None:
            resume_with = unpack(restored["resume_with"]) or self._take()
            if self not in _pending:
                resume_with["all"] = take_generators()
            _pending.clear()
        if restored is not None and self._begun_with is not None:
            self._report(restored)
            batches = self._replay(restored["checksum"])
            self._resume_with(resume_with)
        else:
            self._resume_with(resume_with)
            self._begun_with = self._take()
            batches = iter(self.loader)
        self._was_left = False
        return batches

    def _note_step(self) -> None:
        steps = self._steps
        if steps > self._steps_seen:
            self._stride = max(self._stride, self._since_step)
            self._steps_seen, self._since_step = steps, 0

    def _warn_of_foreign_step(self) -> None:
        if not ResumableLoader._warned_of_foreign:
            ResumableLoader._warned_of_foreign = True
            log.warning(
                "a step was reported in a loop over a ResumableLoader that no TrainingState contains, so its"
                " position is not saved; create one loader for all epochs, and pass it"
            )

    def _warn_of_names(self, frame: FrameType | None) -> None:
        if not self._has_steps or self.completed_steps is None or ResumableLoader._warned_of_names:
            return
        ResumableLoader._warned_of_names = True
        if names := names_of_loop(frame):
            log.warning(
                "the script reads %s after the loop over the loader, and assigns it only in the loop: a run"
                " that resumes after the last batch of an epoch gets no batch there, and would end with a"
                " NameError; assign it before the loop, too",
                " and ".join(names[:5]),
            )

    def _end_loop(self) -> None:
        self._steps_at_end = self._steps
        self._has_steps |= self._steps_at_end > self._steps_at_begin
        if self._is_ended:
            self._ended_with = self._take()
            self.copied_at_end = self.copy_states()

    def _is_last(self, batches: int) -> bool:
        try:
            return batches > 0 and batches == len(self)
        except TypeError:  # the loader has no length
            return False

    def _check(self, iteration: object) -> None:
        if self._iteration is None and self._restored is not None:
            raise RuntimeError(
                "this iterator of the loader was created before guard.restore(), perhaps by a constructor;"
                " call iter(loader) after it"
            )
        if self._iteration is not iteration:
            raise RuntimeError(
                "two loops use one ResumableLoader at the same time; evaluate over loader.loader, or wrap"
                " each loop's data in its own ResumableLoader"
            )

    def _finish_last_epoch(self) -> None:
        if not (self._is_ended or self._batches):
            return
        if not self._was_idle:
            self.end_epoch()
            return
        if not self._has_warned:
            log.warning(
                "a loop over the loader reported no step, so it counts as no epoch (epoch %s, batches: %s);"
                " call loader.end_epoch() after it if it is one",
                self._epoch,
                self._yielded,
            )
            self._has_warned = True
        self.drop_idle_loop()

    # ------------------------------------------------------------ after a restore

    def _replay(self, checksum: int | None) -> Iterator[Any]:
        """Return an iterator whose next batch is the one after the checkpoint's."""
        batches, batch = self._advance(self._may_skip())
        self._last = _versions(batch)
        if checksum not in (None, _checksum(*self._last)):
            log.warning(
                "batch %s of epoch %s has other contents than before the checkpoint, so this run does not"
                " continue to the bit: the data, their order, the number of workers or an unsaved generator"
                " differs, a sampler uses values that training or an earlier epoch has changed, or"
                " fixed_samples=False is needed",
                self._batches,
                self._epoch,
            )
        return batches

    def _may_skip(self) -> bool:
        """Whether a resume may draw indices without loading their samples."""
        loader = self._inner
        # The data set of an IterableDataset chooses the samples, and torchdata counts those it has loaded.
        if (
            loader is None
            or isinstance(loader.dataset, IterableDataset)
            or hasattr(loader, "state_dict")
        ):
            return False
        # Without workers, samples draw from generators that are set after the resume anyway.
        return not loader.num_workers if self._fixed_samples is None else self._fixed_samples

    def _advance(self, by_index: bool) -> tuple[Iterator[Any], Any]:
        """Drop the batches that were yielded; return the iterator and the last one of them."""
        assert self._begun_with is not None
        self._set(self._begun_with)
        drawn_with: list[dict[str, Any] | None] = list(self._drawn_with)
        drawn_with = drawn_with or [None] * min(1, self._batches)
        dropped = self._batches - len(drawn_with)
        # One more is loaded, because a wrapper loads two batches for the first one.
        skipped = max(0, dropped - 1) if by_index else 0
        batch: Any = None
        with _without_first(self._inner, skipped) if skipped else contextlib.nullcontext():
            batches = iter(self.loader)
            for _ in range(dropped - skipped):
                next(batches, None)
            for generators in drawn_with:
                if generators is not None:
                    self._set(generators)
                batch = next(batches, None)
        return batches, batch

    def _report(self, restored: dict[str, Any]) -> None:
        if restored["was_left"]:
            log.warning(
                "the loop over epoch %s was left after batch %s, before the checkpoint: it continues with"
                " the next batch; for shorter epochs, use batches_per_epoch=",
                self._epoch,
                self._batches,
            )
        elif self._batches and not self._index_is_known and _may_enumerate():
            log.warning(
                "resumed after batch %s of epoch %s: enumerate(loader) counts from 0 again, and"
                " loader.enumerate() continues",
                self._batches,
                self._epoch,
            )

    # ------------------------------------------------------------ generators

    def _take(self) -> dict[str, Any]:
        own = {path: item.state_dict() for path, item in self._own.items()}
        return {"all": take_generators(), "own": own}

    def _set(self, generators: dict[str, Any] | None) -> None:
        if generators is None:
            return
        if generators["own"].keys() - self._own.keys():
            self._own = find_generators(self.loader)  # some are created with the first sample
        for path in generators["own"].keys() & self._own.keys():
            self._own[path].load_state_dict(generators["own"][path])
        if generators["all"]:
            set_generators(generators["all"])

    def _resume_with(self, generators: dict[str, Any] | None) -> None:
        self._set(generators)
        missing = generators["own"].keys() - self._own.keys() if generators is not None else ()
        for path in sorted(missing):
            log.warning(
                "the loader has no generator %s yet, so its saved state is not restored; create it in the"
                " constructor of its object, or seed it in each epoch",
                path,
            )


_PLACE = (
    "_epoch", "_batches", "_begun_with", "_ended_with", "_is_ended", "_was_left", "_has_steps", "_last",
    "_steps_at_begin", "_steps_at_end", "_restored", "_restored_checksum", "copied_at_end",
)  # fmt: skip
"""Attributes of a loader that determine its position."""
_pending: weakref.WeakSet[ResumableLoader] = weakref.WeakSet()
"""Restored loaders.  Their generators are those of one checkpoint, so only the first loop sets them."""


# ---------------------------------------------------------------- the wrapped loader


def _steps_of_process() -> int:
    """Return the number of steps that were reported to all guards."""
    counters = {loader.completed_steps for loader in ResumableLoader.saved}
    return sum(count() for count in counters if count is not None)


def find_data_loader(loader: Any) -> Any:
    """Return the ``DataLoader`` in a wrapper, or None."""
    for _ in range(8):
        # accelerate's wrapper sets __class__, so isinstance() would return True.
        if issubclass(type(loader), DataLoader):
            return loader
        attributes = getattr(loader, "__dict__", {})
        inside = [attributes[name] for name in _WRAPPED if name in attributes]
        if not inside:
            return None
        loader = inside[0]
    return None


def _make_repeatable(loader: Any) -> None:
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ValueError(
            "the loader has in_order=False, so no resume can repeat the order of its batches; use"
            " in_order=True"
        )
    kept = [name for name, item in vars(loader).items() if isinstance(item, _BaseDataLoaderIter)]
    if set(kept) - {"_iterator"}:
        raise ValueError(
            f"{type(loader).__name__} keeps one iterator for all epochs, whose workers no resume can"
            " repeat; use torch.utils.data.DataLoader"
        )
    if loader.persistent_workers:
        # The generators of persistent workers depend on all earlier epochs.
        log.info("the loader's workers are started again in each epoch, instead of persistent ones")
        vars(loader).update(persistent_workers=False, _iterator=None)


def _samplers(loader: Any) -> Iterator[Any]:
    yield loader
    yield getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    yield batch_sampler
    yield getattr(batch_sampler, "sampler", None)


class Rest:
    """A sampler without its first entries."""

    def __init__(self, whole: Any, count: int) -> None:
        self.whole, self._count = whole, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.whole), self._count, None)

    def __len__(self) -> int:
        return len(self.whole) - self._count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


def _may_enumerate() -> bool:
    """Whether a function of the script that is being called uses ``enumerate``."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if "enumerate" in frame.f_code.co_names:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def _without_first(loader: Any, count: int) -> Iterator[None]:
    """Let iterators that are created in this block begin after ``count`` batches."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    vars(loader)[name] = Rest(sampler, count)  # DataLoader's own __setattr__ refuses it
    try:
        yield
    finally:
        vars(loader)[name] = sampler


# ---------------------------------------------------------------- contents of a batch


def _versions(batch: Any) -> tuple[list[torch.Tensor], list[int]]:
    """Return some tensors of a batch, and numbers that show whether they were changed in place."""
    tensors = list(itertools.islice(_tensors(batch), 8))
    return tensors, [version(tensor) for tensor in tensors]


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        if item.layout is torch.strided and not item.is_quantized:
            yield item
    elif isinstance(item, list | tuple):
        for part in item[:8]:
            yield from _tensors(part)
    elif hasattr(item, "values") and hasattr(item, "keys"):
        for part in itertools.islice(item.values(), 8):
            yield from _tensors(part)


def _checksum(tensors: list[torch.Tensor], versions: list[int]) -> int | None:
    """Return a checksum of some values of the tensors; None if one was changed in place."""
    if [version(tensor) for tensor in tensors] != versions or not tensors:
        return None
    checksum = 0
    for tensor in tensors:
        flat = tensor.detach().as_subclass(torch.Tensor).reshape(-1)
        some = flat[:: max(1, flat.numel() // 256)].cpu()
        checksum = zlib.crc32(repr((tensor.shape, some.tolist())).encode(), checksum)
    return checksum
