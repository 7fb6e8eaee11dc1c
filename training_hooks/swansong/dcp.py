# SPDX-License-Identifier: Apache-2.0
"""For a training loop that uses ``torch.distributed.checkpoint`` (DCP): the same save, at a notice.

::

    import torch.distributed.checkpoint as dcp
    from swansong.dcp import DcpState

    guard = swansong.attach(DcpState({"app": app}))

Each rank writes into a separate directory, so the VMs need no shared file system.  The format is that of DCP.
Unlike :class:`swansong.torch.TrainingState`, every save uses collectives, writes a pickled ``.metadata``, and
blocks the training loop until the files are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from swansong._torch.parts import JointDirectory

__all__ = ["DcpState"]


class DcpState(JointDirectory):
    """A state for ``dcp.save(state, ...)`` and ``dcp.load(state, ...)``.

    Args:
        state: tensors, and objects with ``state_dict()`` and ``load_state_dict()``, by name.
        process_group: for DCP's collectives; tensors in host memory need one with gloo.
    """

    def __init__(self, state: Mapping[str, Any], process_group: Any = None) -> None:
        self._state = dict(state)
        self._group = process_group
        super().__init__(self._dcp_save, self._dcp_load)

    def _dcp_save(self, directory: Path) -> None:
        if self.ranks.world_size > 1 and not dist.is_initialized():
            # Without it, DCP would take each rank for the whole job.
            raise RuntimeError(
                "the process group does not exist any more; close the guard before destroy_process_group()"
            )
        dcp.save(self._state, checkpoint_id=directory, **self._job())

    def _dcp_load(self, directory: Path) -> None:
        dcp.load(self._state, checkpoint_id=directory, **self._job())

    def _job(self) -> dict[str, Any]:
        return {"process_group": self._group, "no_dist": not dist.is_initialized()}
