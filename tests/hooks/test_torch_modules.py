# SPDX-License-Identifier: Apache-2.0
"""Modules under wrappers, and modules with unusual state: saved and loaded under the same names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from swansong._torch.modules import state_of_module
from swansong.torch import TrainingState, load_weights
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from testkit.training_parts import save_part


class Named(nn.Module):
    """A model whose own modules have the names that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)
        self._forward_module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self._forward_module(self._orig_mod(self.module(value)))


PLAIN = list(Named().state_dict())


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def in_fabric(module: nn.Module) -> nn.Module:
    from lightning import fabric

    return fabric.Fabric(accelerator="cpu", devices=1).setup(module)


def inside(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the submodules instead of the module."""

    def wrap_children(model: Any) -> Any:
        for name, child in list(model.named_children()):
            setattr(model, name, wrap(child))
        return model

    return wrap_children


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "DDP": DistributedDataParallel,
    "compiled": compiled,
    "compiled DDP": lambda model: compiled(DistributedDataParallel(model)),
    "DDP of compiled": lambda model: DistributedDataParallel(compiled(model)),
    "DataParallel": nn.DataParallel,
    "submodules compiled": inside(compiled),
    "submodules checkpointed": inside(checkpoint_wrapper),
    "compiled submodules checkpointed": lambda model: inside(checkpoint_wrapper)(
        inside(compiled)(model)
    ),
    "checkpointed submodules compiled": lambda model: DistributedDataParallel(
        inside(compiled)(inside(checkpoint_wrapper)(model))
    ),
    "checkpointed": checkpoint_wrapper,
    "Fabric": in_fabric,
    "Fabric of compiled": lambda model: in_fabric(compiled(model)),
    "compiled Fabric": lambda model: compiled(in_fabric(model)),
    "Fabric with compiled submodules": lambda model: in_fabric(inside(compiled)(model)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("process_group")
def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    """A checkpoint under any wrapper loads under any other; a user's own ``module`` keeps its name."""
    for name, wrap in WRAPPERS.items():
        model = Named()
        wrapped = wrap(model)
        state = TrainingState(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))
        wanted = {key: value.clone() for key, value in state_of_module(model).items()}
        assert list(wanted) == PLAIN, name
        directory = save_part(state, tmp_path / name)
        assert list(load_weights(directory)) == PLAIN, name
        plain = Named()
        TrainingState(plain, torch.optim.SGD(plain.parameters(), 0.1)).load(directory)
        assert all(torch.equal(plain.state_dict()[key], wanted[key]) for key in PLAIN), name
        for value in model.parameters():
            value.data.zero_()
        state.load(tmp_path / "plain")
        first = load_weights(tmp_path / "plain")
        assert all(torch.equal(value, first[key]) for key, value in state_of_module(model).items())


def test_an_average_is_not_a_wrapper() -> None:
    """``AveragedModel`` has a buffer of its own: its names stay, those of a wrapper in it do not."""
    names = list(state_of_module(AveragedModel(compiled(nn.Linear(2, 2)))))
    assert names == ["n_averaged", "module.weight", "module.bias"]


class Odd(nn.Module):
    """All kinds of entries of a ``state_dict()``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.number = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.register_buffer("passing", torch.randn(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("small", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("expanded", torch.randn(2, 1).expand(2, 3))
        self.extra = seed

    def get_extra_state(self) -> Any:
        return {"seed": self.extra, "table": torch.full((2,), float(self.extra))}

    def set_extra_state(self, state: Any) -> None:
        assert torch.equal(state["table"], torch.full((2,), float(state["seed"])))
        self.extra = state["seed"]


def test_unusual_entries_are_restored(tmp_path: Path) -> None:
    """Tied, complex, float8, empty, scalar, expanded and parametrised tensors, and extra state."""
    before = Odd(1)
    directory = save_part(TrainingState(before), tmp_path)
    after = Odd(2)
    passing = after.passing.clone()
    TrainingState(after).load(directory)
    wanted = before.state_dict()
    for key, value in after.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(
                value.contiguous().view(-1).view(torch.uint8),
                wanted[key].contiguous().view(-1).view(torch.uint8),
            ), key
    assert after.extra == 1
    assert after.head.weight is after.embedding.weight
    assert torch.equal(load_weights(directory)["head.weight"], before.head.weight), "a tied one"
    assert torch.equal(after.passing, passing)
    assert "passing" not in wanted
    before.expanded = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match="other values"):
        TrainingState(after).load(save_part(TrainingState(before), tmp_path / "other"))


class Refused(torch.Tensor):
    """A tensor with its own operations, as quantised tensors have."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default, "an operation on the tensor"
        return args[0]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.ones(2, device="meta"), "meta device"),
        (torch.Tensor._make_subclass(Refused, torch.ones(2)), "Refused"),
    ],
)
def test_tensors_that_cannot_be_written_are_refused(tensor: torch.Tensor, words: str) -> None:
    """The error names the tensor, its kind and the way out."""
    model = nn.Linear(1, 1)
    model.register_buffer("odd", tensor)
    with pytest.raises(TypeError, match=rf"model: odd .*{words}"):
        TrainingState(model).snapshot()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("process_group")
def test_fsdp1_is_refused() -> None:
    """``FullyShardedDataParallel`` is refused at construction, also inside of the model."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="fully_shard"):
        TrainingState(nn.Sequential(sharded))
