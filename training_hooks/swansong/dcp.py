# SPDX-License-Identifier: Apache-2.0
"""For a loop that saves with ``torch.distributed.checkpoint`` already: the same call, at a notice.

::

    import torch.distributed.checkpoint as dcp
    from swansong.dcp import DcpState

    guard = swansong.attach(DcpState({"app": app}))

Each rank writes into a directory of its own, so no file system need be shared between VMs.  Unlike
:class:`swansong.torch.TrainingState` this is DCP's own format, with collectives in every save, a pickled
``.metadata``, and a training loop that stands still until the files are written.
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
    """What ``dcp.save(state, ...)`` saves and ``dcp.load(state, ...)`` fills.

    Args:
        state: by name, tensors and objects with ``state_dict()`` and ``load_state_dict()``.
        process_group: for DCP's collectives; one with gloo for tensors that are in host memory.
    """

    def __init__(self, state: Mapping[str, Any], process_group: Any = None) -> None:
        self._state = dict(state)
        self._group = process_group
        super().__init__(self._dcp_save, self._dcp_load)

    def _dcp_save(self, directory: Path) -> None:
        dcp.save(
            self._state,
            checkpoint_id=directory,
            process_group=self._group,
            no_dist=not dist.is_initialized(),
        )

    def _dcp_load(self, directory: Path) -> None:
        dcp.load(
            self._state,
            checkpoint_id=directory,
            process_group=self._group,
            no_dist=not dist.is_initialized(),
        )
