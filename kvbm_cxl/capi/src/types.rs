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

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: $type = $value;)*

        const OWN: &[(&str, u64)] = &[$((stringify!($name), $name as u64)),*];
    };
}

constants! {
    /// Compute and compare a checksum of every block.
    CACHE_CHECKSUMS: u32 = 1;
    /// Pools that a process can have open at a time.
    MAX_POOLS: usize = 64;
    /// Never the offset of a block: the superblock lies there.
    NULL_OFFSET: u64 = 0;
    /// In [`Info`]: not joined.
    NO_SLOT: u32 = u32::MAX;
    /// The deadline that the pool was opened with.
    TIMEOUT_DEFAULT: u64 = u64::MAX;
    /// Map read-only.
    OPEN_READ_ONLY: u32 = 1;
    /// Map only.
    OPEN_NO_JOIN: u32 = 2;
    /// Ask for one slot.
    OPEN_SLOT: u32 = 4;
    /// Format whatever is there.
    FORMAT_FORCE: u32 = 1;
    /// The pool needs no flushes.
    FORMAT_COHERENT: u32 = 2;
    /// Mapped read-only.
    INFO_READ_ONLY: u32 = 1;
    /// This handle is part of a host.
    INFO_JOINED: u32 = 2;
    /// The pool needs no flushes.
    INFO_COHERENT: u32 = 4;
    /// This process writes and fetches lines as one unit.
    INFO_WHOLE_LINES: u32 = 8;
    /// The block ends with its host.
    ALLOC_SCRATCH: u32 = 1;
    /// Open a device for reading only.
    DEVICE_READ_ONLY: u32 = 1;
    /// The device is part of the pool.
    DEVICE_IN_POOL: u32 = 1;
    /// From ordinary memory to the pool.
    COPY_IN: u32 = 0;
    /// From the pool to ordinary memory.
    COPY_OUT: u32 = 1;
    /// From one place of the pool to another.
    COPY_WITHIN: u32 = 2;
    /// From a GPU to the host.
    GPU_TO_HOST: u32 = 0;
    /// From the host to a GPU.
    GPU_FROM_HOST: u32 = 1;
    /// Through pinned buffers of the library.
    GPU_BUFFERED: u32 = 1;
    /// What a host's platform does with lines that a GPU reads and writes: as the environment says. The next values follow.
    GPU_DMA_DEFAULT: u32 = 0;
    /// They go through its caches.
    GPU_DMA_CACHED: u32 = 1;
    /// They do not.
    GPU_DMA_UNCACHED: u32 = 2;
    /// Rebind a bound name.
    PUT_REPLACE: u32 = 1;
}

/// Names of the header's `#define`d numbers, after `CXL_SHM_`, that have another name here, or none.
const OTHERS: &[(&str, u64)] = &[
    ("LINE_BYTES", LINE_BYTES as u64),
    ("MAX_KEY_BYTES", MAX_OBJECT_NAME_BYTES as u64),
    ("LOCK_NONE", 0),
    ("RING_NONE", 0),
    ("DEVICE_NONE", 0),
    ("MAGIC", u64::from_le_bytes(MAGIC)),
    ("GPU_NONE", 0),
    ("GPU_COPY_NONE", 0),
    ("GPU_QUEUED_NONE", 0),
    ("ID_BYTES", 16),
    ("CACHE_LRU", PolicyKind::Lru as u64),
    ("CACHE_LEAF_LRU", PolicyKind::LeafLru as u64),
];

/// Names and values of the header's `#define`d numbers. Every counter that callers count is one of them, under its name in reports.
pub fn constants() -> Vec<(String, u64)> {
    let counted = Stat::ALL.iter().filter(|stat| stat.is_given());
    let counted = counted.map(|stat| (format!("COUNT_{}", stat.name().to_uppercase()), stat.place() as u64));
    let named = OWN.iter().chain(OTHERS).map(|(name, value)| ((*name).to_owned(), *value));
    named.chain(counted).map(|(name, value)| (format!("CXL_SHM_{name}"), value)).collect()
}

macro_rules! structures {
    (@versioned $c_name:literal $name:ident) => {
        impl Versioned for $name {
            const NAME: &'static str = $c_name;
        }
    };
    ($($(#[$doc:meta])* $c_name:literal $name:ident $($versioned:ident)? { $($field:ident: $type:ty,)* })*) => {
        $($(structures!(@$versioned $c_name $name);)?)*

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
    "cxl_shm_options_t" Options versioned {
        struct_size: usize,
        flags: u32,
        slot: u32,
        timeout_ms: u64,
        join_timeout_ms: u64,
        heartbeat_ms: u64,
        suspect_ms: u64,
    }

    /// What a pool is formatted with.
    "cxl_shm_format_options_t" FormatOptions versioned {
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
    "cxl_shm_info_t" Info versioned {
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
    "cxl_shm_cache_options_t" CacheOptions versioned {
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
    "cxl_shm_gpu_options_t" GpuOptions versioned {
        struct_size: usize,
        library: usize,
        register_bytes: u64,
        dma: u32,
        reserved: u32,
    }

    /// Facts about an open GPU.
    "cxl_shm_gpu_info_t" GpuInfo versioned {
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
    "cxl_shm_block_t" Block versioned {
        struct_size: usize,
        handle: u64,
        offset: u64,
        len_bytes: u64,
        ptr: usize,
        owner: u32,
        reserved: u32,
    }

    /// How a lock was acquired.
    "cxl_lock_info_t" LockInfo versioned {
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
mod tests;
