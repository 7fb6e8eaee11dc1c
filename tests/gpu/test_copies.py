# SPDX-License-Identifier: Apache-2.0
"""Copies of a state on a GPU: of the right step, in pinned memory, and also while CUDA is in trouble."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from swansong._torch import arena, host_memory
from swansong._torch.host_memory import HostMemory
from swansong.protocol import Failed
from swansong.rank_files import set_generators, take_generators
from swansong.torch import TrainingState, load_weights
from torch import nn

from testkit.fake_daemon import FakeDaemon
from testkit.gpu import is_pinned, prepare
from testkit.python_process import output_of
from testkit.training_parts import save_part
from testkit.waiting import until

GPU = torch.device("cuda")


def model_of(value: float, width: int = 256, layers: int = 4) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(GPU)
    fill(model, value)
    return model


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(directory: Path) -> set[float]:
    found = load_weights(directory)
    return {value for each in found.values() for value in each.unique().tolist()}


def prepared(state: TrainingState) -> list[torch.Tensor]:
    memory = prepare(state)
    until(lambda: is_pinned(memory))
    return memory


@pytest.mark.parametrize("is_usual", [True, False], ids=["default stream", "own stream"])
def test_a_copy_taken_while_kernels_run_is_of_its_step(tmp_path: Path, *, is_usual: bool) -> None:
    """It contains the work that was submitted before it, and nothing that was submitted after it."""
    model = model_of(0.0)
    state = TrainingState(model)
    stream = torch.cuda.default_stream() if is_usual else torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        for step in (1, 2, 3):
            torch.cuda._sleep(200_000_000)
            fill(model, float(step))
            submitted = torch.cuda.Event()
            submitted.record()
            assert not submitted.query(), "the kernels were faster than the test"
            write = state.snapshot()
            fill(model, -1.0)
            own = tmp_path / str(step) / "rank-00000"
            own.mkdir(parents=True)
            write(own)
            assert values(own.parent) == {float(step)}


def test_the_memory_is_pinned_in_advance_and_given_back(tmp_path: Path) -> None:
    """It has the size of the state, the copy needs no memory of the GPU, and the kernel gets it back."""
    model = model_of(1.0, width=3000)
    state = TrainingState(model)
    size_bytes = sum(each.nbytes for each in model.state_dict().values())
    before_bytes, on_gpu_bytes = resident_bytes(), torch.cuda.memory_allocated()
    memory = prepared(state)
    assert sum(each.nbytes for each in memory) < 1.01 * size_bytes + 2**20
    assert resident_bytes() - before_bytes > 0.9 * size_bytes
    torch.cuda.reset_peak_memory_stats()
    assert values(save_part(state, tmp_path / "a")) == {1.0}
    assert torch.cuda.max_memory_allocated() == on_gpu_bytes
    assert len(state._arenas._idle) == 1
    del state, memory
    gc.collect()
    assert resident_bytes() - before_bytes < 0.3 * size_bytes


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_that_cuda_does_not_pin_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy is only slower, and the training loop does not see CUDA's error."""
    monkeypatch.setattr(host_memory, "_PORTABLE", 2**20)  # flags that CUDA refuses
    model = model_of(2.0)
    state = TrainingState(model)
    state.snapshot()
    assert "cannot be pinned" in caplog.text
    assert model(torch.ones(1, 256, device=GPU)).isfinite().all()
    assert values(save_part(state, tmp_path)) == {2.0}


def test_idle_memory_is_given_back_while_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next copy allocates it again; and a state that is too large is not prepared for."""
    state = TrainingState(model_of(1.0))
    monkeypatch.setattr(arena, "LOOK_S", 0.01)
    prepared(state)
    monkeypatch.setattr(arena, "available_bytes", lambda: (10**6, 10**9))
    until(lambda: not state._arenas._idle)
    state.snapshot()
    until(lambda: not state._arenas._idle)
    state.prepare_copy()
    assert not state._arenas._idle


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_does_not_separate_memory_from_the_gpu(tmp_path: Path) -> None:
    """A worker of a loader is a fork: the copy after it arrives in this process."""
    state = TrainingState(model_of(4.0))
    prepared(state)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reads, 1)
        os._exit(0)
    assert values(save_part(state, tmp_path)) == {4.0}
    os.write(writes, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(reads)
    os.close(writes)


def test_memory_is_pinned_while_a_graph_is_captured() -> None:
    """Both succeed, also in the capture mode in which other threads may not call CUDA."""
    memory, numbers, graph = (
        HostMemory(2**24, GPU),
        torch.zeros(4, device=GPU),
        torch.cuda.CUDAGraph(),
    )
    thread = threading.Thread(target=memory.prepare, kwargs={"is_urgent": False})
    with torch.cuda.graph(graph, capture_error_mode="global"):
        thread.start()
        thread.join()
        numbers.add_(1)
    graph.replay()
    assert numbers.tolist() == [1.0] * 4
    assert memory.tensor.is_pinned()


def test_a_copy_after_the_gpu_ran_out_of_memory(tmp_path: Path) -> None:
    """A step that fails for lack of memory leaves a state that is saved without any more memory."""
    state = TrainingState(model_of(5.0))
    held: list[torch.Tensor] = []
    size_bytes = torch.cuda.mem_get_info()[0]
    try:
        while size_bytes > 2**20:
            try:
                held.append(torch.empty(size_bytes, dtype=torch.uint8, device=GPU))
            except torch.cuda.OutOfMemoryError:
                size_bytes //= 2
        assert values(save_part(state, tmp_path)) == {5.0}
    finally:
        held.clear()
        torch.cuda.empty_cache()


def test_generators_of_more_gpus_than_there_are(tmp_path: Path) -> None:
    """A checkpoint of a VM with more GPUs sets the generators of those that exist."""
    taken = take_generators()
    wanted = torch.rand(3, device=GPU)
    set_generators({**taken, "cuda": [*taken["cuda"], *taken["cuda"]]})
    assert torch.equal(torch.rand(3, device=GPU), wanted)


STUCK = """
import sys, torch
from pathlib import Path
from torch import nn
from swansong._ranks.agreement import Ranks
from swansong.torch import TrainingState

model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
state = TrainingState(model, optimizer)
state.ranks = Ranks(rank=0, world_size=2, local_world_size=2)
state.rehearse()
if sys.argv[2] == "prepared":
    state.snapshot()
inputs = torch.randn(8, 64, device="cuda")
model(inputs).sum().backward()
optimizer.step()
state.note_boundary()
torch.cuda.synchronize()
wanted = [each.clone() for each in model.state_dict().values()]
model(inputs)  # moves the statistics
torch.cuda.synchronize()
torch.cuda._sleep(10**10)
ended = torch.cuda.Event()
ended.record()
state.return_to_boundary()
write, _ = state.snapshot_without({1}, Ranks())
own = Path(sys.argv[1], "rank-00000")
own.mkdir()
write(own)
assert not ended.query(), "the save has waited for the kernel"
ended.synchronize()
state.ranks = Ranks()
with torch.no_grad():
    for each in model.parameters():
        each.zero_()
state.load(own.parent)
assert all(map(torch.equal, model.state_dict().values(), wanted))
"""


@pytest.mark.parametrize("memory", ["prepared", "new"])
def test_a_save_without_a_lost_rank_waits_for_no_kernel(tmp_path: Path, memory: str) -> None:
    """A collective of a lost rank never ends; a long kernel stands for it.  The state is that of the last
    step."""
    output_of("-c", STUCK, tmp_path, memory)


BROKEN = """
import sys, swansong, torch
from torch import nn
from swansong.torch import TrainingState

guard = swansong.attach(TrainingState(nn.Linear(4, 4).cuda()), socket=sys.argv[1])
guard.restore()
guard.step(1)
try:
    torch.zeros(3, device="cuda")[torch.tensor([5], device="cuda")]
    torch.cuda.synchronize()
except RuntimeError:
    assert not guard.save(2)
    guard.close()
    sys.exit(0)
"""


def test_a_save_after_an_error_of_a_kernel_fails_without_an_exception(daemon: FakeDaemon) -> None:
    """Every call of CUDA fails from then on: the daemon gets the reason, and the process ends."""
    output_of("-c", BROKEN, daemon.path)
    assert "CUDA" in daemon.wait_for(Failed).reason
    assert daemon.sealed() == []


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path) as daemon:
        yield daemon
