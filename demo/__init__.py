# SPDX-License-Identifier: Apache-2.0
"""The main job, live: ``python -m demo`` loses a VM in the middle of a training run, and goes on."""

import sys
from pathlib import Path

# The rig and the emulators are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
