# SPDX-License-Identifier: Apache-2.0
"""The report of a run: facts from the bucket, and their pictures as text and as HTML."""
