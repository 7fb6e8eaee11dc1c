# SPDX-License-Identifier: Apache-2.0
"""Returns the state of a rank to its last ``guard.step()``, after a collective of the next step has failed.

Between two calls of ``guard.step()``, the optimizer changes the weights last.  Until then, the forward pass
has moved only the position of the loader, buffers such as the statistics of ``BatchNorm``, and generators.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from swansong._torch.change_counts import count_of, shows_changes
from swansong._torch.kinds import Hooked, gpus_of, of_kind, optimizers_of
from swansong._torch.loader import ResumableLoader
from swansong.rank_files import RandomSource

MOST_BYTES = 2**20
"""Largest size of the buffers that are copied at each ``guard.step()``."""
GPU_LIMIT_S = 2.0
"""Longest wait for a GPU to complete the last step."""
_NCCL_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class LastBoundary(Hooked):
    """Keeps the objects that a forward pass changes, as they were at the last ``guard.step()``.

    The generators are not kept: a checkpoint without a rank never continues to the bit.

    Args:
        objects: of the training state, by name.
        values: plain values of the training state.
    """

    def __init__(self, objects: Mapping[str, Any], values: dict[str, Any]) -> None:
        self._values = values
        self._loaders = of_kind(objects, ResumableLoader).values()
        self._others: dict[str, Any] = {}
        """Objects that count their changes."""
        self._unseen: list[str] = []
        """Names of the objects of which a change cannot be seen."""
        self._buffers: list[torch.Tensor] = []
        for name, item in objects.items():
            if isinstance(item, torch.nn.Module):
                self._buffers += [each for each in item.buffers() if not each.is_inference()]
            elif isinstance(item, torch.optim.Optimizer | ResumableLoader | RandomSource):
                pass
            elif shows_changes(item):
                self._others[name] = item
            else:
                self._unseen.append(name)
        size_bytes = sum(each.nbytes for each in self._buffers)
        self._copies = [each.clone() for each in self._buffers if size_bytes <= MOST_BYTES]
        self._versions = self._buffer_versions()
        devices = gpus_of(objects)
        self._completed = {device: torch.cuda.Event() for device in devices}
        """By GPU: the end of the work of the last step.  The training loop runs ahead of a GPU."""
        self._free_streams = [torch.cuda.Stream(device) for device in devices]
        """Created now, because a creation may wait for the kernels of other streams."""
        self._begun = "no step is complete since the start"
        """Why the state of the last :meth:`note` does not exist; empty while it does."""
        self._is_last = False
        self._lock = threading.Lock()
        self._never = threading.Event()
        self._hooks = []
        for name, optimizer in optimizers_of(objects).items():
            try:
                self._hooks.append(optimizer.register_step_pre_hook(self._begin_step))
            except (AttributeError, TypeError):  # one around another one may have no hooks
                self._unseen.append(name)

    def note(self) -> None:
        """Remember the present state."""
        self._noted_values = dict(self._values)
        self._places = [loader.place() for loader in self._loaders]
        self._counted = {name: count_of(item) for name, item in self._others.items()}
        versions = self._buffer_versions()
        if self._copies and versions != self._versions:
            torch._foreach_copy_(self._copies, self._buffers)
        self._versions = versions
        for device, completed in self._completed.items():
            completed.record(torch.cuda.current_stream(device))
        self._begun = ""

    def return_to(self) -> None:
        """Return to the state of the last :meth:`note`.

        In the thread of the training loop, or while that thread is blocked: it begins no step any more.

        Raises:
            RuntimeError: that state does not exist any more, or this cannot be seen; contains the cause.
        """
        with self._lock:
            if self._begun:
                raise RuntimeError(self._begun)
            self._is_last = True
        self._ensure_completed()
        changed = [
            name for name, item in self._others.items() if count_of(item) != self._counted[name]
        ]
        if changed or self._unseen:
            names = " and ".join(sorted(changed + self._unseen))
            raise RuntimeError(f"the next step may have changed {names}")
        if self._buffer_versions() != self._versions:
            if not self._copies:
                raise RuntimeError(
                    f"the next step has changed buffers of over {MOST_BYTES} bytes, which are not copied"
                )
            with torch.no_grad(), self.free_streams():
                torch._foreach_copy_(self._buffers, self._copies)
        for loader, place in zip(self._loaders, self._places, strict=True):
            loader.return_to(place)
        self._values.clear()
        self._values.update(self._noted_values)

    @contextlib.contextmanager
    def free_streams(self) -> Iterator[None]:
        """Use other streams in a block: the usual ones may wait for a collective that never ends."""
        with contextlib.ExitStack() as entered:
            for stream in self._free_streams:
                entered.enter_context(torch.cuda.stream(stream))
            yield
            for stream in self._free_streams:
                stream.synchronize()

    def _ensure_completed(self) -> None:
        if self._completed and os.environ.get(_NCCL_HANDLING, "3") not in ("0", "3"):
            raise RuntimeError(
                f"{_NCCL_HANDLING} lets a GPU continue after a failed collective, with wrong gradients"
            )
        give_up_mono_s = time.monotonic() + GPU_LIMIT_S
        while not all(completed.query() for completed in self._completed.values()):
            if time.monotonic() > give_up_mono_s:
                raise RuntimeError("a GPU has not completed the step")
            self._never.wait(0.01)

    def _begin_step(self, *_: Any) -> None:
        with self._lock:
            self._begun = "the optimizer had begun the next step"
            is_last = self._is_last
        if is_last:  # another thread saves the state and then ends the process
            self._never.wait()

    def _buffer_versions(self) -> int:
        return sum(each._version for each in self._buffers)  # noqa: SLF001 - torch documents no other counter
