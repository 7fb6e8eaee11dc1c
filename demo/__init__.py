# SPDX-License-Identifier: Apache-2.0
"""The main job, live: ``python -m demo`` loses a VM in the middle of a training run, and goes on."""
