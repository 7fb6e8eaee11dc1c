# SPDX-License-Identifier: Apache-2.0
"""The training state of a PyTorch job: one process, DDP and FSDP2 alike.

::

    from swansong.torch import TrainingState

    state = TrainingState(model, optimizer, scheduler=scheduler, loader=loader)
    guard = swansong.attach(state)
    for step in range(guard.restore(), total_steps):
        loss = train_one_step()
        guard.step(step + 1, loss=loss)
    guard.close()

A save blocks the training loop only while it copies the state to host memory.  A background thread writes the
files from there.  A save uses no collectives and gathers nothing, so no rank waits for another.  A checkpoint
consists of safetensors and JSON files with checksums: it cannot run code, and a flipped bit is detected.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from swansong._ranks.agreement import Ranks
from swansong._torch.arena import Arena, signature_of
from swansong._torch.checkpoint_set import CheckpointSet
from swansong._torch.collector import Collector
from swansong._torch.end_of_loop import EndOfLoop
from swansong._torch.generators import (
    is_generator,
    set_global,
    set_state_of_generator,
    state_of_generator,
    take_global,
)
from swansong._torch.index import FORMAT, INDEX, encode_index
from swansong._torch.loader import ResumableLoader
from swansong._torch.modules import load_module, state_of_module, unwrap, uses_fsdp1
from swansong._torch.sharding import is_sharded
from swansong.state import decode_tree

__all__ = ["ResumableLoader", "TrainingState", "load_weights", "seed_all", "shield_worker"]

_GENERATORS, _VALUES = "generators", "values"
_OTHERS = "others"
"""Name of the files with the tensors of all objects that are neither model nor optimizer."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")

log = logging.getLogger("swansong")


class TrainingState:
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
            with ``state_dict()`` and ``load_state_dict()``.

    Raises:
        TypeError: an object cannot be saved.
        ValueError: a name is reserved or has invalid characters.
    """

    in_background = True
    reads_whole_set = True
    ranks = Ranks()
    """Position of this process in the job; :func:`swansong.attach` sets it."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        resize: Callable[[str, list[Any]], Any] | None = None,
        **others: Any,
    ) -> None:
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        objects = {**named, "loader": loader, **others}
        self.values: dict[str, Any] = {}
        """Plain values to save and load, such as epoch or best metric; the same on all ranks."""
        self._objects = {
            name: unwrap(item) if isinstance(item, torch.optim.Optimizer) else item
            for name, item in objects.items()
            if item is not None
        }
        for name, item in self._objects.items():
            if not _NAME.fullmatch(name) or name in (_GENERATORS, _VALUES, _OTHERS):
                raise ValueError(f"{name!r} is not a valid name of an object")
            if isinstance(item, torch.nn.Module) and uses_fsdp1(item):
                raise TypeError(
                    f"{name} contains a FullyShardedDataParallel, whose state cannot be saved by rank;"
                    " shard the model with torch.distributed.fsdp.fully_shard"
                )
            if not is_generator(item) and not hasattr(item, "load_state_dict"):
                raise TypeError(
                    f"{name} is a {type(item).__qualname__}, without state_dict() and load_state_dict()"
                )
        self._resize = resize
        self._end_of_loop = EndOfLoop({**self._objects, _VALUES: self.values}, _state_of)
        self.count_steps_with = self._end_of_loop.count_steps_with
        self._arenas: list[Arena | None] = [None, None]

    # ------------------------------------------------------------ saving

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the state to host memory, and return a function that writes the copy into a directory.

        This reuses the memory of the last copy but one, so that copy must be written or dropped first.

        Raises:
            TypeError: a value cannot be written; names it.
        """
        index: dict[str, Any] = {
            "format": FORMAT,
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
            "torch": torch.__version__,
        }
        others = Collector(_OTHERS, self.ranks.rank, self.ranks.world_size)
        collectors = [others]
        objects: dict[str, Any] = {}
        common = self._common_memory()
        earlier = self._end_of_loop.states()
        for name, item in self._objects.items():
            if isinstance(item, torch.nn.Module | torch.optim.Optimizer):
                objects[name], collector = self._take(name, item, common, earlier.get(name, {}))
                collectors.append(collector)
            else:
                state = earlier[name] if name in earlier else _state_of(item)
                objects[name] = others.encode(state, name)
        objects[_VALUES] = others.encode(earlier.get(_VALUES, self.values), _VALUES)
        objects[_GENERATORS] = others.encode(take_global(), _GENERATORS)
        pieces = [piece for collector in collectors for piece in collector.pieces]
        arena, spare = self._arenas
        if arena is None or arena.signature != signature_of(pieces):
            arena = None  # free the old memory before allocating the new one
            self._arenas[0] = None
            arena = Arena(pieces)
        arena.fill(pieces)
        self._arenas = [spare, arena]
        groups = dict(zip(arena.homes, (piece.group for piece in pieces), strict=True))
        tensors = {collector.group: collector.entries for collector in collectors}
        index |= {"objects": objects, "tensors": tensors}

        def write(directory: Path) -> None:
            index["files"] = {
                name: {"group": groups[name], "checksums": checksums}
                for name, checksums in arena.write(directory).items()
            }
            (directory / INDEX).write_bytes(encode_index(index))

        return write

    def _take(
        self,
        name: str,
        item: torch.nn.Module | torch.optim.Optimizer,
        common: set[int],
        earlier: dict[str, Any],
    ) -> tuple[Any, Collector]:
        is_module = isinstance(item, torch.nn.Module)
        params = [] if is_module else _params(item)

        def is_common(key: str, tensor: torch.Tensor) -> bool:
            owner = tensor if is_module else _param_of(key, params)
            return owner is not None and owner.data_ptr() in common

        collector = Collector(
            name,
            self.ranks.rank,
            self.ranks.world_size,
            is_common=is_common,
            may_be_sharded=True,
        )
        if is_module:
            state = state_of_module(item)
            return {key: collector.encode(value, key) for key, value in state.items()}, collector
        state = item.state_dict()
        of_params = state.pop("state")
        for number, values in of_params.items():
            _check_shards(number, values, params)
        node = {
            "state": [
                [number, collector.encode(values, f"state.{number}")]
                for number, values in of_params.items()
            ],
            "rest": collector.encode({**state, **earlier}, "rest"),
        }
        return node, collector

    def _common_memory(self) -> set[int]:
        # DDP keeps parameters equal on all ranks.  Each rank saves all other tensors itself.
        if self.ranks.world_size == 1:
            return set()
        return {
            parameter.data_ptr()
            for item in self._objects.values()
            if isinstance(item, torch.nn.Module)
            for module in item.modules()
            if isinstance(module, DistributedDataParallel)
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
        found = CheckpointSet(directory)
        is_resized = found.world_size != self.ranks.world_size
        source = self.ranks.rank % found.world_size
        nodes = found.indexes[source]["objects"]
        missing = self._objects.keys() - nodes.keys()
        if missing:
            raise KeyError(f"the checkpoint contains no state for {sorted(missing)}")
        unused = nodes.keys() - self._objects.keys() - {_GENERATORS, _VALUES}
        if unused:
            log.warning(
                "the checkpoint also contains %s, which this script does not load", sorted(unused)
            )
        if is_resized:
            self._check_resize(found)
        get = _getter(_read(found, source, _OTHERS, {}))
        for name, item in self._objects.items():
            if isinstance(item, torch.nn.Module):
                _load_module(found, source, name, item)
            elif isinstance(item, torch.optim.Optimizer):
                _load_optimizer(found, source, name, item)
            elif is_resized and self._is_per_rank(name):
                assert self._resize is not None
                olds = [_decode(found, rank, name) for rank in range(found.world_size)]
                state = self._resize(name, olds)
                if isinstance(item, ResumableLoader):
                    state = {**state, "resume_with": None}  # generators of another rank
                _set_state(item, state)
            else:
                _set_state(item, decode_tree(nodes[name], get))
        self.values.clear()
        self.values.update(decode_tree(nodes[_VALUES], get))
        # Last, because loading the objects may draw random numbers.
        generators = decode_tree(nodes[_GENERATORS], get)
        if is_resized and self.ranks.rank >= found.world_size:
            _reseed(generators, self.ranks.rank)
        else:
            set_global(generators)

    def _is_per_rank(self, name: str) -> bool:
        item = self._objects[name]
        is_of_job = isinstance(item, torch.nn.Module | torch.optim.Optimizer)
        return not is_of_job and name not in ("scheduler", "scaler")

    def _check_resize(self, found: CheckpointSet) -> None:
        own = [name for name in self._objects if self._is_per_rank(name)]
        if own and self._resize is None:
            raise ValueError(
                f"{found.world_size} ranks saved it and this job has {self.ranks.world_size}: each rank"
                f" has its own {' and '.join(own)}; pass resize= to TrainingState to convert their states"
            )
        log.warning(
            "%s ranks saved the checkpoint and this job has %s: training continues, but not bit by bit",
            found.world_size,
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
    nodes = found.indexes[0]["objects"][name]
    tensors = _read(found, 0, name, {})
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


def _state_of(item: Any) -> Any:
    return state_of_generator(item) if is_generator(item) else item.state_dict()


def _set_state(item: Any, state: Any) -> None:
    if is_generator(item):
        set_state_of_generator(item, state)
    else:
        item.load_state_dict(state)


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _param_of(key: str, params: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the parameter of the key ``state.<number>...``."""
    match = re.match(r"state\.(\d+)\b", key)
    return params[int(match[1])] if match and int(match[1]) < len(params) else None


def _check_shards(key: Any, state: Any, params: list[torch.Tensor]) -> None:
    for name, value in state.items() if isinstance(state, dict) else ():
        if is_sharded(value) and value.shape != params[key].shape:
            raise TypeError(
                f"the optimizer's {name!r} is sharded, but not in the shape of its parameter"
            )


def _read(
    found: CheckpointSet, source: int, group: str, targets: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Read all tensors of an object by key: ``targets`` in place, the others into host memory."""
    tensors: dict[str, torch.Tensor] = {}
    for key in found.indexes[source]["tensors"][group]:
        if key in targets:
            tensors[key] = targets[key]
        else:
            shape, dtype = found.shape_and_dtype(source, group, key)
            tensors[key] = torch.empty(shape, dtype=dtype)
    found.load(source, {(group, key): tensor for key, tensor in tensors.items()})
    return tensors


def _getter(tensors: Mapping[str, torch.Tensor]) -> Callable[[str, Any], Any]:
    def get(word: str, key: Any) -> Any:
        if word == "tensor":
            return tensors[key]
        if word in ("array", "scalar"):
            array = tensors[key].numpy()
            return array if word == "array" else array[()]
        raise ValueError(f"{INDEX} contains {word!r:.40}, which this version cannot read")

    return get


def _decode(found: CheckpointSet, source: int, name: str) -> Any:
    get = _getter(_read(found, source, _OTHERS, {}))
    return decode_tree(found.indexes[source]["objects"][name], get)


def _load_module(found: CheckpointSet, source: int, name: str, module: torch.nn.Module) -> None:
    state = state_of_module(module)
    nodes = found.indexes[source]["objects"][name]
    for what, keys in (
        ("lacks", state.keys() - nodes.keys()),
        ("has", nodes.keys() - state.keys()),
    ):
        if keys:
            some = ", ".join(sorted(keys)[:5])
            raise ValueError(f"{name}: the checkpoint {what} {len(keys)} entries, such as {some}")
    targets = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    get = _getter(_read(found, source, name, targets))
    load_module(module, {key: decode_tree(node, get) for key, node in nodes.items()})


def _load_optimizer(
    found: CheckpointSet, source: int, name: str, optimizer: torch.optim.Optimizer
) -> None:
    params = _params(optimizer)
    targets = {}
    for key in found.indexes[source]["tensors"][name]:
        param = _param_of(key, params)
        if param is not None and is_sharded(param):
            shape, dtype = found.shape_and_dtype(source, name, key)
            if shape == param.shape:
                targets[key] = torch.empty_like(param.detach(), dtype=dtype)
    get = _getter(_read(found, source, name, targets))
    node = found.indexes[source]["objects"][name]
    state = {key: decode_tree(value, get) for key, value in node["state"]}
    optimizer.load_state_dict({"state": state, **decode_tree(node["rest"], get)})


# ---------------------------------------------------------------- generators


def _reseed(generators: Mapping[str, Any], rank: int) -> None:
    """Seed the generators of a rank that the saving job did not have: reproducibly, each rank differently."""
    facts = bytes(generators["torch"].tolist()) + rank.to_bytes(8, "big")
    seed_all(int.from_bytes(hashlib.sha256(facts).digest()[:8], "big"))
