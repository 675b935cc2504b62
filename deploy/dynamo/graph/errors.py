# SPDX-License-Identifier: Apache-2.0
"""Errors of the launcher, for the operator who started the graph."""


class GraphError(Exception):
    """The graph cannot start or continue: what failed, where, and what to do."""
