# SPDX-License-Identifier: Apache-2.0
"""Sources of notices: AWS, GCP, logind, fixed deadlines, operators."""
