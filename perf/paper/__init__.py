# SPDX-License-Identifier: Apache-2.0
"""The papers' figures and tables beside ours: `perf/papers.py` runs it."""
