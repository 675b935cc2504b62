// SPDX-License-Identifier: Apache-2.0
//! Every bound of the pool in one place. Loops over shared memory are bounded by one of these, waits by a deadline.

/// Bytes of a cache line: the unit of ownership, of publishing and of tearing.
pub const LINE_BYTES: usize = 64;
/// Bytes at the start of every device that hold its superblock; also the largest mapping granule of devdax.
pub const DEVICE_HEADER_BYTES: u64 = 2 << 20;
/// Default stripe over several devices, in bytes.
pub const DEFAULT_STRIPE_BYTES: u64 = 2 << 20;
/// Most devices in one pool.
pub const MAX_DEVICES: usize = 16;
/// Most host slots in one pool.
pub const MAX_SLOTS: usize = 64;
/// Default host slots.
pub const DEFAULT_SLOTS: usize = 16;
/// Most seats of one pool that are claimed, or reserved by the format.
pub const MAX_OPEN_SEATS: usize = 8;
/// Most manager seats in one pool: those, and one for each slot.
pub const MAX_SEATS: usize = MAX_OPEN_SEATS + MAX_SLOTS;
/// Default seats that are claimed or reserved.
pub const DEFAULT_SEATS: usize = 4;
/// Fewest places for machines that claim a seat. A place is used up by the first machine that tries to take it, for the life of the pool.
pub const MIN_PLACES: u64 = 16;
/// Most places for machines that claim a seat. A claim reads one line of each.
pub const MAX_PLACES: u64 = 256;
/// Most locks in one pool.
pub const MAX_LOCKS: usize = 1 << 16;
/// Default locks.
pub const DEFAULT_LOCKS: usize = 256;
/// Hint lines through which a machine without a slot asks for one.
pub const JOINBOXES: usize = 8;
/// Intent lines per slot, one per protected structure.
pub const INTENTS: usize = 8;
/// Most line numbers that one intent line can name.
pub const INTENT_LINES: usize = 10;
/// Fewest cells of the object table that a pool is formatted with by default, and most: enough for the names of 2,048 NIXL engines, since
/// a name goes to one of [`OBJECT_PROBES`] neighbouring cells and only a quarter of the table may be used for that never to fail.
pub const DEFAULT_OBJECTS: usize = 256;
/// See [`DEFAULT_OBJECTS`].
pub const MOST_DEFAULT_OBJECTS: usize = 8192;
/// Bytes of the pool for each cell of the object table by default: with 16 slots, a cell takes 1 KiB.
pub const BYTES_PER_OBJECT: u64 = 256 << 10;
/// Most cells of the object table.
pub const MAX_OBJECTS: usize = 1 << 14;
/// Longest object name, in bytes.
pub const MAX_OBJECT_NAME_BYTES: usize = 24;
/// Cells a lookup of a named object may visit.
pub const OBJECT_PROBES: usize = 16;
/// Default chunk, in bytes: what the allocator hands to a host at a time.
pub const DEFAULT_CHUNK_BYTES: u64 = 2 << 20;
/// Most chunks in one pool.
pub const MAX_CHUNKS: u64 = 1 << 22;
/// Smallest block, in bytes.
pub const MIN_BLOCK_BYTES: u64 = LINE_BYTES as u64;
/// Largest epoch, incarnation or grant number; nothing may wrap, so the code refuses there (LOCKS.md section 11).
pub const MAX_NUMBER: u32 = 1 << 31;
/// How often a line that fails its CRC is fetched again before it counts as bad (a store-and-flush write can be seen torn).
pub const TORN_RETRIES: usize = 4;
/// Processes of one machine that may share a host slot at a time.
pub const MAX_PROCESSES: usize = 64;
/// Local memory of a host that is left to the layers above it, in bytes, on top of [`LOCAL_BYTES_PER_CHUNK`] for each chunk of the pool. If
/// a layer changes its layout but not its length, this changes: memory of another length is emptied before it is used again.
pub const LOCAL_BYTES_ABOVE_HOST: usize = 17 << 10;
/// Local memory of a host per chunk of the pool, in bytes.
pub const LOCAL_BYTES_PER_CHUNK: usize = 4;
/// Cell classes of one pool: sizes of cache cells.
pub const CELL_CLASSES: usize = 4;
/// Most cells of the prefix cache in one pool.
pub const MAX_CELLS: u64 = 1 << 32;
/// Largest cell, in bytes.
pub const MAX_CELL_BYTES: u64 = 1 << 30;
/// Default stripes of the hint table; each has a lock.
pub const DEFAULT_STRIPES: usize = 16;
/// Most stripes of the hint table.
pub const MAX_STRIPES: usize = 1024;
/// Hint lines that an insert or a lookup may visit.
pub const HINT_WINDOW: u64 = 8;
/// Cells that one process may have pinned at a time.
pub const MAX_PINS: u64 = 1 << 16;
