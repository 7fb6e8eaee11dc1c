# SPDX-License-Identifier: Apache-2.0
"""Object stores: one contract, and its implementations for S3, GCS, Azure and directories."""
