# SPDX-License-Identifier: Apache-2.0
"""A NIXL agent in a host of the lab: the worker of the NIXL tests, asked through lines."""

import lines
import worker

if __name__ == "__main__":
    lines.serve(worker.Worker)
