# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, in words for the operator who started the graph."""


class GraphError(Exception):
    """The graph cannot start, or not go on: what failed, where, and what to do."""
