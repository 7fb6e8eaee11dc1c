# SPDX-License-Identifier: Apache-2.0
"""PyTorch state as safetensors files, and resumable data loaders."""
