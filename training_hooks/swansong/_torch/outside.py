# SPDX-License-Identifier: Apache-2.0
"""Finds objects that training uses and no checkpoint contains, whatever the script looks like."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from swansong._log import log
from swansong._torch.change_counts import count_of, stepped_optimizers, version
from swansong._torch.loader import Rest, ResumableLoader, find_data_loader
from swansong._torch.modules import unwrap
from swansong._torch.sharding import is_sharded

KINDS = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, DataLoader, _BaseDataLoaderIter)
_DEPTH = 5
"""Objects in objects of the state, such as the optimizer in a wrapper, count as saved to this depth."""
_CONTAINER_MAX, _PARTS_MAX = 1000, 20_000
_ELEMENTS = 8
_STATE_OF_OPTIMIZER = torch.optim.Optimizer.state_dict


def all_of_process() -> list[Any]:
    """Return all objects of the :data:`KINDS`; takes about 0.1 s for each million of objects."""
    found = _objects()
    if any(has_lasting_workers(each) for each in found):
        # Such a loader and its iterator refer to each other: it may be garbage that nothing uses any more.
        found.clear()
        gc.collect()
        found = _objects()
    return found


def _objects() -> list[Any]:
    # Some wrappers set __class__, so isinstance() would return True for them.
    return [each for each in gc.get_objects() if issubclass(type(each), KINDS)]


def has_lasting_workers(item: object) -> bool:
    """Whether this is a DataLoader with ``persistent_workers``."""
    # The script may not have initialised it yet.
    return issubclass(type(item), DataLoader) and bool(vars(item).get("persistent_workers"))


class OutsideWatch:
    """Compares, over the first steps, the objects of this process that the state does not contain.

    A batch that a loader yields, a tensor that changes in a module and a step of an optimizer belong to the
    training, wherever the script keeps the object.  An object that changes at some steps only, such as an
    average that is updated after an epoch, is not seen.  The steps of optimizers are compared at each save,
    too: some begin after some episodes, or replace another one.
    """

    def __init__(self) -> None:
        self._counts: list[tuple[weakref.ref[Any], Any]] = []
        self._tensors: list[tuple[weakref.ref[Any], str, int, Any]] = []
        self._schedulers: list[str] = []
        self._idle: list[tuple[weakref.ref[Any], Any]] = []
        """Objects that had not changed when :meth:`end` was called, or optimizers at the last save."""
        self._known: weakref.WeakSet[Any] | None = None
        """From the first step on, optimizers of the state, and those that a warning has named."""

    def begin(
        self, objects: Mapping[str, Any], found: Iterable[Any], copied: Collection[int]
    ) -> None:
        """Note the present counts.

        Args:
            objects: of the training state, by name.
            found: see :func:`all_of_process`.
            copied: addresses of the tensors that a save of this rank copies.
        """
        self._clear()
        with _harmless():
            self._begin(list(inside(objects.values())), found, copied)

    def end(self) -> None:
        """Warn about each kind of object that has changed since, with the fix."""
        with _harmless():
            for text in self._changes():
                log.warning("%s", text)
        self._idle = list(self._counts)
        self._clear()

    def saved(self) -> None:
        """Warn at a save, once, about optimizers that have stepped since they were noted.

        One that is created later must step on after a save, which the optimizer of an evaluation does not.
        """
        if self._known is not None:
            if text := self._unsaved_optimizers([*self._counts, *self._idle]):
                log.warning("%s", text)
            others = [each for each in stepped_optimizers() if each not in self._known]
            self._idle = [(weakref.ref(each), _count(each)) for each in others]

    def _clear(self) -> None:
        for noted in (self._counts, self._tensors, self._schedulers):
            noted.clear()

    def _begin(self, saved: list[Any], found: Iterable[Any], copied: Collection[int]) -> None:
        saved_ids = set(map(id, saved))
        of_state = [each for each in saved if isinstance(each, torch.optim.Optimizer)]
        self._known = weakref.WeakSet(of_state)
        optimizers = {id(each.state) for each in of_state}
        loaders = (each.loader if isinstance(each, ResumableLoader) else each for each in saved)
        samplers = {
            id(_sampler(each)) for each in map(find_data_loader, loaders) if each is not None
        }
        memory = {*copied, *(each.data_ptr() for item in saved for each in _saved_tensors(item))}
        for each in found:
            if isinstance(each, torch.nn.Module):
                self._note_tensors(each, memory)
            elif id(each) in saved_ids:
                continue
            elif isinstance(each, LRScheduler):
                if (
                    id(getattr(unwrap(getattr(each, "optimizer", None)), "state", None))
                    in optimizers
                ):
                    self._schedulers.append(_kind(each))
            elif isinstance(each, _BaseDataLoaderIter):
                if id(_sampler(each)) not in samplers:
                    self._counts.append((weakref.ref(each), _count(each)))
            elif isinstance(each, torch.optim.Optimizer):
                self._counts.append((weakref.ref(each), _count(each)))

    def _changes(self) -> Iterator[str]:
        if any(isinstance(each, _BaseDataLoaderIter) for each in _moved(self._counts)):
            yield (
                "a DataLoader without a position yields batches between the steps: a resumed run begins its"
                " epoch again; wrap it in a ResumableLoader, and pass that to TrainingState"
            )
        if text := self._unsaved_optimizers(self._counts):
            yield text
        if self._schedulers:
            yield (
                f"a scheduler of an optimizer of the state is not in the state ({self._schedulers[0]}): a"
                " resumed run begins its schedule again; pass it as scheduler="
            )
        if tensors := list(self._changed_tensors()):
            yield (
                f"{len(tensors)} tensors of modules change, and are not in the state, such as"
                f" {tensors[0]}: pass the module to TrainingState under a name, or make the buffer persistent"
            )

    def _unsaved_optimizers(self, noted: Iterable[tuple[weakref.ref[Any], Any]]) -> str:
        """Return a warning about the optimizers that have stepped, but once for each of them."""
        known = self._known or ()
        optimizers = [each for each in _moved(noted) if isinstance(each, torch.optim.Optimizer)]
        found = [each for each in optimizers if each not in known]
        if not found:
            return ""
        if self._known is not None:
            self._known.update(found)
        return (
            f"an optimizer outside of the state steps ({', '.join(sorted(set(map(_kind, found))))}): its"
            " memory of earlier steps is not saved; pass it to TrainingState under a name"
        )

    def _note_tensors(self, module: torch.nn.Module, memory: Collection[int]) -> None:
        ref = weakref.ref(module)
        for name, tensor in _tensors_of(module):
            if tensor.data_ptr() not in memory:
                self._tensors.append((ref, name, id(tensor), _content(tensor)))

    def _changed_tensors(self) -> Iterator[str]:
        for ref, name, identity, content in self._tensors:
            module = ref()
            if module is None or (tensor := dict(_tensors_of(module)).get(name)) is None:
                continue
            now = _content(tensor)
            if id(tensor) == identity:
                has_changed = now != content
            else:  # A buffer that is not persistent is often a cache, which is made again.
                has_changed = name in module.state_dict() and now[1] != content[1]
            if has_changed:
                yield f"{_kind(module)}.{name}"


def _moved(noted: Iterable[tuple[weakref.ref[Any], Any]]) -> list[Any]:
    """Return the objects whose counts have changed."""
    return [each for ref, count in noted if (each := ref()) is not None and _count(each) != count]


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """An object of the script may raise anything, and training must not suffer."""
    try:
        yield
    except Exception as error:
        log.info("objects outside of the state are not compared: %r", error)


def inside(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the objects, and those in their attributes, lists and dicts.

    Raises:
        ValueError: there are too many.
    """
    seen: set[int] = set()
    level = list(items)
    for _ in range(_DEPTH):
        new = [item for item in level if id(item) not in seen]
        yield from new
        seen.update(map(id, new))
        level = [inner for item in new for inner in _parts(item)]
        if len(level) > _PARTS_MAX:
            raise ValueError("the state has too many parts")


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, (list, tuple, dict)):
        # A long one contains data, such as a replay buffer.
        values = item.values() if isinstance(item, dict) else item
        return list(values) if len(values) < _CONTAINER_MAX else ()
    if isinstance(item, (torch.nn.Module, torch.Tensor, DataLoader, type, ModuleType)):
        return ()
    # An optimizer in another one is saved only if the other one's state contains it.
    if isinstance(item, torch.optim.Optimizer) and type(item).state_dict is _STATE_OF_OPTIMIZER:
        return ()
    own = dict(getattr(item, "__dict__", {}))
    if isinstance(item, LRScheduler):  # its optimizer is saved only if it is passed, too
        own.pop("optimizer", None)
    return own.values()


def _saved_tensors(item: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the state of a module, on whichever rank they are saved."""
    for each in item.state_dict().values() if isinstance(item, torch.nn.Module) else ():
        if isinstance(each, torch.Tensor) and not is_sharded(each):
            yield each


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of this module alone, by name."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
        with contextlib.suppress(Exception):  # a tensor without memory, as on the device meta
            if tensor is not None and not is_sharded(tensor) and tensor.data_ptr():
                yield name, tensor


def _count(item: Any) -> Any:
    return item._num_yielded if isinstance(item, _BaseDataLoaderIter) else count_of(item)  # noqa: SLF001


def _content(tensor: Any) -> tuple[int, Any]:
    """The number of changes and some elements: torch does not count changes through ``tensor.data``."""
    if not tensor.is_contiguous():
        return version(tensor), None
    flat = tensor.detach().view(-1)
    return version(tensor), flat[:: max(1, flat.numel() // _ELEMENTS)].tolist()


def _sampler(item: Any) -> Any:
    """The object with the position of a DataLoader, or of one of its iterators."""
    sampler = getattr(item, "_index_sampler", None)
    return sampler.whole if isinstance(sampler, Rest) else sampler


def _kind(item: Any) -> str:
    return type(item).__qualname__
