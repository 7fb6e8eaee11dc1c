# SPDX-License-Identifier: Apache-2.0
"""The configuration: one TOML file into frozen values."""
