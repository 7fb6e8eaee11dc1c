# SPDX-License-Identifier: Apache-2.0
"""The training state of a PyTorch job: one process, DDP and FSDP2 alike.

::

    from swansong.torch import TrainingState

    state = TrainingState(model, optimizer, scheduler=scheduler, loader=loader)
    guard = swansong.attach(state)
    for step in range(guard.restore(), total_steps):
        loss = train_one_step()
        guard.step(step + 1, loss=loss)  # last in the loop body
    guard.finish()

A save blocks the training loop only while it copies the state to host memory.  A background thread writes the
files from there.  A save uses no collectives and gathers nothing, so no rank waits for another.  A checkpoint
consists of safetensors and JSON files with checksums: it cannot run code, and a flipped bit is detected.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swansong._checkpoint.survivor_checkpoint import Divisible
from swansong._log import log
from swansong._ranks.agreement import Ranks
from swansong._torch.arena import Arenas, TensorPiece, check_headers
from swansong._torch.arrivals import ArrivedTensors
from swansong._torch.boundary import StepBoundary
from swansong._torch.checkpoint_set import CheckpointSet
from swansong._torch.collector import Collector
from swansong._torch.compile_cache import ARCHIVE, CompileCache, requested_cache
from swansong._torch.digests import of_step, of_weights
from swansong._torch.end_of_loop import EndOfLoop
from swansong._torch.index import FORMAT, INDEX, encode_index
from swansong._torch.kinds import (
    Hooked,
    ddp_modules,
    gpus_of,
    modules_of,
    of_kind,
    optimizers_of,
)
from swansong._torch.last_boundary import LastBoundary
from swansong._torch.loader import ResumableLoader
from swansong._torch.modules import FSDP1, FSDP2, contains, load_module, state_of_module, unwrap
from swansong._torch.nonfinite import requested_search
from swansong._torch.objects import (
    OTHERS,
    SavedRank,
    Targets,
    getter,
    has_known_layout,
    is_node_of_optimizer,
    param_of,
    params_of,
    take_module,
    take_optimizer,
)
from swansong._torch.order import OrderWatch
from swansong._torch.outside import OutsideWatch, all_of_process
from swansong._torch.own_time import OwnTime
from swansong._torch.rehearsal import check_relations, warn_about_loaders
from swansong._torch.sharding import is_sharded, writers
from swansong._torch.structure import ScriptWatch
from swansong.fields import PREFIXES_MAX
from swansong.layout import rank_directory
from swansong.rank_files import (
    by_name,
    check_names,
    decode_tree,
    retyped,
    set_generators,
    take_generators,
    trying,
)

__all__ = ["ResumableLoader", "TrainingState", "load_weights", "seed_all", "shield_worker"]

REST_LIMIT_S = 2.0
"""Longest wait for the training loop to block, before a save without lost ranks."""
_GENERATORS, _VALUES = "generators", "values"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class TrainingState(Divisible):
    """One rank's state that determines the next optimizer step.

    A checkpoint contains the objects, :attr:`values`, and the generators of ``random``, numpy, torch and
    every CUDA device.

    Args:
        model: the model that is trained: plain, in ``DistributedDataParallel``, or after ``fully_shard``.
            Pass the wrapped model: the wrapper shows which tensors all ranks have in common.
        optimizer: of the model, created after wrapping.
        scheduler: of the learning rate.
        scaler: a ``torch.amp.GradScaler``.
        loader: an object with ``state_dict()``, such as :class:`ResumableLoader` or torchdata's
            ``StatefulDataLoader``.
        resize: called if another number of ranks saved the checkpoint, for each object that differs between
            ranks (``loader`` and ``others``).  It takes the object's name and its states by old rank, and
            returns the state for this rank.  Without ``resize`` such a checkpoint is refused.
        others: further objects: modules, optimizers, ``torch.Generator``, numpy ``Generator``, or objects
            with ``state_dict()`` and ``load_state_dict()``; and dicts, lists, arrays and tensors, which are
            restored in their places.

    Raises:
        TypeError: an object cannot be saved.
        ValueError: a name is reserved or has invalid characters.
    """

    in_background = True
    reads_whole_set = True

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        resize: Callable[[str, list[Any]], Any] | None = None,
        **others: Any,
    ) -> None:
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        objects = {**named, "loader": loader, **by_name(others)}
        self.values: dict[str, Any] = {}
        """Plain values to save and load, such as epoch or best metric; the same on all ranks."""
        self._objects = {
            name: unwrap(item) if isinstance(item, torch.optim.Optimizer) else item
            for name, item in objects.items()
            if item is not None
        }
        _check_names(self._objects)
        for name, item in self._objects.items():
            if isinstance(item, torch.nn.Module) and contains(item, FSDP1):
                raise TypeError(
                    f"{name} contains a FullyShardedDataParallel, whose state cannot be saved by rank;"
                    " shard the model with torch.distributed.fsdp.fully_shard"
                )
            if type(item).__name__ == "ZeroRedundancyOptimizer":
                raise TypeError(
                    f"{name} is a ZeroRedundancyOptimizer, whose state only all ranks together can save;"
                    " shard model and optimizer with torch.distributed.fsdp.fully_shard"
                )
            if any(kind.__module__.startswith("deepspeed.") for kind in type(item).__mro__):
                raise TypeError(
                    f"{name} is a {type(item).__qualname__} of DeepSpeed, whose state no rank can save alone;"
                    " use DistributedDataParallel or fully_shard"
                )
            if not hasattr(item, "load_state_dict"):
                raise TypeError(
                    f"{name} is a {type(item).__qualname__}, without state_dict() and load_state_dict():"
                    " wrap it in a class that has both, or use a list, dict or array"
                )
        self._resize = resize
        self._loaders = tuple(of_kind(self._objects, ResumableLoader).values())
        self.has_loaders = bool(self._loaders)
        self._end_of_loop = EndOfLoop({**self._objects, _VALUES: self.values})
        self._arenas = Arenas()
        self._watch: OrderWatch | None = None
        self._outside = OutsideWatch()
        self._script = ScriptWatch(self._objects)
        self._boundary = StepBoundary(self._objects)
        self._last_boundary: LastBoundary | None = None
        self._lost: frozenset[int] = frozenset()
        self._arrived: ArrivedTensors | None = None
        self._own_time = OwnTime({})
        self._with_hooks: list[Hooked] = []
        """The objects that have hooks in the modules and optimizers."""
        self._compile_cache: CompileCache | None = None

    def count_steps_with(self, completed_steps: Callable[[], int]) -> None:
        """Give the function that returns the number of reported steps to all that compare it."""
        self._boundary.completed_steps = completed_steps
        for loader in self._loaders:
            loader.completed_steps = completed_steps
            ResumableLoader.saved.add(loader)

    def has_continued(self) -> bool:
        """Whether a loop over a :class:`ResumableLoader` has begun since the last load."""
        return not self.owns_loop or any(loader.has_begun for loader in self._loaders)

    def before_end(self) -> None:
        """A last look at the training data is no epoch: a longer run would train it."""
        for loader in self._loaders:
            loader.drop_idle_loop()

    # ------------------------------------------------------------ before the first step

    def rehearse(self) -> None:
        """Try at attach() all of a save but the copy, and that each module accepts its own state.

        Raises:
            TypeError: an object cannot be saved or loaded; names it.
            ValueError: the objects do not belong together.
        """
        check_relations(self._objects)
        optimizers = optimizers_of(self._objects)
        self._rehearse(but=[name for name, each in optimizers.items() if _has_own_layout(each)])
        for name, module in modules_of(self._objects).items():
            with trying("load", name, unwrap(module)):
                load_module(module, state_of_module(module))  # copies nothing
        for each in self._with_hooks:  # of an earlier guard
            each.end()
        self._watch = OrderWatch(self._objects)
        several = self.ranks.world_size > 1
        self._own_time = OwnTime(self._objects if several else {})
        self._last_boundary = LastBoundary(self._objects, self.values) if several else None
        search = requested_search(self._objects, self.ranks.rank)
        made = (self._watch, self._own_time, self._last_boundary, search)
        self._with_hooks = [each for each in made if each is not None]
        self._compile_cache = requested_cache()

    def before_restore(self) -> None:
        """Note the structure that a checkpoint must have, and warn if training has begun since attach()."""
        if self.owns_loop:
            self._script.note_structure()
        if self._watch is not None and self._watch.has_begun:
            log.warning(
                "an optimizer stepped between attach() and restore(): a resume loses these steps; call"
                " restore() before the first step"
            )
        if any(loader.has_begun for loader in self._loaders):
            log.warning(
                "iter() was called on the loader before restore(): a resumed run cannot use that iterator;"
                " call restore() before the first iter()"
            )

    def arrivals(self) -> ArrivedTensors:
        """Begin a load that reads tensors as their files arrive, and ends with :meth:`load`."""
        ranks = self.ranks
        sources = self._sources(ranks.of_this_vm)
        is_all = len(sources) >= min(ranks.world_size, PREFIXES_MAX + 1)
        self._arrived = ArrivedTensors(
            self._objects,
            ranks,
            reads=self._sources([ranks.rank]),
            prefixes=() if is_all else [f"{rank_directory(each)}/" for each in sorted(sources)],
        )
        return self._arrived

    def _sources(self, ranks: Collection[int]) -> set[int]:
        """Return the ranks whose files these ranks read, if the same job saved the checkpoint; empty: all."""
        if self._common_memory():
            return set()
        layouts = {
            (tensor.device_mesh, tuple(tensor.placements))
            for module in modules_of(self._objects).values()
            for tensor in module.state_dict().values()
            if is_sharded(tensor)
        }
        return set(ranks).union(*(writers(*layout, ranks) for layout in layouts))

    def observe_step(self) -> bool:
        """Try a save with the state of the first step, and watch the order of calls in the first steps.

        Raises:
            TypeError: an object cannot be saved; names it.
        """
        if self._watch is None:
            return False
        if self._watch.is_new:
            pieces = self._rehearse()
            found = all_of_process()
            warn_about_loaders(self._objects, found)
            self._script.first_step()
            if self.owns_loop:
                copied = [piece.tensor.data_ptr() for piece in pieces]
                self._outside.begin(self._objects, found, copied)
        continues = self._watch.report()
        if not continues:
            self._outside.end()
        return continues

    def prepare_copy(self) -> None:
        """Prepare host memory for the first copy, in the background."""
        _, collectors = self._gather()
        self._arenas.prepare(_pieces(collectors), self.ranks.local_world_size)

    def note_boundary(self) -> None:
        """Remember the present state as that of the last ``guard.step()``."""
        self._boundary.note()
        self._own_time.note_boundary()
        if self._last_boundary is not None:
            self._last_boundary.note()

    def own_s(self) -> float | None:
        """Time that a step takes on this rank alone, in seconds; None if it is unknown."""
        return self._own_time.usual_s()

    def is_at_boundary(self) -> bool:
        """Whether the state is still that of the last ``guard.step()``, as far as it can be seen."""
        return not self.owns_loop or self._boundary.is_here()

    def digests(self, *, with_weights: bool) -> dict[str, Any]:
        """Digests of the last batches, of the optimizers' options and of the parameters of each module."""
        return of_step(self._objects) | (of_weights(self._objects) if with_weights else {})

    def gpus(self) -> set[torch.device]:
        """CUDA devices of the parameters."""
        return gpus_of(self._objects)

    def return_to_boundary(self) -> None:
        """Return to the state of the last ``guard.step()``, after a collective of the next step has failed.

        Raises:
            RuntimeError: that state does not exist any more; contains the cause.
        """
        assert self._last_boundary is not None  # as in every job of several ranks
        self._last_boundary.return_to()

    def snapshot_without(
        self, lost: Collection[int], ranks: Ranks
    ) -> tuple[Callable[[Path], object], list[str]]:
        """Return a function that writes this rank's part of a checkpoint without some ranks.

        Args:
            lost: ranks of the job that take no part.
            ranks: position of this process among the others.

        Returns:
            The function, and the names of the tensors that the others do not hold: with such a tensor the
            checkpoint is no state of the job.
        """
        missing, common = self._held_by_subgroups(), self._common_memory()
        self._lost, self.ranks = frozenset(lost), ranks
        assert self._last_boundary is not None
        with self._last_boundary.free_streams():
            index, collectors, held = self._gather_at_rest(common)
            missing += held + [name for each in collectors for name in each.missing]
            return self._copied(index, collectors), missing

    def _gather_at_rest(
        self, common: Collection[int]
    ) -> tuple[dict[str, Any], list[Collector], list[str]]:
        """Gather while the parameters of ``fully_shard`` are shards; also return the ones that are not.

        The training loop may gather them until it blocks, in a collective or before the next optimizer step.
        """
        modules = modules_of(self._objects).values()
        has_shards = any(contains(module, FSDP2) for module in modules)
        give_up_mono_s = time.monotonic() + REST_LIMIT_S
        while True:
            for module in modules:
                # fully_shard then holds shards again; its reshard() does nothing in a forward pass.
                module.state_dict()
            before = self._held_by_one_rank(common)
            gathered = self._gather()
            held = before or self._held_by_one_rank(common)
            if not held or not has_shards or time.monotonic() >= give_up_mono_s:
                return *gathered, held
            threading.Event().wait(0.01)

    def _held_by_one_rank(self, common: Collection[int]) -> list[str]:
        """Names of the parameters that are neither equal on all ranks, in common memory, nor sharded."""
        found: dict[str, torch.Tensor] = {}
        for name, item in self._objects.items():
            if isinstance(item, torch.nn.Module):
                found.update({f"{name}.{key}": each for key, each in item.named_parameters()})
            elif isinstance(item, torch.optim.Optimizer):
                found.update({f"{name}.{n}": each for n, each in enumerate(params_of(item))})
        return [
            name
            for name, each in found.items()
            if each.numel() and not is_sharded(each) and each.data_ptr() not in common
        ]

    def _held_by_subgroups(self) -> list[str]:
        """Names of the DDP modules on a part of the ranks: the lost ranks may have held others."""
        return [
            f"the counterpart of {name} on the ranks outside its process group"
            for name, module in ddp_modules(self._objects)
            if module.process_group.size() != self.ranks.world_size
        ]

    def _rehearse(self, but: Collection[str] = ()) -> list[TensorPiece]:
        index, collectors = self._gather(but)
        pieces = _pieces(collectors)
        check_headers(pieces)
        files = {each: dict.fromkeys(tensors, 0) for each, tensors in index["tensors"].items()}
        encode_index({**index, "files": files})
        return pieces

    # ------------------------------------------------------------ saving

    def snapshot(self) -> Callable[[Path], object]:
        """Copy the state to host memory, and return a function that writes the copy into a directory.

        The copy has its memory for itself as long as that function exists.

        Raises:
            TypeError: a value cannot be written; names it.
        """
        self._outside.saved()
        return self._copied(*self._gather())

    def _copied(
        self, index: dict[str, Any], collectors: list[Collector]
    ) -> Callable[[Path], object]:
        self._script.saved(index["objects"])
        pieces = _pieces(collectors)
        write_cache = None
        if self._compile_cache is not None and self._shares_cache and not self._lost:
            write_cache = self._compile_cache.snapshot()
        arena = self._arenas.take(pieces, may_wait=not self._lost)
        arena.fill(pieces)
        groups = dict(zip(arena.homes, (piece.group for piece in pieces), strict=True))

        def write(directory: Path) -> None:
            index["files"] = {
                name: {"group": groups[name], "checksums": checksums}
                for name, checksums in arena.write(directory).items()
            }
            (directory / INDEX).write_bytes(encode_index(index))
            if write_cache is not None:
                write_cache(directory)

        self._arenas.keep_while(write, arena)
        return write

    def _gather(self, but: Collection[str] = ()) -> tuple[dict[str, Any], list[Collector]]:
        """Return the index, without its files, and the collectors of the tensors to copy."""
        collecting = functools.partial(Collector, ranks=self.ranks, lost=self._lost)
        others = collecting(OTHERS)
        collectors = [others]
        objects: dict[str, Any] = {}
        common = self._common_memory()
        earlier = self._end_of_loop.states()
        for name, item in self._objects.items():
            if name in but:
                continue
            with trying("save", name, unwrap(item)):
                if isinstance(item, torch.nn.Module):
                    collector = collecting(
                        name, is_common=lambda _key, tensor: tensor.data_ptr() in common
                    )
                    objects[name] = take_module(item, collector)
                    collectors.append(collector)
                elif isinstance(item, torch.optim.Optimizer):
                    state, params = {**item.state_dict(), **earlier.get(name, {})}, params_of(item)
                    if not has_known_layout(state):
                        objects[name] = others.encode(state, name)
                        continue
                    is_common = functools.partial(_is_common, common, params)
                    collector = collecting(name, is_common=is_common)
                    objects[name] = take_optimizer(state, params, collector)
                    collectors.append(collector)
                else:
                    state = earlier[name] if name in earlier else item.state_dict()
                    objects[name] = others.encode(state, name)
        values = earlier.get(_VALUES, self.values)
        objects[_VALUES] = others.encode(values, _VALUES, may_be_sharded=False)
        objects[_GENERATORS] = others.encode(take_generators(), _GENERATORS)
        index = {
            "format": FORMAT,
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
            "objects": objects,
            **self._script.facts(),
            "tensors": {collector.group: collector.entries for collector in collectors},
        }
        if self._lost:
            index["without_ranks"] = sorted(self._lost)
        return index, collectors

    def _common_memory(self) -> set[int]:
        # DDP keeps parameters equal on all ranks.  Each rank saves all other tensors itself.
        if self.ranks.world_size == 1:
            return set()
        return {
            parameter.data_ptr()
            for _, module in ddp_modules(self._objects)
            for name, parameter in module.module.named_parameters()
            if parameter.numel() and name not in module.parameters_to_ignore
        }

    # ------------------------------------------------------------ loading

    def load(self, directory: Path) -> None:
        """Load all objects, values and generators.

        Args:
            directory: of the checkpoint, with the parts of all ranks.

        Raises:
            KeyError, ValueError, TypeError, OSError: a part is missing, is damaged or does not fit.  The
                state may be half loaded.
        """
        arrived, self._arrived = self._arrived, None
        keeps_loaders, self.keeps_loaders = self.keeps_loaders, False
        if arrived is not None:
            arrived.close()
        found = None if arrived is None else arrived.checked(directory)
        found = found or CheckpointSet(directory)
        targets = Targets(self._objects) if arrived is None else arrived.targets
        is_resized = found.job_size != self.ranks.world_size
        source = found.source_of(self.ranks.rank)
        saved = SavedRank(found, source, targets)
        is_new = self.ranks.rank in found.lost or self.ranks.rank >= found.job_size
        nodes = saved.nodes
        check_names(nodes.keys() - {_GENERATORS, _VALUES}, self._objects.keys())
        if is_resized:
            self._check_resize(found)
        elif found.lost:
            log.warning(
                "the checkpoint was made without rank %s: training continues, but not bit by bit",
                ", ".join(map(str, sorted(found.lost))),
            )
        in_others = {
            name: item
            for name, item in self._objects.items()
            if not isinstance(item, torch.nn.Module) and not is_node_of_optimizer(nodes[name])
        }
        self._script.before_load()
        get = getter(saved.read_others(in_others))
        for name, item in self._objects.items():
            if isinstance(item, torch.nn.Module):
                saved.load_module(name, item)
            elif name not in in_others:
                saved.load_optimizer(name, item)
            elif keeps_loaders and isinstance(item, ResumableLoader):
                continue
            elif (is_resized or is_new) and self._is_per_rank(name):
                if is_resized:
                    assert self._resize is not None
                    olds = [
                        SavedRank(found, found.source_of(rank), Targets({})).decoded(name)
                        for rank in range(found.job_size)
                    ]
                    state = self._resize(name, olds)
                else:  # of a rank that took part: data-parallel ranks are at the same position
                    state = decode_tree(nodes[name], get)
                if isinstance(item, ResumableLoader):
                    # Its generators and its last batch belong to another rank.
                    state = {**state, "resume_with": None, "checksum": None}
                item.load_state_dict(state)
            else:
                item.load_state_dict(retyped(decode_tree(nodes[name], get), item))
        values = retyped(decode_tree(nodes[_VALUES], get), self.values)
        self.values.clear()
        self.values.update(values)
        # Last, because loading the objects may draw random numbers.
        generators = decode_tree(nodes[_GENERATORS], get)
        if is_new:
            _reseed(generators, self.ranks.rank)
        else:
            set_generators(generators)
        self.read_s = found.read_s + (0.0 if arrived is None else arrived.read_s)
        self._loaded(directory, found.indexes[source])

    @property
    def _shares_cache(self) -> bool:
        """Whether this rank writes and reads the compile cache of its VM."""
        return self.takes_code and not self.ranks.local_rank

    def _loaded(self, directory: Path, index: Mapping[str, Any]) -> None:
        if self._compile_cache is not None and self._shares_cache:
            self._compile_cache.load(directory / rank_directory(self.ranks.rank) / ARCHIVE)
        self._script.loaded(index)
        self._boundary.note()
        if self._watch is not None:
            self._watch.begin()

    def _is_per_rank(self, name: str) -> bool:
        item = self._objects[name]
        is_of_job = isinstance(item, torch.nn.Module | torch.optim.Optimizer)
        return not is_of_job and name not in ("scheduler", "scaler")

    def _check_resize(self, found: CheckpointSet) -> None:
        own = [name for name in self._objects if self._is_per_rank(name)]
        if own and self._resize is None:
            raise ValueError(
                f"it is of {found.job_size} ranks and this job has {self.ranks.world_size}: each rank"
                f" has its own {' and '.join(own)}; pass resize= to TrainingState to convert their states"
            )
        log.warning(
            "the checkpoint is of %s ranks and this job has %s: training continues, but not bit by bit",
            found.job_size,
            self.ranks.world_size,
        )


def load_weights(directory: Path | str, name: str = "model") -> dict[str, torch.Tensor]:
    """Load the complete weights of a checkpoint without a model, for evaluation and export.

    Args:
        directory: of the checkpoint, with the parts of all ranks.
        name: of the object in :class:`TrainingState`.

    Returns:
        Tensors in host memory, by the keys of the object's ``state_dict()``, in their full shapes.

    Raises:
        KeyError: the checkpoint does not contain the object.
        ValueError, OSError: a file is missing or damaged.
    """
    found = CheckpointSet(Path(directory))
    saved = SavedRank(found, 0, Targets({}))
    nodes, tensors = saved.nodes[name], saved.read(name)
    return {
        key: tensors[node["tensor"]]
        for key, node in nodes.items()
        if isinstance(node, dict) and "tensor" in node
    }


def seed_all(seed: int) -> None:
    """Seed ``random``, torch with all its devices and, if it is in use, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def shield_worker(_worker_id: int = 0) -> None:
    """Ignore SIGUSR1, SIGTERM and SIGINT in a data loader's worker; pass it as ``worker_init_fn``."""
    import signal  # noqa: PLC0415 - only workers need it

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


# ---------------------------------------------------------------- objects


def _pieces(collectors: Sequence[Collector]) -> list[TensorPiece]:
    return [piece for collector in collectors for piece in collector.pieces]


def _check_names(objects: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that cannot begin a file name, and for an object under two names."""
    names: dict[str, str] = {name: name for name in (_GENERATORS, _VALUES, OTHERS)}
    owners: dict[int, str] = {}
    for name, item in objects.items():
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a valid name of an object: use up to 64 letters, digits and"
                " underscores, not beginning with a digit"
            )
        # Names become file names, and some file systems do not distinguish cases.
        taken = names.setdefault(name.lower(), name)
        if name.lower() in (_GENERATORS, _VALUES, OTHERS):
            raise ValueError(f"{name!r} is not a valid name of an object: it is reserved")
        if taken != name:
            raise ValueError(f"the names {taken!r} and {name!r} differ only in case: rename one")
        owner = owners.setdefault(id(unwrap(item)), name)
        if owner != name:
            raise ValueError(f"{owner!r} and {name!r} are the same object: pass it once")


def _has_own_layout(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has its own ``state_dict()``, which may change the state before the first step."""
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def _is_common(
    common: set[int], params: list[torch.Tensor], key: str, _tensor: torch.Tensor
) -> bool:
    param = param_of(key, params)
    return param is not None and param.data_ptr() in common


def _reseed(generators: Mapping[str, Any], rank: int) -> None:
    """Seed the generators of a rank that the saving job did not have: reproducibly, each rank differently."""
    facts = bytes(generators["torch"].tolist()) + rank.to_bytes(8, "big")
    seed_all(int.from_bytes(hashlib.sha256(facts).digest()[:8], "big"))
