# SPDX-License-Identifier: Apache-2.0
"""Emulators, rigs and fakes for the tests, the demo and the benchmarks."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "training_hooks" / "examples"
TRAINERS = Path(__file__).resolve().parent / "trainers"
"""Training scripts that tests start as processes."""
