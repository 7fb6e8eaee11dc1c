# SPDX-License-Identifier: Apache-2.0
"""The states of the objects in a training state: modules, optimizers, generators, and others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from swansong._torch.checkpoint_set import CheckpointSet
from swansong._torch.collector import Collector
from swansong._torch.index import INDEX
from swansong._torch.modules import load_module, state_of_module
from swansong._torch.sharding import is_sharded
from swansong.rank_files import decode_tree, encode_tree

OTHERS = "others"
"""Name of the files with the tensors of all objects that are neither module nor optimizer."""


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in the order of their numbers in ``state_dict()``."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def param_of(key: str, params: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the parameter of the key ``state.<number>...``."""
    match = re.match(r"state\.(\d+)\b", key)
    return params[int(match[1])] if match and int(match[1]) < len(params) else None


def has_known_layout(state: Any) -> bool:
    """Whether the state of an optimizer is that of ``torch.optim``: states by parameter, and groups."""
    return (
        isinstance(state, dict)
        and isinstance(state.get("state"), dict)
        and isinstance(state.get("param_groups"), list)
        and all(type(key) in (int, str) for key in state["state"])
    )


def take_module(module: torch.nn.Module, collector: Collector) -> dict[str, Any]:
    """Encode the state of a module for the index."""
    return {key: collector.encode(value, key) for key, value in state_of_module(module).items()}


def take_optimizer(
    state: Mapping[str, Any], params: list[torch.Tensor], collector: Collector
) -> dict[str, Any]:
    """Encode the state of an optimizer, in the known layout, for the index."""
    for number, values in state["state"].items():
        _check_shards(number, values, params)
    return {
        "state": [
            [number, collector.encode(values, f"state.{number}")]
            for number, values in state["state"].items()
        ],
        "rest": collector.encode(
            {key: value for key, value in state.items() if key != "state"}, "rest"
        ),
    }


class Targets:
    """The tensors that a load fills: in modules in their place, all others new.

    Args:
        objects: of the training state, by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._modules: dict[str, dict[str, Any]] = {}
        self._tensors: dict[tuple[str, str], torch.Tensor] = {}
        self.filled: dict[tuple[str, str], set[int]] = {}
        """By object and key, the ranks whose parts are in the tensor already."""

    def of_module(self, name: str) -> dict[str, Any]:
        """Return the state of a module, whose tensors are filled in place."""
        if name not in self._modules:
            self._modules[name] = state_of_module(self._objects[name])
        return self._modules[name]

    def of(self, name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor for the value of an object; a module's may have another shape or type."""
        found = self._tensors.get((name, key))
        if found is None or (found.shape, found.dtype) != (shape, dtype):
            found = self._tensors[name, key] = self._find(name, key, shape, dtype)
            self.filled.pop((name, key), None)
        return found

    def take(self, name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor as :meth:`of` does, and drop the reference to it."""
        found = self.of(name, key, shape, dtype)
        del self._tensors[name, key]
        return found

    def _find(self, name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        item = self._objects.get(name)
        if isinstance(item, torch.nn.Module):
            found = self.of_module(name).get(key)
            if isinstance(found, torch.Tensor):
                return found
        elif isinstance(item, torch.optim.Optimizer):
            return new_state_of_param(item, key, shape, dtype)
        return new_tensor(shape, dtype)


class SavedRank:
    """The state of one rank in a checkpoint.

    Args:
        found: the checkpoint.
        source: the rank.
        targets: the tensors to fill.
    """

    def __init__(self, found: CheckpointSet, source: int, targets: Targets) -> None:
        self.nodes: dict[str, Any] = found.indexes[source]["objects"]
        """The states of all objects, as in the index."""
        self._entries = found.indexes[source]["tensors"]
        self._found, self._source, self._targets = found, source, targets

    def load_module(self, name: str, module: torch.nn.Module) -> None:
        """Load a module."""
        state, nodes = self._targets.of_module(name), self.nodes[name]
        for what, keys in (
            ("lacks", state.keys() - nodes.keys()),
            ("has", nodes.keys() - state.keys()),
        ):
            if keys:
                some = ", ".join(sorted(keys)[:5])
                raise ValueError(
                    f"{name}: the checkpoint {what} {len(keys)} entries, such as {some}"
                )
        get = getter(self.read(name))
        load_module(module, {key: decode_tree(node, get) for key, node in nodes.items()})

    def load_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Load an optimizer, whose state has the known layout."""
        get, node = getter(self.read(name)), self.nodes[name]
        state = {key: decode_tree(value, get) for key, value in node["state"]}
        optimizer.load_state_dict({"state": state, **decode_tree(node["rest"], get)})

    def read_others(self, items: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Read the tensors of all other objects.

        A tensor that ``items`` hold as a DTensor is read in the same placement.
        """
        entries = self._entries[OTHERS]
        placed: dict[str, torch.Tensor] = {}
        if any("shape" in entry for entry in entries.values()):  # sharded when it was saved
            for name, item in items.items():
                for key, tensor in _shards(item.state_dict(), name):
                    if key in entries:
                        dtype = self._found.shape_and_dtype(self._source, OTHERS, key)[1]
                        placed[key] = torch.empty_like(tensor.detach(), dtype=dtype)
        return self.read(OTHERS, placed)

    def read(self, group: str, placed: Mapping[str, torch.Tensor] = {}) -> dict[str, torch.Tensor]:
        """Read all tensors of an object, by key, into ``placed`` or the targets."""
        filled = self._targets.filled
        tensors: dict[str, torch.Tensor] = {}
        for key in self._entries[group]:
            if key in placed:
                tensors[key] = placed[key]
                filled.pop((group, key), None)
            else:
                facts = self._found.shape_and_dtype(self._source, group, key)
                tensors[key] = self._targets.take(group, key, *facts)
        targets = {(group, key): each for key, each in tensors.items()}
        self._found.load(self._source, targets, filled)
        return tensors

    def decoded(self, name: str) -> Any:
        """Return the state of an object that is neither module nor optimizer."""
        return decode_tree(self.nodes[name], getter(self.read(OTHERS)))


def new_state_of_param(
    optimizer: torch.optim.Optimizer, key: str, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Return a new tensor for the state of a parameter.

    In the shape of its parameter it has also the placement and the order in memory of the parameter, as a
    fused optimizer requires, and is on the device where ``load_state_dict()`` puts it.
    """
    param = param_of(key, params_of(optimizer))
    if param is None or shape != param.shape:
        return new_tensor(shape, dtype)
    like = param.detach()
    if is_sharded(param):
        return torch.empty_like(like, dtype=dtype)
    is_usual = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    # The number of steps has the shape of a single number, and may stay in host memory.
    return torch.empty_like(like, dtype=dtype, device=param.device if is_usual and shape else "cpu")


def new_tensor(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor in host memory, also if the script has set another default device."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def is_node_of_optimizer(node: Any) -> bool:
    """Whether :func:`take_optimizer` returned the node."""
    return isinstance(node, dict) and node.keys() == {"state", "rest"}


def getter(tensors: Mapping[str, torch.Tensor]) -> Callable[[str, Any], Any]:
    """Return the function with which ``decode_tree`` finds tensors and arrays."""

    def get(word: str, key: Any) -> Any:
        if word == "tensor":
            return tensors[key]
        if word in ("array", "scalar"):
            array = tensors[key].numpy()
            return array if word == "array" else array[()]
        raise ValueError(f"{INDEX} contains {word!r:.40}, which this version cannot read")

    return get


def _check_shards(key: Any, state: Any, params: list[torch.Tensor]) -> None:
    for name, value in state.items() if isinstance(state, dict) else ():
        if is_sharded(value) and value.shape != params[key].shape:
            raise TypeError(
                f"the optimizer's {name!r} is sharded, but not in the shape of its parameter"
            )


def _shards(state: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    found: dict[str, torch.Tensor] = {}

    def put(value: Any, path: str) -> Any:
        if is_sharded(value):
            found[path] = value
        return {"tensor": path}

    encode_tree(state, name, put)
    yield from found.items()
