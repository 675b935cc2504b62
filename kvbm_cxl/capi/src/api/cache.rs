// SPDX-License-Identifier: Apache-2.0
//! The prefix cache.

use super::{items, writable};
use crate::cache::CacheMember;
use crate::handle;
use crate::pool::OpenPool;
use crate::status::{Failure, Outcome, Status, status_of};
use crate::types::{self, Block, BlockId, CacheOptions, CxlPool, Piece};
use cxl_pool::cache::{BlockKey, Namespace, NamespaceFields, chain};
use std::ffi::{c_char, c_int, c_void};

fn with_cache<T>(pool: *mut CxlPool, work: impl FnOnce(&CacheMember) -> Outcome<T>) -> Outcome<T> {
    with_open_cache(pool, |_, cache| work(cache))
}

pub(super) fn with_open_cache<T>(pool: *mut CxlPool, work: impl FnOnce(&OpenPool, &CacheMember) -> Outcome<T>) -> Outcome<T> {
    handle::with(pool, |pool| {
        pool.as_member(|member| match &*member.cache.load() {
            Some(cache) => work(pool, cache),
            None => Err(Failure::new(Status::E_CLOSED, "the cache of this pool is not open: call cxl_shm_cache_open")),
        })
    })
}

/// The block that `id` names.
///
/// # Safety
/// `id` is null or readable.
unsafe fn id_at(id: *const BlockId) -> Outcome<BlockId> {
    writable(id, "block id")?;
    // SAFETY: not null, so readable.
    Ok(unsafe { id.read_unaligned() })
}

/// 16 bytes.
///
/// # Safety
/// `at` is null or 16 readable bytes.
pub(super) unsafe fn bytes_at(at: *const u8) -> Option<[u8; 16]> {
    // SAFETY: not null, so 16 readable bytes.
    (!at.is_null()).then(|| unsafe { at.cast::<[u8; 16]>().read_unaligned() })
}

/// Writes 16 bytes.
///
/// # Safety
/// `at` is null or 16 writable bytes.
unsafe fn put_bytes(at: *mut u8, bytes: [u8; 16]) -> Outcome<()> {
    writable(at, "16 bytes")?;
    // SAFETY: not null, so 16 writable bytes.
    unsafe { at.cast::<[u8; 16]>().write_unaligned(bytes) };
    Ok(())
}

/// # Safety
/// `options` is null or readable as far as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_open(pool: *mut CxlPool, options: *const CacheOptions) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let options = unsafe { types::read(options) }?;
        handle::with(pool, |pool| pool.open_cache(&options))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_close(pool: *mut CxlPool) -> c_int {
    status_of(|| handle::with(pool, |pool| pool.close_cache()))
}

/// # Safety
/// `text` is null or `size` readable bytes; `name_space` is null or 16 writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_namespace(text: *const c_void, size: usize, name_space: *mut u8) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let text = unsafe { items(text.cast::<u8>(), size, "bytes of the text") }?;
        let fields = NamespaceFields { extra: [("text".into(), hex(text))].into(), ..NamespaceFields::default() };
        // SAFETY: as demanded of the caller.
        unsafe { put_bytes(name_space, fields.namespace().0) }
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// # Safety
/// `parent` is null or 16 readable bytes, `text` null or `size` readable bytes, `key` null or 16 writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_key(parent: *const u8, text: *const c_void, size: usize, key: *mut u8) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let (parent, text) = unsafe { (bytes_at(parent), items(text.cast::<u8>(), size, "bytes of the text")?) };
        // SAFETY: as demanded of the caller.
        unsafe { put_bytes(key, chain(parent.map(BlockKey), &[], text).0) }
    })
}

/// # Safety
/// `id` is null or readable; `len_bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_lookup(pool: *mut CxlPool, id: *const BlockId, len_bytes: *mut u64) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let id = unsafe { id_at(id) }?;
        let found = with_cache(pool, |cache| Ok(cache.cache().lookup(Namespace(id.name_space), BlockKey(id.key))?))?;
        let found = found.ok_or_else(|| Failure::new(Status::E_NOT_FOUND, "the block is not in the cache"))?;
        if !len_bytes.is_null() {
            // SAFETY: not null, so writable.
            unsafe { len_bytes.write(found.len_bytes) };
        }
        Ok(())
    })
}

/// # Safety
/// `name_space` is null or 16 readable bytes, `keys` null or 16 times `count`; `cached` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_lookup_chain(
    pool: *mut CxlPool,
    name_space: *const u8,
    keys: *const u8,
    count: usize,
    cached: *mut usize,
) -> c_int {
    status_of(|| {
        writable(cached, "number of blocks")?;
        // SAFETY: as demanded of the caller.
        let (name_space, keys) = unsafe { (bytes_at(name_space), items(keys.cast::<[u8; 16]>(), count, "keys")?) };
        let name_space = name_space.ok_or_else(|| Failure::invalid("the namespace is NULL"))?;
        let found = with_cache(pool, |cache| Ok(cache.cache().lookup_chain(Namespace(name_space), bytemuck::cast_slice(keys))?.len()))?;
        // SAFETY: not null, so writable.
        unsafe { cached.write(found) };
        Ok(())
    })
}

/// # Safety
/// `id` is null or readable, `parent` null or 16 readable bytes; `pieces` is null or `count` pieces, each of which may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_publish(
    pool: *mut CxlPool,
    id: *const BlockId,
    parent: *const u8,
    pieces: *const Piece,
    count: usize,
) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let (id, parent, pieces) = unsafe { (id_at(id)?, bytes_at(parent), items(pieces, count, "pieces")?) };
        // SAFETY: as demanded of the caller.
        with_cache(pool, |cache| unsafe { cache.publish(&id, parent, pieces) })
    })
}

/// # Safety
/// `id` is null or readable, `parent` null or 16 readable bytes; `block` is null or writable as far as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_reserve(
    pool: *mut CxlPool,
    id: *const BlockId,
    parent: *const u8,
    len_bytes: u64,
    block: *mut Block,
) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let (id, parent) = unsafe {
            types::check_writable(block)?;
            (id_at(id)?, bytes_at(parent))
        };
        let reserved = with_cache(pool, |cache| cache.reserve(&id, parent, len_bytes))?;
        // SAFETY: checked above.
        unsafe { types::write(block, &reserved) }
    })
}

/// # Safety
/// `pieces` is null or `count` pieces, each of which may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_fill(pool: *mut CxlPool, handle: u64, pieces: *const Piece, count: usize) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let pieces = unsafe { items(pieces, count, "pieces") }?;
        // SAFETY: as demanded of the caller.
        with_cache(pool, |cache| unsafe { cache.fill(handle, pieces) })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_commit(pool: *mut CxlPool, handle: u64) -> c_int {
    status_of(|| with_cache(pool, |cache| cache.commit(handle)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_abort(pool: *mut CxlPool, handle: u64) -> c_int {
    status_of(|| with_cache(pool, |cache| cache.abort(handle)))
}

/// # Safety
/// `id` is null or readable; `pieces` is null or `count` pieces, each of which may be written; `len_bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_pull(
    pool: *mut CxlPool,
    id: *const BlockId,
    pieces: *const Piece,
    count: usize,
    len_bytes: *mut u64,
) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let (id, pieces) = unsafe { (id_at(id)?, items(pieces, count, "pieces")?) };
        // SAFETY: as demanded of the caller.
        let pulled = with_cache(pool, |cache| unsafe { cache.pull(&id, pieces) })?;
        if !len_bytes.is_null() {
            // SAFETY: not null, so writable.
            unsafe { len_bytes.write(pulled) };
        }
        Ok(())
    })
}

/// # Safety
/// `id` is null or readable; `block` is null or writable as far as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_pin(pool: *mut CxlPool, id: *const BlockId, block: *mut Block) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let id = unsafe {
            types::check_writable(block)?;
            id_at(id)?
        };
        let pinned = with_cache(pool, |cache| cache.pin(&id))?;
        // SAFETY: checked above.
        unsafe { types::write(block, &pinned) }
    })
}

/// # Safety
/// `name_space` is null or 16 readable bytes, `keys` null or 16 times `count`; `handles` is null or `count` writable numbers; `pinned` is
/// null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_pin_chain(
    pool: *mut CxlPool,
    name_space: *const u8,
    keys: *const u8,
    count: usize,
    handles: *mut u64,
    pinned: *mut usize,
) -> c_int {
    status_of(|| {
        writable(pinned, "number of blocks")?;
        if count > 0 {
            writable(handles, "handles")?;
        }
        // SAFETY: as demanded of the caller.
        let (name_space, keys) = unsafe { (bytes_at(name_space), items(keys.cast::<[u8; 16]>(), count, "keys")?) };
        let name_space = name_space.ok_or_else(|| Failure::invalid("the namespace is NULL"))?;
        let blocks = with_cache(pool, |cache| cache.pin_chain(name_space, keys))?;
        for (index, block) in blocks.iter().enumerate() {
            // SAFETY: there are at most `count` blocks, and room for as many.
            unsafe { handles.add(index).write(block.handle) };
        }
        // SAFETY: not null, so writable.
        unsafe { pinned.write(blocks.len()) };
        Ok(())
    })
}

/// # Safety
/// `pieces` is null or `count` pieces, each of which may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_read(pool: *mut CxlPool, handle: u64, pieces: *const Piece, count: usize) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let pieces = unsafe { items(pieces, count, "pieces") }?;
        // SAFETY: as demanded of the caller.
        with_cache(pool, |cache| unsafe { cache.read(handle, pieces) })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_invalidate(pool: *mut CxlPool, handle: u64) -> c_int {
    status_of(|| with_cache(pool, |cache| cache.invalidate(handle)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_check(pool: *mut CxlPool, handle: u64) -> c_int {
    status_of(|| with_cache(pool, |cache| cache.check(handle)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_unpin(pool: *mut CxlPool, handle: u64) -> c_int {
    status_of(|| with_cache(pool, |cache| cache.unpin(handle)))
}

/// # Safety
/// `id` is null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_evict(pool: *mut CxlPool, id: *const BlockId) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let id = unsafe { id_at(id) }?;
        with_cache(pool, |cache| Ok(cache.cache().evict(Namespace(id.name_space), BlockKey(id.key)).map(drop)?))
    })
}

/// # Safety
/// `name_space` is null or 16 readable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_clear(pool: *mut CxlPool, name_space: *const u8) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let name_space = unsafe { bytes_at(name_space) };
        with_cache(pool, |cache| Ok(cache.cache().clear(name_space.map(Namespace)).map(drop)?))
    })
}

/// # Safety
/// `text` is null or `size` writable bytes; `needed` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_cache_metrics(pool: *mut CxlPool, text: *mut c_char, size: usize, needed: *mut usize) -> c_int {
    status_of(|| {
        let mut rendered = String::new();
        with_cache(pool, |cache| {
            cache.cache().metrics().render(&mut rendered);
            Ok(())
        })?;
        rendered.push('\0');
        if !needed.is_null() {
            // SAFETY: not null, so writable.
            unsafe { needed.write(rendered.len()) };
        }
        if text.is_null() && size == 0 {
            return Ok(());
        }
        writable(text, "text")?;
        if rendered.len() > size {
            return Err(Failure::new(Status::E_FULL, format!("the text has {} bytes, there is room for {size}", rendered.len())));
        }
        // SAFETY: `size` writable bytes, of which no more are written; the source is ours.
        unsafe { std::ptr::copy_nonoverlapping(rendered.as_ptr().cast::<c_char>(), text, rendered.len()) };
        Ok(())
    })
}
