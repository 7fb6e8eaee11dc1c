# SPDX-License-Identifier: Apache-2.0
"""The keys of the configuration that say where a bucket is and what is kept in it."""
