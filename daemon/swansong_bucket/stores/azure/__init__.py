# SPDX-License-Identifier: Apache-2.0
"""Azure Blob Storage."""
