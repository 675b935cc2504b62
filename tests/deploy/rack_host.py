# SPDX-License-Identifier: Apache-2.0
"""A host of a pool for the tests of deploy/, in a container or beside the test: its blocks have bytes that follow from their number.

    rack_host.py publish SEED COUNT     publishes, prints "published N" and leaves
    rack_host.py pull SEED COUNT        pulls, compares every byte, prints "verified N of COUNT"
    rack_host.py serve SEED COUNT       publishes, prints "serving", and goes on publishing and pulling until it is ended
"""

import signal
import sys
import threading
import time

import kvbm_cxl

BLOCK_BYTES = 60_000
FULL_TIMEOUT_S = 60
NAMESPACE = dict(model="rack", dtype="uint8", layer_count=1, kv_head_count=1, head_size=1, block_tokens=16, layout="LBHNC")


def content(seed, number):
    """The bytes of a block: of no other one."""
    word = (seed * 1_000_003 + number + 1).to_bytes(8, "little")
    return (word * (BLOCK_BYTES // 8 + 1))[:BLOCK_BYTES]


def key(seed, number):
    """Its key."""
    return kvbm_cxl.chain_key(None, [seed, number])


def publish(cache, model, seed, number):
    """Publishes a block. A pool that is full of blocks of hosts that were just killed has room when these are known to have ended."""
    deadline = time.monotonic() + FULL_TIMEOUT_S
    while True:
        try:
            return cache.publish(model, key(seed, number), content(seed, number))
        except kvbm_cxl.errors.FullError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def pull(cache, model, seed, count):
    """How many of these blocks are there with the right bytes. Wrong ones end the program."""
    found = 0
    for number in range(count):
        into = bytearray(BLOCK_BYTES)
        if cache.pull(model, key(seed, number), into).hit:
            if into != content(seed, number):
                sys.exit(f"block {number} of {seed} has other bytes than were published")
            found += 1
    return found


def main():
    """Does what the command line says."""
    what, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with kvbm_cxl.Pool() as pool, pool.cache() as cache:
        model = kvbm_cxl.Namespace(**NAMESPACE)
        if what in ("publish", "serve"):
            for number in range(count):
                publish(cache, model, seed, number)
            print(f"published {count}", flush=True)
        if what == "pull":
            print(f"verified {pull(cache, model, seed, count)} of {count}", flush=True)
        if what == "serve":
            print("serving", flush=True)
            turn = 0
            while not ended.is_set():
                turn += 1
                publish(cache, model, seed, count + turn % 64)
                pull(cache, model, seed, count)
                pull(cache, model, seed + 1_000_000, 2)
                time.sleep(0.05)
            print("left", flush=True)


if __name__ == "__main__":
    main()
