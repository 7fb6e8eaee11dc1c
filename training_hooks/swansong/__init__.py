# SPDX-License-Identifier: Apache-2.0
"""Training hooks of Swansong: emergency checkpoints on spot GPU VMs.

::

    import swansong

    guard = swansong.attach(state={"model": model, "optim": optimizer, "loader": loader}, every_s=60)
    for step in range(guard.restore(), total_steps):
        loss = train_one_step()
        guard.step(step + 1, loss=loss)  # last in the loop body
    guard.finish()

Standard library only.  Without the daemon every call does nothing.
"""

from swansong._checkpoint.restore import RestoreError
from swansong._ranks.agreement import CheckpointRequest
from swansong.guard import EXIT_SAVED, Guard, attach

__version__ = "0.1.0"

__all__ = ["EXIT_SAVED", "CheckpointRequest", "Guard", "RestoreError", "attach"]
