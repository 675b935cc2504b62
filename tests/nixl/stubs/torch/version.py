# SPDX-License-Identifier: Apache-2.0
"""A build without CUDA, as NIXL asks for it."""

cuda = None
