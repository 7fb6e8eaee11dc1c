# SPDX-License-Identifier: Apache-2.0
"""S3 and the stores that speak its protocol."""
