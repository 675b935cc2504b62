// SPDX-License-Identifier: Apache-2.0
//! The structures of the header, and how structures of another version are read and written.

use crate::status::{Failure, Outcome};
use bytemuck::{Pod, Zeroable};
use cxl_pool::cache::policy::PolicyKind;
use cxl_pool::limits::{LINE_BYTES, MAX_OBJECT_NAME_BYTES};
use cxl_pool::media::MAGIC;
use cxl_pool::metrics::stats::Stat;
use std::ffi::c_void;

/// An open pool: a number in the form of a pointer, never followed.
#[repr(C)]
pub struct CxlPool {
    _opaque: [u8; 0],
}

/// Compute and compare a checksum of every block.
pub const CACHE_CHECKSUMS: u32 = 1;
/// `cxl_lock_t`.
pub type CxlLock = u32;
/// `cxl_ring_t`.
pub type CxlRing = u64;
/// `cxl_device_t`.
pub type CxlDevice = u64;
/// `cxl_gpu_t`.
pub type CxlGpu = u64;
/// `cxl_gpu_copy_t`.
pub type CxlGpuCopy = u64;
/// `cxl_gpu_queued_t`.
pub type CxlGpuQueued = u64;
/// `shm_ptr_t`.
pub type ShmPtr = u64;

/// Names and values of the header's `#define`d numbers.
pub const CONSTANTS: &[(&str, u64)] = &[
    ("CXL_SHM_LINE_BYTES", LINE_BYTES as u64),
    ("CXL_SHM_MAX_KEY_BYTES", MAX_OBJECT_NAME_BYTES as u64),
    ("CXL_SHM_MAX_POOLS", MAX_POOLS as u64),
    ("CXL_SHM_LOCK_NONE", 0),
    ("CXL_SHM_RING_NONE", 0),
    ("CXL_SHM_NULL_OFFSET", NULL_OFFSET),
    ("CXL_SHM_NO_SLOT", NO_SLOT as u64),
    ("CXL_SHM_TIMEOUT_DEFAULT", TIMEOUT_DEFAULT),
    ("CXL_SHM_OPEN_READ_ONLY", OPEN_READ_ONLY as u64),
    ("CXL_SHM_OPEN_NO_JOIN", OPEN_NO_JOIN as u64),
    ("CXL_SHM_OPEN_SLOT", OPEN_SLOT as u64),
    ("CXL_SHM_FORMAT_FORCE", FORMAT_FORCE as u64),
    ("CXL_SHM_FORMAT_COHERENT", FORMAT_COHERENT as u64),
    ("CXL_SHM_INFO_READ_ONLY", INFO_READ_ONLY as u64),
    ("CXL_SHM_INFO_JOINED", INFO_JOINED as u64),
    ("CXL_SHM_INFO_COHERENT", INFO_COHERENT as u64),
    ("CXL_SHM_INFO_WHOLE_LINES", INFO_WHOLE_LINES as u64),
    ("CXL_SHM_ALLOC_SCRATCH", ALLOC_SCRATCH as u64),
    ("CXL_SHM_PUT_REPLACE", PUT_REPLACE as u64),
    ("CXL_SHM_DEVICE_NONE", 0),
    ("CXL_SHM_DEVICE_READ_ONLY", DEVICE_READ_ONLY as u64),
    ("CXL_SHM_DEVICE_IN_POOL", DEVICE_IN_POOL as u64),
    ("CXL_SHM_MAGIC", u64::from_le_bytes(MAGIC)),
    ("CXL_SHM_COPY_IN", COPY_IN as u64),
    ("CXL_SHM_COPY_OUT", COPY_OUT as u64),
    ("CXL_SHM_COPY_WITHIN", COPY_WITHIN as u64),
    ("CXL_SHM_GPU_NONE", 0),
    ("CXL_SHM_GPU_COPY_NONE", 0),
    ("CXL_SHM_GPU_QUEUED_NONE", 0),
    ("CXL_SHM_GPU_TO_HOST", GPU_TO_HOST as u64),
    ("CXL_SHM_GPU_FROM_HOST", GPU_FROM_HOST as u64),
    ("CXL_SHM_GPU_BUFFERED", GPU_BUFFERED as u64),
    ("CXL_SHM_GPU_DMA_DEFAULT", GPU_DMA_DEFAULT as u64),
    ("CXL_SHM_GPU_DMA_CACHED", GPU_DMA_CACHED as u64),
    ("CXL_SHM_GPU_DMA_UNCACHED", GPU_DMA_UNCACHED as u64),
    ("CXL_SHM_ID_BYTES", 16),
    ("CXL_SHM_CACHE_CHECKSUMS", CACHE_CHECKSUMS as u64),
    ("CXL_SHM_CACHE_LRU", PolicyKind::Lru as u64),
    ("CXL_SHM_CACHE_LEAF_LRU", PolicyKind::LeafLru as u64),
    ("CXL_SHM_COUNT_NIXL_POSTED", Stat::NixlPosted as u64),
    ("CXL_SHM_COUNT_NIXL_READS", Stat::NixlReads as u64),
    ("CXL_SHM_COUNT_NIXL_WRITES", Stat::NixlWrites as u64),
    ("CXL_SHM_COUNT_NIXL_FAILED", Stat::NixlFailed as u64),
    ("CXL_SHM_COUNT_NIXL_CANCELLED", Stat::NixlCancelled as u64),
    ("CXL_SHM_COUNT_NIXL_DISCONNECTED", Stat::NixlDisconnected as u64),
    ("CXL_SHM_COUNT_NIXL_POOL_READ_BYTES", Stat::NixlPoolReadBytes as u64),
    ("CXL_SHM_COUNT_NIXL_POOL_WRITTEN_BYTES", Stat::NixlPoolWrittenBytes as u64),
    ("CXL_SHM_COUNT_NIXL_LOCAL_BYTES", Stat::NixlLocalBytes as u64),
    ("CXL_SHM_COUNT_NIXL_STAGED_READ_BYTES", Stat::NixlStagedReadBytes as u64),
    ("CXL_SHM_COUNT_NIXL_STAGED_WRITTEN_BYTES", Stat::NixlStagedWrittenBytes as u64),
    ("CXL_SHM_COUNT_NIXL_SERVED_READ_BYTES", Stat::NixlServedReadBytes as u64),
    ("CXL_SHM_COUNT_NIXL_SERVED_WRITTEN_BYTES", Stat::NixlServedWrittenBytes as u64),
    ("CXL_SHM_COUNT_NIXL_VRAM_BYTES", Stat::NixlVramBytes as u64),
    ("CXL_SHM_COUNT_NIXL_OBJECTS_WRITTEN", Stat::NixlObjectsWritten as u64),
    ("CXL_SHM_COUNT_NIXL_OBJECTS_EXISTED", Stat::NixlObjectsExisted as u64),
    ("CXL_SHM_COUNT_NIXL_OBJECTS_READ", Stat::NixlObjectsRead as u64),
    ("CXL_SHM_COUNT_NIXL_OBJECTS_MISSED", Stat::NixlObjectsMissed as u64),
    ("CXL_SHM_COUNT_NIXL_OBJECT_WRITTEN_BYTES", Stat::NixlObjectWrittenBytes as u64),
    ("CXL_SHM_COUNT_NIXL_OBJECT_READ_BYTES", Stat::NixlObjectReadBytes as u64),
    ("CXL_SHM_COUNT_NIXL_FILE_WRITTEN_BYTES", Stat::NixlFileWrittenBytes as u64),
    ("CXL_SHM_COUNT_NIXL_FILE_READ_BYTES", Stat::NixlFileReadBytes as u64),
    ("CXL_SHM_COUNT_NIXL_NOTIFS_SENT", Stat::NixlNotifsSent as u64),
    ("CXL_SHM_COUNT_NIXL_NOTIFS_RECEIVED", Stat::NixlNotifsReceived as u64),
    ("CXL_SHM_COUNT_NIXL_NOTIFS_RESENT", Stat::NixlNotifsResent as u64),
    ("CXL_SHM_COUNT_NIXL_LINKS_MADE", Stat::NixlLinksMade as u64),
    ("CXL_SHM_COUNT_NIXL_LINKS_LOST", Stat::NixlLinksLost as u64),
    ("CXL_SHM_COUNT_NIXL_PEERS_GONE", Stat::NixlPeersGone as u64),
    ("CXL_SHM_COUNT_NIXL_REFUSED", Stat::NixlRefused as u64),
    ("CXL_SHM_COUNT_NIXL_LINKS", Stat::NixlLinks as u64),
    ("CXL_SHM_COUNT_NIXL_STAGING_USED_BYTES", Stat::NixlStagingUsedBytes as u64),
    ("CXL_SHM_COUNT_NIXL_STAGING_BYTES", Stat::NixlStagingBytes as u64),
    ("CXL_SHM_COUNT_NIXL_ENGINES", Stat::NixlEngines as u64),
];

/// Pools that a process can have open at a time.
pub const MAX_POOLS: usize = 64;
/// Never the offset of a block: the superblock lies there.
pub const NULL_OFFSET: u64 = 0;
/// In [`Info`]: not joined.
pub const NO_SLOT: u32 = u32::MAX;
/// The deadline that the pool was opened with.
pub const TIMEOUT_DEFAULT: u64 = u64::MAX;
/// Map read-only.
pub const OPEN_READ_ONLY: u32 = 1;
/// Map only.
pub const OPEN_NO_JOIN: u32 = 2;
/// Ask for one slot.
pub const OPEN_SLOT: u32 = 4;
/// Format whatever is there.
pub const FORMAT_FORCE: u32 = 1;
/// The pool needs no flushes.
pub const FORMAT_COHERENT: u32 = 2;
/// Mapped read-only.
pub const INFO_READ_ONLY: u32 = 1;
/// This handle is part of a host.
pub const INFO_JOINED: u32 = 2;
/// The pool needs no flushes.
pub const INFO_COHERENT: u32 = 4;
/// This process writes and fetches lines as one unit.
pub const INFO_WHOLE_LINES: u32 = 8;
/// The block ends with its host.
pub const ALLOC_SCRATCH: u32 = 1;
/// Open a device for reading only.
pub const DEVICE_READ_ONLY: u32 = 1;
/// The device is part of the pool.
pub const DEVICE_IN_POOL: u32 = 1;
/// From ordinary memory to the pool.
pub const COPY_IN: u32 = 0;
/// From the pool to ordinary memory.
pub const COPY_OUT: u32 = 1;
/// From one place of the pool to another.
pub const COPY_WITHIN: u32 = 2;
/// From a GPU to the host.
pub const GPU_TO_HOST: u32 = 0;
/// From the host to a GPU.
pub const GPU_FROM_HOST: u32 = 1;
/// Through pinned buffers of the library.
pub const GPU_BUFFERED: u32 = 1;
/// What a host's platform does with lines that a GPU reads and writes: as the environment says. The next values follow.
pub const GPU_DMA_DEFAULT: u32 = 0;
/// They go through its caches.
pub const GPU_DMA_CACHED: u32 = 1;
/// They do not.
pub const GPU_DMA_UNCACHED: u32 = 2;
/// Rebind a bound name.
pub const PUT_REPLACE: u32 = 1;

macro_rules! structures {
    ($($(#[$doc:meta])* $c_name:literal $name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Pod, Zeroable)]
            #[allow(missing_docs)] // The header documents the fields.
            pub struct $name { $(pub $field: $type,)* }
        )*

        /// Every structure of the header: its name, its size, and each field's name, offset and size.
        pub const STRUCTURES: &[(&str, usize, &[(&str, usize, usize)])] = &[
            $(($c_name, size_of::<$name>(), &[
                $((stringify!($field), std::mem::offset_of!($name, $field), size_of::<$type>())),*
            ])),*
        ];
    };
}

structures! {
    /// How a pool is opened.
    "cxl_shm_options_t" Options {
        struct_size: usize,
        flags: u32,
        slot: u32,
        timeout_ms: u64,
        join_timeout_ms: u64,
        heartbeat_ms: u64,
        suspect_ms: u64,
    }

    /// What a pool is formatted with.
    "cxl_shm_format_options_t" FormatOptions {
        struct_size: usize,
        flags: u32,
        slots: u32,
        seats: u32,
        locks: u32,
        objects: u32,
        reserved: u32,
        chunk_bytes: u64,
        stripe_bytes: u64,
        cell_bytes: u64,
        cells_percent: u32,
        reserved2: u32,
    }

    /// Facts about an open pool. `base` is an address.
    "cxl_shm_info_t" Info {
        struct_size: usize,
        uuid: [u8; 16],
        pool_incarnation: u64,
        len_bytes: u64,
        data_offset: u64,
        data_bytes: u64,
        chunk_bytes: u64,
        base: usize,
        flags: u32,
        devices: u32,
        slots: u32,
        locks: u32,
        objects: u32,
        slot: u32,
        incarnation: u32,
        process: u32,
        numa_node: i32,
        reserved: u32,
        memory: [u8; 128],
    }

    /// How the cache of a process behaves.
    "cxl_shm_cache_options_t" CacheOptions {
        struct_size: usize,
        flags: u32,
        policy: u32,
        low_water_percent: u32,
        high_water_percent: u32,
        copy_workers: u32,
        reserved: u32,
    }

    /// What a cached block is called.
    "cxl_shm_block_id_t" BlockId {
        name_space: [u8; 16],
        key: [u8; 16],
    }

    /// A stretch of the caller's memory. `ptr` is an address.
    "cxl_shm_piece_t" Piece {
        ptr: usize,
        len_bytes: usize,
    }

    /// An entry of a list of copies. Both are addresses.
    "cxl_shm_copy_t" Copy {
        pool: usize,
        memory: usize,
        len_bytes: usize,
    }

    /// How a GPU is opened. `library` is an address.
    "cxl_shm_gpu_options_t" GpuOptions {
        struct_size: usize,
        library: usize,
        register_bytes: u64,
        dma: u32,
        reserved: u32,
    }

    /// Facts about an open GPU.
    "cxl_shm_gpu_info_t" GpuInfo {
        struct_size: usize,
        registered_bytes: u64,
        to_pool_bytes: u64,
        from_pool_bytes: u64,
        failed: u64,
        device: u32,
        dma: u32,
        refusal: [u8; 256],
        unflushed_bytes: u64,
    }

    /// A stretch to be copied between a GPU and the host. Both are addresses.
    "cxl_shm_gpu_piece_t" GpuPiece {
        device: u64,
        host: usize,
        len_bytes: usize,
    }

    /// A stretch of a GPU's memory, by its address there.
    "cxl_shm_gpu_part_t" GpuPart {
        device: u64,
        len_bytes: usize,
    }

    /// A block of the cache that lies on a GPU. `parent` and `parts` are addresses.
    "cxl_shm_gpu_block_t" GpuBlock {
        name_space: [u8; 16],
        key: [u8; 16],
        parent: usize,
        parts: usize,
        count: usize,
    }

    /// What a caller counted.
    "cxl_shm_count_t" Count {
        counter: u32,
        reserved: u32,
        change: i64,
    }

    /// A reserved or pinned block. `ptr` is an address.
    "cxl_shm_block_t" Block {
        struct_size: usize,
        handle: u64,
        offset: u64,
        len_bytes: u64,
        ptr: usize,
        owner: u32,
        reserved: u32,
    }

    /// How a lock was acquired.
    "cxl_lock_info_t" LockInfo {
        struct_size: usize,
        recovered: u32,
        grant: u32,
    }
}

/// Largest `struct_size` that is believed.
const MAX_STRUCT_BYTES: usize = 4096;

/// A structure whose first member is its size as its user knows it.
pub trait Versioned: Pod {
    /// What it is called in the header.
    const NAME: &'static str;
}

impl Versioned for Options {
    const NAME: &'static str = "cxl_shm_options_t";
}
impl Versioned for FormatOptions {
    const NAME: &'static str = "cxl_shm_format_options_t";
}
impl Versioned for Info {
    const NAME: &'static str = "cxl_shm_info_t";
}
impl Versioned for CacheOptions {
    const NAME: &'static str = "cxl_shm_cache_options_t";
}
impl Versioned for Block {
    const NAME: &'static str = "cxl_shm_block_t";
}
impl Versioned for GpuOptions {
    const NAME: &'static str = "cxl_shm_gpu_options_t";
}
impl Versioned for GpuInfo {
    const NAME: &'static str = "cxl_shm_gpu_info_t";
}
impl Versioned for LockInfo {
    const NAME: &'static str = "cxl_lock_info_t";
}

/// Reads the first member.
///
/// # Safety
/// `at` points to readable memory of at least a `size_t`, aligned or not.
unsafe fn struct_size<T: Versioned>(at: *const c_void) -> Outcome<usize> {
    // SAFETY: as demanded above.
    let size = unsafe { at.cast::<usize>().read_unaligned() };
    if !(size_of::<usize>()..=MAX_STRUCT_BYTES).contains(&size) {
        return Err(Failure::invalid(format!("struct_size of {} is {size}: set it to sizeof the structure", T::NAME)));
    }
    Ok(size)
}

/// Reads a structure of the caller's version: what it lacks is zero, what it has beyond ours has to be zero. Null reads as all zero.
///
/// # Safety
/// `at` is null, or points to a readable structure whose first member is its size.
pub unsafe fn read<T: Versioned>(at: *const T) -> Outcome<T> {
    let mut value = T::zeroed();
    if at.is_null() {
        return Ok(value);
    }
    // SAFETY: not null, so a structure, which begins with its size.
    let size = unsafe { struct_size::<T>(at.cast()) }?;
    // SAFETY: the caller vouches for `size` bytes.
    let given = unsafe { std::slice::from_raw_parts(at.cast::<u8>(), size) };
    let ours = bytemuck::bytes_of_mut(&mut value);
    let known = given.len().min(ours.len());
    ours[..known].copy_from_slice(&given[..known]);
    if given[known..].iter().any(|&byte| byte != 0) {
        return Err(Failure::invalid(format!("{} sets members that this library does not know: use a newer library", T::NAME)));
    }
    Ok(value)
}

/// Checks a structure that is to be written, before anything else is done.
///
/// # Safety
/// `at` is null, or points to a structure whose first member is its size.
pub unsafe fn check_writable<T: Versioned>(at: *const T) -> Outcome<()> {
    if at.is_null() {
        return Err(Failure::invalid(format!("the pointer to {} is NULL", T::NAME)));
    }
    // SAFETY: not null, so a structure, which begins with its size.
    unsafe { struct_size::<T>(at.cast()) }.map(|_| ())
}

/// Fills a structure of the caller's version, apart from its size.
///
/// # Safety
/// `at` passed [`check_writable`], and as many bytes as it says are writable.
pub unsafe fn write<T: Versioned>(at: *mut T, value: &T) -> Outcome<()> {
    const FIRST: usize = size_of::<usize>();
    // SAFETY: checked before.
    let size = unsafe { struct_size::<T>(at.cast_const().cast()) }?;
    let ours = bytemuck::bytes_of(value);
    let known = size.min(ours.len());
    // SAFETY: the caller vouches for `size` bytes; ours are in a value of this function's caller and do not overlap them.
    unsafe {
        std::ptr::copy_nonoverlapping(ours[FIRST..known].as_ptr(), at.cast::<u8>().add(FIRST), known - FIRST);
        std::ptr::write_bytes(at.cast::<u8>().add(known), 0, size - known);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every counter that callers count has its number in the header, under its name in reports.
    #[test]
    fn counters_are_called_what_reports_call_them() {
        let named: Vec<(String, u64)> =
            CONSTANTS.iter().filter_map(|(name, value)| Some((name.strip_prefix("CXL_SHM_COUNT_")?.to_lowercase(), *value))).collect();
        let given = Stat::ALL.iter().filter(|stat| stat.is_given());
        assert_eq!(named, given.map(|stat| (stat.name().to_owned(), stat.place() as u64)).collect::<Vec<_>>());
    }

    #[test]
    fn structures_of_other_versions() {
        let mut longer = [0u64; 16];
        longer[0] = 128;
        longer[1] = 1;
        // SAFETY: 128 bytes, as the first word says; the same below.
        let read_it = |words: &[u64; 16]| unsafe { read(words.as_ptr().cast::<LockInfo>()) };
        assert_eq!(read_it(&longer).unwrap().recovered, 1);
        longer[9] = 1;
        assert!(read_it(&longer).unwrap_err().message.contains("newer library"));
        longer[0] = 12;
        let short = read_it(&longer).unwrap();
        assert_eq!((short.recovered, short.grant), (1, 0));
        for size in [0, 7, 4097, u64::MAX] {
            longer[0] = size;
            assert!(read_it(&longer).unwrap_err().message.contains("struct_size"), "{size}");
        }
    }

    #[test]
    fn only_what_the_caller_has_is_written() {
        let mut words = [u64::MAX; 4];
        words[0] = 12;
        let value = LockInfo { struct_size: 99, recovered: 1, grant: 2 };
        // SAFETY: 32 bytes, of which the first word claims less.
        unsafe { write(words.as_mut_ptr().cast::<LockInfo>(), &value) }.unwrap();
        assert_eq!(words, [12, u64::from(u32::MAX) << 32 | 1, u64::MAX, u64::MAX]);
        words[0] = 24;
        // SAFETY: as above.
        unsafe { write(words.as_mut_ptr().cast::<LockInfo>(), &value) }.unwrap();
        assert_eq!(words, [24, 2 << 32 | 1, 0, u64::MAX]);
        // SAFETY: null is allowed.
        assert!(unsafe { check_writable(std::ptr::null::<Info>()) }.is_err());
    }
}
