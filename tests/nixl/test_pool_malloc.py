# SPDX-License-Identifier: Apache-2.0
"""libcxl_malloc.so in front of the C library: large aligned buffers of a program lie in the pool, all others do not."""

import itertools
import json
import os
import subprocess
import sys

import pool_api
import pytest
import wheels

HOOK = wheels.ROOT / "target" / "nixl_plugin" / "libcxl_malloc.so"
MIB = 1 << 20

# Allocates buffers of the given sizes one after the other; `fill` fills them, `keep` waits for a line before it ends, `again` frees and
# allocates each so many times. Tells of each buffer its address (0: none), the status, which file is mapped there, how many values it has.
PROGRAM = r"""
import ctypes, json, sys
asked = json.loads(sys.argv[1])
c = ctypes.CDLL(None)

def allocate(alignment, len_bytes):
    address = ctypes.c_void_p()
    status = c.posix_memalign(ctypes.byref(address), ctypes.c_size_t(alignment), ctypes.c_size_t(len_bytes))
    return address.value or 0, status

def mapped(address):
    for line in open("/proc/self/maps"):
        words = line.split()
        low, high = (int(end, 16) for end in words[0].split("-"))
        if low <= address < high:
            return words[5] if len(words) > 5 else ""

told = []
for alignment, len_bytes in asked["buffers"]:
    address, status = allocate(alignment, len_bytes)
    for _ in range(asked.get("again", 0)):
        c.free(ctypes.c_void_p(address))
        address, status = allocate(alignment, len_bytes)
    if address and "fill" in asked:
        ctypes.memset(address, asked["fill"], len_bytes)
    held = (ctypes.c_ubyte * len_bytes).from_address(address) if address else b""
    told.append([address, status, mapped(address), len(set(bytes(held[:4096]) + bytes(held[-4096:]))) if address else 0])
print(json.dumps(told), flush=True)
if asked.get("keep"):
    sys.stdin.readline()
"""


@pytest.fixture
def pool(plugin, tmp_path_factory, tmp_path, monkeypatch):
    """A formatted pool of 64 MiB, and this process a host of it."""
    monkeypatch.setenv("CXL_MACHINE_ID", "malloc-0")
    monkeypatch.setenv("CXL_STATE_DIR", str(tmp_path / "state-0"))
    path = tmp_path / "pool"
    pool_api.format_pool(f"{path},size=64M")
    return path


def environment(pool, tmp_path, **more):
    """That of a program with the library in front, on a host of its own."""
    own = {"LD_PRELOAD": str(HOOK), "CXL_POOL": str(pool), "CXL_MACHINE_ID": "malloc-1", "CXL_STATE_DIR": str(tmp_path / "state-1")}
    return {**os.environ, **own, **more}


def run(env, **asked):
    """What the program tells of each of its buffers, and what was said on standard error."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(asked)], env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


def test_large_buffers_lie_in_the_pool_and_small_ones_do_not(pool, tmp_path):
    sizes = [(64, MIB), (16 * MIB, MIB), (64, MIB), (16 * MIB, MIB), (1 << 16, 3 * MIB + 5), (8, MIB - 1), (4096, 4096)]
    told, said = run(environment(pool, tmp_path), buffers=sizes, fill=0x5A)
    assert [status for _, status, _, _ in told] == [0] * 7 and not said
    assert [mapped == str(pool) for _, _, mapped, _ in told] == [True] * 5 + [False] * 2
    assert all(address % alignment == 0 for (address, *_), (alignment, _) in zip(told, sizes, strict=True))
    # Filled to both ends, one beside the other.
    assert [values for *_, values in told] == [1] * 7
    places = sorted((address, address + len_bytes) for (address, *_), (_, len_bytes) in zip(told, sizes, strict=True))
    assert all(end <= following for (_, end), (following, _) in itertools.pairwise(places))


def test_the_least_size_can_be_set(pool, tmp_path):
    told, _ = run(environment(pool, tmp_path, CXL_MALLOC_MIN_BYTES="4096"), buffers=[(64, 4096), (64, 4095)])
    assert [mapped == str(pool) for _, _, mapped, _ in told] == [True, False]


def test_what_is_freed_is_used_again(pool, tmp_path):
    # More than half of the pool, of which two would not fit; and some that lie behind the beginning of their blocks.
    for buffers in [(4096, 40 * MIB)], [(64, 2 * MIB), (16 * MIB, 2 * MIB), (16 * MIB, 2 * MIB)]:
        told, said = run(environment(pool, tmp_path), buffers=buffers, again=40)
        assert [(status, mapped) for _, status, mapped, _ in told] == [(0, str(pool))] * len(buffers) and not said


@pytest.mark.parametrize(
    ("pool_is", "named"),
    [("full", "no 67108864 bytes of the pool"), ("missing", "cannot be opened"), ("unnamed", "cannot be opened")],
)
def test_without_room_in_a_pool_there_is_no_buffer(pool, tmp_path, pool_is, named):
    env = environment(tmp_path / "none" if pool_is == "missing" else pool, tmp_path)
    if pool_is == "unnamed":
        del env["CXL_POOL"]
    told, said = run(env, buffers=[(4096, 64 * MIB), (4096, 4096)])
    assert told[0][:2] == [0, 12] and named in said
    assert told[1][1] == 0


def test_an_alignment_that_is_none_is_refused(pool, tmp_path):
    told, _ = run(environment(pool, tmp_path), buffers=[(3, 2 * MIB), (4, 2 * MIB), (48, 2 * MIB)])
    assert [status for _, status, _, _ in told] == [22] * 3


def test_what_memset_stored_reaches_other_hosts(pool, tmp_path):
    """The emulator keeps a host's stores to itself until they are flushed."""
    env = environment(pool, tmp_path, CXL_COHERENCE="emulated:seed=5,noise=0")
    command = [sys.executable, "-c", PROGRAM, json.dumps({"buffers": [[4096, 2 * MIB]], "fill": 0xA7, "keep": True})]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert json.loads(program.stdout.readline())[0][1] == 0
        in_memory = pool.read_bytes().count(bytes([0xA7]) * 4096)
        program.stdin.write("\n")
    assert program.returncode == 0
    assert in_memory == 2 * MIB // 4096
