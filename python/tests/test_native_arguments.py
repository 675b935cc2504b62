# SPDX-License-Identifier: Apache-2.0
"""What cannot be meant is refused by an exception that says so, before a byte moves, and nothing is lost over it."""

import array
import gc
import weakref

import kvbm_cxl
import numpy
import pytest
from kvbm_cxl import BlockLayout, InvalidError
from pools import CELL_BYTES, chain, namespace, opened, payload

NS = namespace()
KEYS = chain(3)
KEY = KEYS[0]
BLOCKS = numpy.zeros((4, 100), numpy.uint8)
LAYOUT = BlockLayout.of_tensors([BLOCKS])
ADDRESS = BLOCKS.ctypes.data


class FakeTensor:
    """What is asked of a tensor, with answers to choose."""

    def __init__(self, address=ADDRESS, nbytes=100, contiguous=True, device="cpu", shape=(4, 100), strides=(100, 1)):
        self.nbytes, self.shape = nbytes, shape
        self.device = type("Device", (), {"type": device, "index": None})
        self.data_ptr = lambda: address
        self.is_contiguous = lambda: contiguous
        self.stride = lambda dimension: strides[dimension]
        self.element_size = lambda: 1
        self.__class__ = type("Tensor", (FakeTensor,), {"__getitem__": lambda _, place: FakeTensor(address, 100, contiguous, device)})


def read_only():
    view = BLOCKS.view()
    view.flags.writeable = False
    return view


CASES = {
    # Keys and namespaces.
    "short key": (lambda c: c.lookup(NS, b"x" * 15), InvalidError, "16 bytes, not 15"),
    "long key": (lambda c: c.pull(NS, b"x" * 17, bytearray(1)), InvalidError, "16 bytes, not 17"),
    "text as key": (lambda c: c.publish(NS, "x" * 16, b"x"), InvalidError, "not str"),
    "number as key": (lambda c: c.evict(NS, 7), InvalidError, "not int"),
    "one key as keys": (lambda c: c.has(NS, KEY), InvalidError, "put the key in a list"),
    "a bad key among keys": (lambda c: c.lookup_chain(NS, [KEY, b""]), InvalidError, "16 bytes, not 0"),
    "no keys": (lambda c: c.pin_chain(NS, None), TypeError, "iter"),
    "bytes as namespace": (lambda c: c.lookup(bytes(NS), KEY), TypeError, "Namespace"),
    "short namespace": (lambda c: kvbm_cxl.Namespace.from_bytes(b"x"), InvalidError, "16 bytes"),
    "rank outside of its group": (lambda c: namespace(tp_rank=2, tp_size=2), InvalidError, "does not exist"),
    "negative layers": (lambda c: namespace(layer_count=-1), OverflowError, "layer_count"),
    "bad parent": (lambda c: c.publish(NS, KEY, b"x", parent=b"y"), InvalidError, "16 bytes"),
    "negative token": (lambda c: kvbm_cxl.chain_key(None, [-1]), InvalidError, "2\\*\\*32"),
    "large token": (lambda c: kvbm_cxl.chain_key(None, [2**32]), InvalidError, "2\\*\\*32"),
    "text as token": (lambda c: kvbm_cxl.chain_key(None, ["a"]), TypeError, "str"),
    # Memory.
    "no data": (lambda c: c.publish(NS, KEY, b""), InvalidError, "at least one byte"),
    "no parts": (lambda c: c.publish(NS, KEY, []), InvalidError, "at least one byte"),
    "too much data": (lambda c: c.publish(NS, KEY, bytes(CELL_BYTES + 1)), InvalidError, "does not fit the largest cell"),
    "text as data": (lambda c: c.publish(NS, KEY, "text"), InvalidError, "str has no memory"),
    "None as data": (lambda c: c.publish(NS, KEY, None), InvalidError, "NoneType has no memory"),
    "a list in a list": (lambda c: c.publish(NS, KEY, [[b"x"]]), InvalidError, "list has no memory"),
    "data with gaps": (lambda c: c.publish(NS, KEY, BLOCKS[:, ::2]), InvalidError, "not contiguous"),
    "backward data": (lambda c: c.publish(NS, KEY, memoryview(bytes(9))[::-1]), InvalidError, "not contiguous"),
    "into bytes": (lambda c: c.pull(NS, KEY, bytes(9)), InvalidError, "bytes is read-only"),
    "into read-only memory": (lambda c: c.pull(NS, KEY, [bytearray(9), read_only()]), InvalidError, "read-only"),
    "memory of too few blocks": (lambda c: c.publish_all(NS, KEYS, [b"x"] * 2), InvalidError, "3 keys, but memory of 2 blocks"),
    "too few parents": (lambda c: c.publish_all(NS, KEYS, [b"x"] * 3, parents=[None]), InvalidError, "3 keys, but 1 parents"),
    "one of many too large": (lambda c: c.publish_all(NS, KEYS[:2], [b"x", bytes(CELL_BYTES + 1)]), InvalidError, "largest cell"),
    "many into read-only memory": (lambda c: c.pull_all(NS, KEYS[:1], [bytes(9)]), InvalidError, "bytes is read-only"),
    "two blocks into the same memory": (lambda c: c.pull_all(NS, KEYS[:2], [BLOCKS[0], BLOCKS[0, 99:]]), InvalidError, "named twice"),
    "everything cleared by leaving out the namespace": (lambda c: c.clear(), TypeError, "ns"),
    "the same memory twice": (lambda c: c.pull(NS, KEYS[2], [BLOCKS[0], BLOCKS[0]]), InvalidError, "same local byte"),
    "tensor with gaps": (lambda c: c.publish(NS, KEY, FakeTensor(contiguous=False)), InvalidError, "tensor.contiguous"),
    "tensor on a device": (lambda c: c.publish(NS, KEY, FakeTensor(device="cuda")), InvalidError, "lies on a device"),
    "tensor without memory": (lambda c: c.publish(NS, KEY, FakeTensor(address=0)), InvalidError, "has no memory"),
    "tensor beyond all addresses": (lambda c: c.publish(NS, KEY, FakeTensor(address=2**64 - 8)), InvalidError, "address space"),
    # Layouts.
    "no tensors": (lambda c: BlockLayout.of_tensors([]), InvalidError, "at least one tensor"),
    "no blocks": (lambda c: BlockLayout.of_tensors([BLOCKS[:0]]), InvalidError, "at least one part and one block"),
    "no dimension": (lambda c: BlockLayout.of_tensors([numpy.array(7)]), InvalidError, "without dimensions"),
    "text as tensor": (lambda c: BlockLayout.of_tensors(["x"]), InvalidError, "str has no memory"),
    "other numbers of blocks": (lambda c: BlockLayout.of_tensors([BLOCKS, BLOCKS[:3]]), InvalidError, "each block has a part"),
    "tensors on two devices": (
        lambda c: BlockLayout.of_tensors([FakeTensor(), FakeTensor(address=ADDRESS + 400, device="cuda")]),
        InvalidError,
        "all on one device",
    ),
    "blocks that are not first": (lambda c: BlockLayout.of_tensors([BLOCKS.T]), InvalidError, "put blocks first"),
    "gaps within a block": (lambda c: BlockLayout.of_tensors([BLOCKS[:, ::2]]), InvalidError, "put blocks first"),
    "blocks in reverse": (lambda c: BlockLayout.of_tensors([BLOCKS[::-1]]), InvalidError, "in reverse"),
    "a tensor twice": (lambda c: BlockLayout.of_tensors([BLOCKS, BLOCKS]), InvalidError, "overlap"),
    "parts that meet": (lambda c: BlockLayout([(ADDRESS, 100, 60), (ADDRESS + 50, 100, 20)], 4), InvalidError, "overlap"),
    "parts that meet further on": (lambda c: BlockLayout([(ADDRESS, 100, 60), (ADDRESS + 90, 100, 20)], 4), InvalidError, "overlap"),
    "parts of other strides": (lambda c: BlockLayout([(ADDRESS, 100, 10), (ADDRESS + 50, 50, 10)], 4), InvalidError, "overlap"),
    "stride below length": (lambda c: BlockLayout([(ADDRESS, 99, 100)], 2), InvalidError, "stride of 99 overlap"),
    "part at zero": (lambda c: BlockLayout([(0, 100, 100)], 1), InvalidError, "is none"),
    "part of nothing": (lambda c: BlockLayout([(ADDRESS, 100, 0)], 1), InvalidError, "is none"),
    "parts beyond all addresses": (lambda c: BlockLayout([(ADDRESS, 2**62, 100)], 9), InvalidError, "address space"),
    "unknown device": (lambda c: BlockLayout([(ADDRESS, 100, 100)], 1, device="tpu"), InvalidError, "is no device"),
    # Blocks of a layout.
    "a block that is not there": (lambda c: c.publish_blocks(NS, [KEY], LAYOUT, [4]), InvalidError, "block 4 does not exist"),
    "a negative block": (lambda c: c.pull_blocks(NS, [KEY], LAYOUT, [-1]), InvalidError, "block -1 does not exist"),
    "too few blocks": (lambda c: c.publish_blocks(NS, KEYS, LAYOUT, [0, 1]), InvalidError, "3 keys, but 2 blocks"),
    "a block twice": (lambda c: c.pull_blocks(NS, KEYS[:2], LAYOUT, [1, 1]), InvalidError, "named twice"),
    "too many parents": (lambda c: c.publish_blocks(NS, [KEY], LAYOUT, [0], parents=[None, None]), InvalidError, "2 parents"),
    "text as block": (lambda c: c.publish_blocks(NS, [KEY], LAYOUT, ["0"]), TypeError, "int"),
    "pull to read-only blocks": (
        lambda c: c.pull_blocks(NS, [KEY], BlockLayout.of_tensors([read_only()]), [0]),
        InvalidError,
        "read-only",
    ),
    "no layout": (lambda c: c.pull_blocks(NS, [KEY], [BLOCKS], [0]), TypeError, "BlockLayout"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_arguments_of_a_cache(shared, name):
    pool, cache = shared
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=message) as caught:
        call(cache)
    assert not isinstance(caught.value, kvbm_cxl.CxlError) or caught.value.kind in ("invalid", "out_of_range")
    # Nothing is lost over it.
    usage = cache.usage()
    assert cache.pinned() == 0 and usage.ready == 1 and usage.free == usage.owned - 1
    into = bytearray(200)
    assert cache.pull(NS, KEYS[2], into) and bytes(into) == payload(KEYS[2], 200)
    assert pool.slot == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A pool with one block, the third key's."""
    folder = tmp_path_factory.mktemp("arguments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXL_STATE_DIR", str(folder / "state"))
        patch.setenv("CXL_MACHINE_ID", "test")
        spec = f"{folder / 'pool'},size=48M"
        kvbm_cxl.format_pool(spec, cells=f"{CELL_BYTES}:50%")
        with opened(spec) as pool, pool.cache() as cache:
            assert cache.publish(NS, KEYS[2], payload(KEYS[2], 200)) == "stored"
            yield pool, cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fifo"}, "choose one of lru, leaf-lru"),
        ({"low_water_percent": 50, "high_water_percent": 20}, "water marks 50 and 20"),
        ({"service_ms": 0}, "at least a millisecond"),
        ({"copy": "engine=gpu"}, "engine=auto|cpu|dsa"),
        ({"copy": "workers=999"}, "at most 64"),
    ],
)
def test_bad_options_of_a_cache(pool, options, message):
    with pytest.raises(InvalidError, match=message.replace("|", r"\|")):
        pool.cache(**options)
    pool.cache().close()


@pytest.mark.parametrize("given", ["iterator", "cleared list"])
def test_a_layout_keeps_its_tensors(given):
    tensors = [FakeTensor(), FakeTensor(address=ADDRESS + 400)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    if given == "iterator":
        layout = BlockLayout.of_tensors(tensors.pop(0) for _ in range(2))
    else:
        layout = BlockLayout.of_tensors(tensors)
        tensors.clear()
    gc.collect()
    # Counted first: pytest would describe a FakeTensor item by item, and it has no last one.
    kept = [tensor() is not None for tensor in alive]
    assert kept == [True, True], "the layout has the address of a tensor that is gone"
    owned = [owned is tensor() for owned, tensor in zip(layout.owner, alive, strict=True)]
    assert owned == [True, True]
    del layout
    gc.collect()
    kept = [tensor() is not None for tensor in alive]
    assert kept == [False, False]


def test_bad_options_of_a_pool(spec, tmp_path):
    with pytest.raises(InvalidError, match="multiple of heartbeat_ms"):
        kvbm_cxl.Pool(spec, heartbeat_ms=50, suspect_ms=60)
    with pytest.raises(InvalidError, match="neither an absolute path"):
        kvbm_cxl.Pool("pool")
    with pytest.raises(kvbm_cxl.CxlError, match="missing"):
        kvbm_cxl.Pool(str(tmp_path / "missing"))
    (tmp_path / "other").write_bytes(b"not a pool" * (1 << 20))
    with pytest.raises(kvbm_cxl.NotAPoolError):
        kvbm_cxl.Pool(str(tmp_path / "other"))
    with pytest.raises(kvbm_cxl.CxlError):
        kvbm_cxl.Pool(spec, slot=9999)
    with pytest.raises(OverflowError):
        kvbm_cxl.Pool(spec, slot=-1)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, kvbm_cxl.NotAPoolError, "overwrites it only when that is forced"),
        ({"cells": "64K:20%,1M", "force": True}, InvalidError, "each of several cells its share"),
        ({"cells": "1M:0%", "force": True}, InvalidError, "1% to 100%"),
        ({"cells": "", "force": True}, InvalidError, "size"),
        ({"cells": "65:50%", "force": True}, InvalidError, "65"),
        ({"cells": "64K:90%,128K:90%", "force": True}, InvalidError, "bytes"),
        ({"coherence": "none", "force": True}, InvalidError, '"software" or "hardware"'),
    ],
)
def test_bad_formats(spec, options, kind, message):
    before = kvbm_cxl.pool_info(spec)
    with pytest.raises(kind, match=message):
        kvbm_cxl.format_pool(spec, **options)
    assert kvbm_cxl.pool_info(spec) == before, "nothing was written"


def test_formats(spec):
    kvbm_cxl.format_pool(spec, cells="64K:20%,4K:4M", force=True)
    small, large = kvbm_cxl.pool_info(spec)["cells"]
    assert (small["cell_bytes"], large["cell_bytes"]) == (4096, 65536) and small["count"] > 900 and large["count"] > 100
    kvbm_cxl.format_pool(spec, cells="none", force=True)
    assert kvbm_cxl.pool_info(spec)["cells"] == []
    with opened(spec) as pool, pytest.raises(InvalidError, match="no cells"):
        pool.cache()


def test_bad_arguments_of_memory(pool):
    for len_bytes, name, kept, kind in [
        (0, None, True, InvalidError),
        (1 << 40, None, True, InvalidError),
        (64, "x" * 25, True, InvalidError),
        (64, "", True, InvalidError),
        (64, "name", False, InvalidError),
        (-1, None, True, OverflowError),
    ]:
        with pytest.raises(kind):
            pool.allocate(len_bytes, name=name, kept=kept)
    memory = pool.allocate(100, name="name")
    with pytest.raises(kvbm_cxl.ExistsError):
        pool.allocate(100, name="name")
    for offset, len_bytes in [(101, None), (0, 101), (50, 51)]:
        with pytest.raises(InvalidError, match="beyond the memory"):
            memory.flush(offset, len_bytes)
    with pytest.raises(kvbm_cxl.NotFoundError):
        pool.find("other")
    with pool.cache() as cache, pytest.raises(InvalidError, match="lies in the pool itself"):
        cache.publish(NS, KEY, memory)
    with pool.cache() as cache, pytest.raises(InvalidError, match="lies in the pool itself"):
        cache.pull_blocks(NS, [KEY], BlockLayout([(memory.address, 100, 100)], 1, owner=memory), [0])
    memory.free()
    with pytest.raises(kvbm_cxl.ClosedError):
        memory.flush()
    with pytest.raises(BufferError, match="is closed"):
        memoryview(memory)


def test_other_kinds_of_memory_work(cache):
    for number, data in enumerate([array.array("f", [1.5, 2.5]), memoryview(b"abcd"), numpy.float32([[1, 2], [3, 4]]), FakeTensor()]):
        key = kvbm_cxl.chain_key(None, [number])
        assert cache.publish(NS, key, data) == "stored"
        into = bytearray(100)
        result = cache.pull(NS, key, into)
        assert bytes(into[: result.len_bytes]) == (BLOCKS.tobytes()[:100] if number == 3 else bytes(memoryview(data).cast("B")))
