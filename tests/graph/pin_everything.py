# SPDX-License-Identifier: Apache-2.0
"""Another host, which pins every block of a pool until its standard input ends.

    pin_everything.py POOL      standard input: a namespace and a key in each line, then an empty line; says how many it has pinned
"""

import sys

from kvbm_cxl import Namespace, Pool


def main(spec):
    wanted = {}
    for line in iter(sys.stdin.readline, "\n"):
        namespace, key = line.split()
        wanted.setdefault(namespace, []).append(bytes.fromhex(key))
    with Pool(spec) as pool:
        cache = pool.cache()
        held = [cache.pin_chain(Namespace.from_bytes(bytes.fromhex(namespace)), keys) for namespace, keys in wanted.items()]
        print(sum(len(pins) for pins in held), flush=True)
        sys.stdin.readline()
        for pins in held:
            pins.release()
        cache.close()


if __name__ == "__main__":
    main(sys.argv[1])
