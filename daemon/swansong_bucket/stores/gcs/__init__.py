# SPDX-License-Identifier: Apache-2.0
"""Google Cloud Storage."""
