# SPDX-License-Identifier: Apache-2.0
"""Two hosts, one pool: what one publishes the other pulls, with the right bytes."""

import pytest

pytestmark = pytest.mark.smoke


def test_two_hosts_exchange_blocks(either_pair, seed):
    either_pair.exchange(seed)
