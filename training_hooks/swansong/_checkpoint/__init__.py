# SPDX-License-Identifier: Apache-2.0
"""Writing and loading checkpoints in staging."""
