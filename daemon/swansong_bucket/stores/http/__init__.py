# SPDX-License-Identifier: Apache-2.0
"""The data plane of the stores: HTTP/1.1 over persistent TLS connections."""
