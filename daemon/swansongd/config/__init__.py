# SPDX-License-Identifier: Apache-2.0
"""Read the configuration: one TOML file becomes frozen values."""
