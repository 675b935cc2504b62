# SPDX-License-Identifier: Apache-2.0
"""The pool and its prefix cache: what `kvbm_cxl` takes from its compiled part.

Every call may be made from any thread and lets the other threads of the interpreter run while it touches the pool. Every failure is a
`CxlError`; arguments of a wrong type are a TypeError. A handle belongs to the process that opened it: in a fork it raises ForkedError.

Memory that payload is copied from or to ("data", "into") is an object with the buffer protocol (bytes, memoryview, numpy and ctypes arrays),
a tensor (anything with torch's data_ptr, nbytes, is_contiguous and device), or a list or tuple of these, taken in order as one block. It is
used where it lies: contiguous, in memory of the host, outside of the pool, and unchanged by others until the call returns.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias

from typing_extensions import Buffer

Coherence = Literal["software", "hardware"]
Stored = Literal["stored", "exists", "busy"]
"""stored: every host can pull it. exists: it was there, or a host is just writing it. busy: it was there and is about to go."""
Outcome = Literal["stored", "exists", "busy", "no_cell", "no_hint", "over_quota"]
"""As Stored; or why there was no room: no cell free or to be evicted, no place in the hint table, the namespace's quota used up."""
Presence = Literal["there", "coming", "absent"]
"""there: it can be pulled. coming: a host that is not known to be fenced has reserved it and is writing it. absent: neither."""
Reserved = Literal["reserved", "exists", "busy", "no_cell", "no_hint", "over_quota"]
"""As Outcome, of a block whose cell is still to be filled."""
MissReason = Literal[
    "absent", "bad_line", "free", "writing", "evicting", "retiring", "other_key", "namespace", "fenced_owner", "fenced_during", "changed",
    "checksum", "length", "pins_full", "host_fenced", "device_error",
]  # fmt: skip
"""Why a block was not served: docs/operating/metrics.md tells what each means."""

class Tensor(Protocol):
    """What a tensor has to have, as torch's do; torch itself is not needed."""

    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> Any: ...
    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...

class _GpuStream(Protocol):
    """A stream of a GPU, as torch.cuda.Stream; not needed for itself."""

    @property
    def cuda_stream(self) -> int: ...

class _GpuEvent(Protocol):
    """An event of a GPU that was recorded, as torch.cuda.Event."""

    @property
    def cuda_event(self) -> int: ...

Memory: TypeAlias = Buffer | Tensor | Sequence[Buffer | Tensor]

def format_pool(spec: str, *, cells: str = "1M:75%", coherence: Coherence = "software", force: bool = False,
                evict_hosts: bool = False) -> None:
    """Formats the devices of a pool, once in its life.

    spec: devices as CXL_POOL names them: "/dev/dax0.0,/dev/dax1.0", "/dev/shm/kv,size=1G" (the size is of each device; a missing file is
    made), or a part of each, "/dev/dax0.0,offset=64G,size=64G", or with the metadata on another device, "/dev/dax0.0,metadata=/dev/dax1.0".
    cells: sizes of cache cells, each with its share of the pool: "64K:20%,1M:55%", "192K:1G"; a block takes a cell of the smallest
    size that holds it; "none" for a pool without a cache. coherence: "hardware" only where all hosts are cache-coherent to one another.
    force: overwrite data on the devices, unless hosts use the pool there. evict_hosts: also then, once each of them has stopped.

    Raises NotAPoolError (the devices hold something, or cannot be used), SlotInUseError (hosts use the pool; kind "hosts_unseen": a device of
    a pool there is not found, so that its hosts cannot be seen), TimeoutError_ (evicted hosts do not stop), ExistsError (kind "overlap": another
    pool lies on the part, which no option allows), InvalidError (kinds "unaligned", "behind_end", "too_long" of a part that cannot be).
    """

def pool_info(spec: str | None = None) -> dict[str, Any]:
    """What a pool was formatted with, without joining it: uuid, incarnation, coherence, memory (how it is reached), len_bytes, data_bytes,
    metadata_bytes (of device 0, where that carries the metadata alone; else 0), chunk_bytes, slots, locks, objects, cells (list of
    cell_bytes and count), devices (list of name, offset_bytes, len_bytes, numa_node).

    Raises NotAPoolError, InvalidError.
    """

def chain_key(parent: bytes | None, tokens: Sequence[int], extra: bytes | None = None) -> bytes:
    """Key (16 bytes) of a block: a hash over its tokens (numbers below 2**32) and, by its parent's key, all tokens before them.

    parent: key of the block before, None for the first of a sequence. extra: whatever else makes the block differ, such as the hash of an
    image among its tokens. Raises InvalidError.
    """

def checksum(data: Memory) -> int:
    """XXH3-64 with seed 0 of the bytes of memory, as the pool has it of payload."""

class Namespace:
    """How the bytes of blocks were made: a digest of every number that shapes them besides tokens. Blocks of two namespaces never meet.

    Texts are compared byte for byte. first_layer, layer_count, kv_head_count are this worker's. layout: order of the dimensions within a
    block. adapters: LoRA, in the order in which they apply, each with its revision. tenant_salt keeps tenants apart that share a model.
    extra: whatever else shapes the bytes.
    """

    def __new__(
        cls,
        *,
        model: str,
        revision: str = "",
        dtype: str,
        first_layer: int = 0,
        layer_count: int,
        kv_head_count: int,
        head_size: int,
        block_tokens: int,
        layout: str,
        tp_rank: int = 0,
        tp_size: int = 1,
        adapters: Sequence[str] = (),
        tenant_salt: bytes = b"",
        extra: Mapping[str, str] = {},
    ) -> Self: ...
    @classmethod
    def from_bytes(cls, digest: bytes) -> Namespace:
        """The namespace of a digest, as bytes(namespace) gives it (16 bytes)."""

    def __bytes__(self) -> bytes: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...

class BlockLayout:
    """Where the blocks of a paged KV cache lie in memory of this process.

    parts: (address, stride_bytes, len_bytes) each; block i of a part lies at address + i * stride_bytes and is len_bytes long. A block of
    the cache is its parts in order. Parts do not overlap. owner: kept alive as long as the layout, as whatever has the memory must be.
    device: "cpu", or "cuda" or "cuda:N" where the addresses are those of a GPU's memory. Raises InvalidError.
    """

    def __new__(
        cls,
        parts: Sequence[tuple[int, int, int]],
        block_count: int,
        *,
        owner: object | None = None,
        device: str = "cpu",
    ) -> Self: ...
    @classmethod
    def of_tensors(cls, tensors: Iterable[Tensor | Buffer]) -> BlockLayout:
        """Of tensors or arrays with blocks in dimension 0, one part each: shape (block_count, ...), each block contiguous. Keeps
        each of them alive, whatever becomes of what they were given in: owner is a tuple of them."""

    @property
    def block_count(self) -> int: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all parts."""

    @property
    def device(self) -> str: ...
    @property
    def owner(self) -> object | None: ...
    def __len__(self) -> int: ...

class BlockInfo:
    """A block that a lookup found: its cell, its length in bytes, the host slot that owns it."""

    @property
    def cell(self) -> int: ...
    @property
    def len_bytes(self) -> int: ...
    @property
    def owner(self) -> int: ...

class ColdBlock:
    """A block of this process that its evictor would look at soon, as Cache.coldest found it."""

    @property
    def namespace(self) -> Namespace: ...
    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes | None: ...
    @property
    def len_bytes(self) -> int: ...
    def copy(self, into: Memory) -> PullResult:
        """Copies the block, and verifies it. This neither pins nor uses it; a block that was evicted or published again is a miss.
        Raises InvalidError where into is shorter than the block, ClosedError."""

class PullResult:
    """What became of a pull; true when it is a hit. After a miss the destination may hold anything."""

    @property
    def hit(self) -> bool: ...
    @property
    def len_bytes(self) -> int:
        """Length of the block; 0 after a miss."""

    @property
    def reason(self) -> MissReason | None: ...
    def __bool__(self) -> bool: ...

class CellUsage:
    """Cells of this process: all (owned), with nothing in them (free), with a block (ready), held back until it is proven that no other
    host writes to them (quarantined)."""

    @property
    def owned(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def quarantined(self) -> int: ...

class GpuReach:
    """How a GPU reaches the pool: bytes of it that are registered with the driver, why more of it is not (refusal) and why no kernel moves
    bytes (no_kernels), if so, and what the flushes around its copies are (dma: "cached" or "uncached")."""

    @property
    def device(self) -> int: ...
    @property
    def registered_bytes(self) -> int: ...
    @property
    def refusal(self) -> str | None: ...
    @property
    def no_kernels(self) -> str | None: ...
    @property
    def dma(self) -> str: ...

class Pins:
    """Blocks that stay until this is released: by release(), by the end of a with statement, by closing the cache, or with the object.

    They stay as long as this host is not fenced; a pull verifies its block in any case.
    """

    def __len__(self) -> int:
        """Blocks pinned: the leading ones of the chain."""

    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class Reservations:
    """Blocks reserved in the pool. Those neither published nor released are abandoned when this is dropped, or the cache is
    closed."""

    @property
    def outcomes(self) -> list[Reserved]:
        """What became of each block, in the order of reserve_blocks."""

    def publish(
        self, layout: BlockLayout, block_ids: Iterable[int], *, after: _GpuStream | _GpuEvent | None = None
    ) -> list[Outcome | Literal["given_up"]]:
        """Fills the cells from block_ids[i] of the layout, one for each key of reserve_blocks, and commits them, in batches of 64 as
        publish_blocks does, whose errors it has; after an error those that were not committed are given up. One outcome each; given_up:
        of a block that was released, or published by an earlier call."""

    def release(self) -> None:
        """Abandons unpublished blocks."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class Queued:
    """Copies of GPU blocks that run while the caller continues; returned by queue_publish and queue_pull. If it is dropped, they still run,
    and publishes are committed. Until the end the cache keeps the layout, and so its `owner` or its tensors."""

    def done(self) -> bool:
        """Whether all of it has ended, well or not. Does not wait."""

    def wait(self, timeout_ms: int | None = None) -> list[Outcome] | list[MissReason | None]:
        """Waits for the end, None = as long as calls of the pool may take, and says what became of each block, as publish_blocks and
        pull_blocks do. Raises the error of the first block that has one (DeviceError, FencedError, TimeoutError_ of a copy that did not end,
        ClosedError where the cache was closed before: nothing was committed then); others may be stored. TimeoutError_ while it has not
        ended, too: done() tells."""

    def hold(self, stream: _GpuStream | int) -> None:
        """Makes a stream wait for the copies: its later work may overwrite the memory of a publish."""

class Event:
    """What happened to a block of this process.

    kind: "stored", by this process, or taken over by it from one that is gone; "removed", because a process asked for it, or it can no
    longer be vouched for; "evicted", to make room; "cleared", a whole namespace; "lost": `lost` events before the next one were dropped
    because the program did not take them in time: take a new snapshot.
    """

    @property
    def kind(self) -> Literal["stored", "removed", "evicted", "cleared", "lost"]: ...
    @property
    def sequence(self) -> int | None:
        """Rises by one with each event of a cache."""

    @property
    def namespace(self) -> Namespace | None: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def parent(self) -> bytes | None: ...
    @property
    def cell(self) -> int | None: ...
    @property
    def len_bytes(self) -> int | None: ...
    @property
    def lost(self) -> int: ...

class Events(Iterator[Event]):
    """A listener. Iterating waits for events until the cache is closed."""

    def poll(self, timeout_ms: int = 0) -> list[Event]:
        """Events since the last call; waits up to timeout_ms for the first one. Raises ClosedError once the cache is closed and all
        earlier events were returned."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> Event: ...

class Changes:
    """What changed between two looks of a Watch. Keys of 16 bytes, in no order."""

    @property
    def added(self) -> list[bytes]:
        """There now, with all companions, and not before."""

    @property
    def removed(self) -> list[bytes]:
        """Of these it is no longer so."""

    @property
    def alone(self) -> list[bytes]:
        """Blocks of this host that were without a companion at this look and the one before."""

class Watch:
    """A memory of which blocks of a namespace were there, of all hosts. It keeps nothing in the pool, nor the cache open."""

    def look(self) -> Changes:
        """Changes since the last look; at the first one everything is new. Blocks that came and went in between are left out.

        Reads a line for each cell in use of the sizes that are watched, and looks up every block in every companion. Raises ClosedError.
        """

class TraceRecorder:
    """A record of requests and publishes of this process, for `cxlctl record` and `cxl-plan`: a file of block ids, which are hashes of a
    secret salt and the blocks' names. No call waits for the file; what does not fit is dropped and counted. It needs no pool."""

    def __new__(cls, directory: str, salt: str, *, block_tokens: int, max_bytes: int = ...) -> Self:
        """Makes a file in directory. salt: the same on all hosts whose files are to be merged. max_bytes: the longest file, at least 1024,
        a gibibyte where it is not given. Raises InvalidError, and SystemError_ where there can be no file."""

    def asked(self, ns: Namespace, keys: Iterable[bytes], tokens: int, found_tokens: int) -> None:
        """A request: keys of its whole blocks from the first one on, its tokens, and those of them that were found."""

    def published(self, ns: Namespace, keys: Iterable[bytes]) -> None:
        """Blocks that were published."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Entries so far: in the file, dropped because the queue or the file was full, and lost because writing failed."""

    @property
    def last_error(self) -> str | None:
        """Why entries could not be written, the last time that this was so."""

    @property
    def path(self) -> str:
        """The file."""

    def close(self) -> None:
        """Writes what waits, and ends the file. May be called again."""

class Cache:
    """The prefix cache, as one process uses it. Pool.cache() opens it."""

    def publish(self, ns: Namespace, key: bytes, data: Memory, *, parent: bytes | None = None) -> Stored:
        """Publishes a block. key: 16 bytes. parent: key of the block before it in its chain, for eviction policies and listeners.

        Raises FullError when there is no room (kinds no_cell, no_hint, over_quota), InvalidError when it is larger than the largest cell,
        FencedError.
        """

    def pull(self, ns: Namespace, key: bytes, into: Memory) -> PullResult:
        """Copies a block into memory, which may be longer than the block, and verifies it. Raises InvalidError when it is shorter."""

    def lookup(self, ns: Namespace, key: bytes) -> BlockInfo | None:
        """Whether a block is there. Advice: it may go right afterwards."""

    def lookup_chain(self, ns: Namespace, keys: Iterable[bytes]) -> int:
        """How many leading blocks of a chain are there. Advice, as lookup."""

    def has(self, ns: Namespace, keys: Iterable[bytes]) -> list[bool]:
        """Which of several blocks are there, chained or not. Advice, as lookup."""

    def presence(self, ns: Namespace, keys: Iterable[bytes]) -> list[Presence]:
        """Which of several blocks are there, or on their way; one answer each, in order. Advice, as lookup: a block that is coming may be
        given up. A host that dies while it writes one is found out within suspect_ms, and the block is absent then."""

    def watch(self, ns: Namespace, len_bytes: int | None = None, *, companions: Sequence[Namespace] = ()) -> Watch:
        """Begins to watch the blocks of a namespace, of every host, that lie in cells of the size that a block of len_bytes takes;
        None: those of all sizes. Events of other hosts' blocks are what changes between two looks. A block counts while there is one of the
        same key in every companion. Raises InvalidError for a length that no block can have."""

    def pin_chain(self, ns: Namespace, keys: Iterable[bytes]) -> Pins:
        """Pins the leading blocks of a chain that are there. Raises FullError when this process has too many pins (65536)."""

    def pin_all(self, ns: Namespace, keys: Iterable[bytes]) -> list[Pins | None]:
        """Pins several blocks, chained or not: pins of its own for each that is there, None for the others. Raises FullError as pin_chain,
        and then pins none."""

    def publish_all(
        self, ns: Namespace, keys: Iterable[bytes], data: Iterable[Memory], *, parents: Iterable[bytes | None] | None = None
    ) -> list[Outcome]:
        """Publishes blocks from wherever they lie: data[i], of any length, under keys[i]; one outcome each, in order. Batches as those of
        publish_blocks. Raises InvalidError when one is larger than the largest cell."""

    def pull_all(self, ns: Namespace, keys: Iterable[bytes], into: Iterable[Memory]) -> list[PullResult]:
        """Pulls blocks to wherever they belong: keys[i] into into[i], which may be longer than the block; one that is shorter is a miss
        ("length"). Raises InvalidError, before anything is written, for memory that is named twice."""

    def publish_blocks(
        self,
        ns: Namespace,
        keys: Iterable[bytes],
        layout: BlockLayout,
        block_ids: Iterable[int],
        *,
        parents: Iterable[bytes | None] | None = None,
        after: _GpuStream | _GpuEvent | None = None,
    ) -> list[Outcome]:
        """Publishes blocks from where they lie: block_ids[i] of the layout under keys[i]; one outcome each, in order.

        Blocks are reserved, copied and committed in batches of 64, so that misses, fences and flushes overlap and the first are there for
        others before the last are copied. After an error blocks of earlier batches are there, those of its own batch are not.

        The GPU copies its blocks on a stream of ours, after the work that stream `after` has, or that event `after` marks, and the call
        returns when the copies have ended; None = the caller has seen the end of the work that wrote them. Raises
        NotFoundError when there is no CUDA driver, DeviceError ("gpu") when the GPU fails, TimeoutError_ after 10 s.
        """

    def reserve_blocks(
        self, ns: Namespace, keys: Iterable[bytes], layout: BlockLayout, *, parents: Iterable[bytes | None] | None = None
    ) -> Reservations:
        """The first step of publish_blocks by itself: reserves a cell for each block, after which every host sees that the block is coming
        (presence), and no other process publishes it. Takes a few microseconds a block; what it reserves waits to be filled, or given up."""

    def pull_blocks(
        self,
        ns: Namespace,
        keys: Iterable[bytes],
        layout: BlockLayout,
        block_ids: Iterable[int],
        *,
        after: _GpuStream | _GpuEvent | None = None,
    ) -> list[MissReason | None]:
        """Pulls blocks to where they belong: keys[i] to block_ids[i] of the layout, each named once; None for a verified hit, else why not.

        A missed block's memory may hold anything. A block of another length than the layout's is a miss ("length"). Blocks of a GPU come
        after what `after` says, as in publish_blocks, and are there for every stream when the call returns. After TimeoutError_ a GPU may
        still write to them: use their memory for nothing else before is_settled.
        """

    def queue_publish(
        self,
        ns: Namespace,
        keys: Iterable[bytes],
        layout: BlockLayout,
        block_ids: Iterable[int],
        *,
        stream: _GpuStream | int,
        parents: Iterable[bytes | None] | None = None,
        wait_ms: int | None = None,
    ) -> Queued:
        """As publish_blocks for blocks of a GPU, and returns when the GPU has been given the copies. They come after what `stream` was given
        before (a stream as torch's, or its number: CUstream); the blocks are committed when they have ended, by a thread of the cache.

        Until then the memory is not written, but by work of streams that Queued.hold has ordered. The bytes under way have a bound
        (256 MiB); a call above it waits for earlier ones at most wait_ms (None = as long as calls of the pool may take), then
        raises FullError; InvalidError where it never fits. Where a CPU has a part in the copies (the pool is not registered, or checksums
        are on and no kernel takes them) the call waits for them. Raises as publish_blocks for what keeps it from beginning.
        """

    def queue_pull(
        self,
        ns: Namespace,
        keys: Iterable[bytes],
        layout: BlockLayout,
        block_ids: Iterable[int],
        *,
        stream: _GpuStream | int,
        wait_ms: int | None = None,
    ) -> Queued:
        """As pull_blocks for blocks of a GPU, and returns when the GPU has the copies. They run after the earlier work of `stream`, and its
        later work runs after them: kernels that use the blocks may be launched at once.

        Blocks are verified after the copies: until wait() has returned None for a block, such kernels may have read anything. Use none of
        their results before (sample no token, publish no block). Bound, waits and errors are those of queue_publish.
        """

    def open_gpu(self, device: int) -> GpuReach:
        """Opens a GPU, by its number in CUDA, before the first block of it, and registers the pool for it: that may
        take minutes, and copies may be made meanwhile. Raises NotFoundError (no driver, too old, or no such GPU), DeviceError."""

    def is_settled(self, timeout_ms: int = 0) -> bool:
        """Whether nothing of a call that raised TimeoutError_ can still happen to the memory that it named; waits for that so long."""

    def evict(self, ns: Namespace, key: bytes) -> bool:
        """Evicts a block of any owner: true when it was this process's and is gone, else its owner is asked to. Pinned blocks stay.

        A host asks for one thing at a time, the others wait for some tens of milliseconds each, and a request can be lost: look whether
        the block is gone, and ask again."""

    def evict_all(self, ns: Namespace, keys: Iterable[bytes]) -> list[bool]:
        """Evicts several blocks of any owner: this process's in one pass, those of others by a request each, as evict(). Tells of each
        whether it is gone now: a pinned one stays, one of another process may go a little later."""

    def clear(self, ns: Namespace) -> int:
        """Evicts the blocks of a namespace, of every host, as far as they are not pinned: those of other processes by a request, as
        evict(). Returns how many were this process's."""

    def clear_all(self) -> int:
        """Evicts the blocks of every namespace, also those of other users of the pool, as clear() does those of one."""

    def coldest(self, limit: int) -> list[ColdBlock]:
        """Up to limit blocks of this process of each size of cells, first the one that its evictor would look at first; none of a size of
        which twice high_water_percent of this process's cells are free. The order of eviction stays."""

    def usage(self) -> CellUsage: ...
    def pinned(self) -> int:
        """Blocks that this process has pinned."""

    def metrics(self) -> dict[str, Any]:
        """What this process counted: numbers by name, by name and label's value where there is a label, NAME_count and NAME_sum (seconds or
        bytes) of histograms. docs/operating/metrics.md tells what each means."""

    def prometheus(self) -> str:
        """The same as text for Prometheus (version 0.0.4)."""

    def subscribe(self, capacity: int | None = None) -> Events:
        """Listens to what happens to this process's blocks from now on (those of all hosts: watch); capacity: events that wait before the oldest are lost (4096)."""

    def close(self) -> None:
        """Waits for calls under way, releases every pin, leaves the blocks to other processes. Later calls raise ClosedError.

        Raises TimeoutError_ when calls do not end in time: it closes with the last of them.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None: ...

class PoolMemory(Buffer):
    """Memory of the pool, mapped in this process, writable: torch.frombuffer(memory, dtype=...), numpy.frombuffer(memory), memoryview().

    Stores reach other hosts by flush(); call flush() before reading their stores. Unnamed memory is freed
    with the object; named memory stays until free(). The host stays joined as long as the program has memory of it.
    """

    @property
    def address(self) -> int: ...
    @property
    def offset(self) -> int:
        """Offset in the pool, the same on every host."""

    @property
    def len_bytes(self) -> int: ...
    @property
    def name(self) -> str | None: ...
    def __len__(self) -> int: ...
    def flush(self, offset: int = 0, len_bytes: int | None = None) -> None:
        """Writes this host's cached lines of it back and drops them, so that the next read comes from memory."""

    def free(self) -> None:
        """Gives it back, and its name. The program must have dropped all views and tensors of it: InvalidError where that can be seen.
        Raises NotFoundError where its name is gone or stands for other memory: it was given back before, and nothing is done. After
        FencedError or TimeoutError_ it is to be called again."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Pool:
    """A pool that this process has joined as part of its host; a thread of its own keeps it alive there.

    spec: as of format_pool; None = the environment variable CXL_POOL. slot: host slot to ask for; a wish. join_timeout_ms: deadline of
    joining and closing (3 suspect_ms + 5 s, at least 10 s, so that managers that die do not fail it). heartbeat_ms (50), suspect_ms
    (CXL_SUSPECT_MS of the environment, else 1000): a host whose heartbeat did not move for suspect_ms is taken for dead.

    Raises NotAPoolError, SlotInUseError, TimeoutError_, InvalidError.
    """

    def __new__(
        cls,
        spec: str | None = None,
        *,
        slot: int | None = None,
        join_timeout_ms: int | None = None,
        heartbeat_ms: int | None = None,
        suspect_ms: int | None = None,
    ) -> Self: ...
    @property
    def spec(self) -> str:
        """Its devices."""

    @property
    def uuid(self) -> str: ...
    @property
    def coherence(self) -> Coherence: ...
    @property
    def memory(self) -> str:
        """What the memory is reached with."""

    @property
    def cell_bytes(self) -> list[int]:
        """Sizes of cells in bytes, smallest first; the last is the largest block."""

    @property
    def slot(self) -> int:
        """This host's slot."""

    def bind_worker(self) -> None:
        """Lets the calling thread run only where CXL_CPUS says that workers do ("workers=..."); nothing where it does not say.

        Raises InvalidError, ClosedError.
        """

    @property
    def incarnation(self) -> int:
        """This host's incarnation now."""

    @property
    def suspect_ms(self) -> int:
        """Silence after which a host counts as suspected, in milliseconds: `suspect_ms` of the constructor, or CXL_SUSPECT_MS."""

    @property
    def last_error(self) -> str | None:
        """The latest error that a background thread of this pool met, or None; a later round that went well does not clear it. Each error
        is logged as a warning of logger `kvbm_cxl`, and counted by `cxl_host_failed_rounds_total`."""

    def cache(
        self,
        *,
        policy: Literal["lru", "leaf-lru"] = "lru",
        checksums: bool = True,
        low_water_percent: int | None = None,
        high_water_percent: int | None = None,
        quotas: int | Mapping[Namespace, int] | None = None,
        lock_timeout_ms: int | None = None,
        service_ms: int | None = None,
        upkeep_ms: int | None = None,
        remembered_keys: int | None = None,
        copy: str | None = None,
        dma: Literal["cached", "uncached"] | None = None,
        register_bytes: int | None = None,
    ) -> Cache:
        """Opens the cache of this process; one at a time for each Pool.

        policy: order of eviction. checksums: of every payload, computed as it is copied in, compared as it is copied out. The background
        evictor begins below low_water_percent (5) of free cells and ends at high_water_percent (10). quotas: bytes of this
        process's cells that a namespace may take: a number for each namespace, or a number for some; None: no bound.
        lock_timeout_ms: longest wait for a lock (3 suspect_ms + 5 s of the pool, at least 10 s). copy: as CXL_COPY, for example
        "engine=cpu,workers=3".

        Of GPUs, where None is what the environment says (CXL_CUDA_...): dma: "uncached" leaves out the flushes around a GPU's copies,
        which is right only where the pool's memory is uncacheable on this host and DDIO is off. register_bytes: how much of the pool, from
        its beginning, open_gpu registers with the driver (all); copies register the rest when they first need it. What the driver refuses
        goes through pinned buffers.

        Raises InvalidError (no cells in the pool, or numbers that cannot be), ExistsError, FencedError.
        """

    def allocate(self, len_bytes: int, *, name: str | None = None, kept: bool | None = None) -> PoolMemory:
        """Allocates memory of the pool; its content is undefined. name (at most 24 bytes): under which every host finds it. kept: it outlives
        this process, until it is given back; memory with a name always does, other memory only if the program hands its offset on (None, the
        default: no). Memory registered with NIXL is kept from then on. Raises FullError, ExistsError, InvalidError."""

    def find(self, name: str) -> PoolMemory:
        """The memory that a name stands for. Raises NotFoundError."""

    def map_ahead(self, *, timeout_ms: int = 10_000) -> int:
        """Enters the pool's memory into this process's page tables, so that the first copy of a block does not wait for that; the bytes
        entered. With 4 KiB pages a GiB takes some 70 ms, or 400 where no host has touched it yet, with a device's pages next to nothing; it
        ends after timeout_ms. 0 of a file that has not got its memory yet, or lies on a disk."""

    def prometheus(self) -> str:
        """What every host of the pool has told of itself, as text for Prometheus under the names of `cxlctl exporter`; a second old."""

    def close(self) -> None:
        """Closes the cache, waits for calls under way and leaves the pool; while the program has memory of it, the last of that leaves.

        Raises TimeoutError_ when calls do not end in time: it closes with the last of them.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None: ...
