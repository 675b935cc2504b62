// SPDX-License-Identifier: Apache-2.0
//! The prefix cache.

use super::args::{In, Out};
use crate::cache::CacheMember;
use crate::handle;
use crate::pool::OpenPool;
use crate::status::{Failure, Outcome, Status, status_of};
use crate::types::{Block, BlockId, CacheOptions, CxlPool, Piece};
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

const NAMESPACE: &str = "namespace";
const ID: &str = "block id";
const COUNT: &str = "number of blocks";

fn namespace(at: &In<u8>) -> Outcome<[u8; 16]> {
    at.id().ok_or_else(|| Failure::invalid("the namespace is NULL"))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_open(pool: *mut CxlPool, options: In<CacheOptions>) -> c_int {
    status_of(|| {
        let options = options.structure()?;
        handle::with(pool, |pool| pool.open_cache(&options))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_close(pool: *mut CxlPool) -> c_int {
    status_of(|| handle::with(pool, |pool| pool.close_cache()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_namespace(text: In<c_void>, size: usize, name_space: Out<u8>) -> c_int {
    status_of(|| {
        name_space.fill_id(NAMESPACE, || {
            let hex: String = text.bytes(size, "text")?.iter().map(|byte| format!("{byte:02x}")).collect();
            Ok(NamespaceFields { extra: [("text".into(), hex)].into(), ..NamespaceFields::default() }.namespace().0)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_key(parent: In<u8>, text: In<c_void>, size: usize, key: Out<u8>) -> c_int {
    status_of(|| key.fill_id("key", || Ok(chain(parent.id().map(BlockKey), &[], text.bytes(size, "text")?).0)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_lookup(pool: *mut CxlPool, id: In<BlockId>, len_bytes: Out<u64>) -> c_int {
    status_of(|| {
        let id = id.read(ID)?;
        let found = with_cache(pool, |cache| Ok(cache.cache().lookup(Namespace(id.name_space), BlockKey(id.key))?))?;
        len_bytes.set(found.ok_or_else(|| Failure::new(Status::E_NOT_FOUND, "the block is not in the cache"))?.len_bytes);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_lookup_chain(
    pool: *mut CxlPool,
    name_space: In<u8>,
    keys: In<u8>,
    count: usize,
    cached: Out<usize>,
) -> c_int {
    status_of(|| {
        cached.fill(COUNT, || {
            let keys = bytemuck::cast_slice(keys.ids(count, "keys")?);
            let name_space = Namespace(namespace(&name_space)?);
            with_cache(pool, |cache| Ok(cache.cache().lookup_chain(name_space, keys)?.len()))
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_publish(pool: *mut CxlPool, id: In<BlockId>, parent: In<u8>, pieces: In<Piece>, count: usize) -> c_int {
    status_of(|| {
        let (id, pieces) = (id.read(ID)?, pieces.items(count, "pieces")?);
        // SAFETY: the caller of C vouches for the memory of the pieces, here and below.
        with_cache(pool, |cache| unsafe { cache.publish(&id, parent.id(), pieces) })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_reserve(pool: *mut CxlPool, id: In<BlockId>, parent: In<u8>, len_bytes: u64, block: Out<Block>) -> c_int {
    status_of(|| {
        block.fill_structure(|| {
            let id = id.read(ID)?;
            with_cache(pool, |cache| cache.reserve(&id, parent.id(), len_bytes))
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_fill(pool: *mut CxlPool, handle: u64, pieces: In<Piece>, count: usize) -> c_int {
    status_of(|| {
        let pieces = pieces.items(count, "pieces")?;
        // SAFETY: as in `cxl_shm_cache_publish`.
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

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_pull(pool: *mut CxlPool, id: In<BlockId>, pieces: In<Piece>, count: usize, len_bytes: Out<u64>) -> c_int {
    status_of(|| {
        let (id, pieces) = (id.read(ID)?, pieces.items(count, "pieces")?);
        // SAFETY: as in `cxl_shm_cache_publish`.
        len_bytes.set(with_cache(pool, |cache| unsafe { cache.pull(&id, pieces) })?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_pin(pool: *mut CxlPool, id: In<BlockId>, block: Out<Block>) -> c_int {
    status_of(|| {
        block.fill_structure(|| {
            let id = id.read(ID)?;
            with_cache(pool, |cache| cache.pin(&id))
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_pin_chain(
    pool: *mut CxlPool,
    name_space: In<u8>,
    keys: In<u8>,
    count: usize,
    handles: Out<u64>,
    pinned: Out<usize>,
) -> c_int {
    status_of(|| {
        pinned.fill(COUNT, || {
            if count > 0 {
                handles.check("handles")?;
            }
            let (keys, name_space) = (keys.ids(count, "keys")?, namespace(&name_space)?);
            let blocks = with_cache(pool, |cache| cache.pin_chain(name_space, keys))?;
            handles.write_items(count, &blocks);
            Ok(blocks.len())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_read(pool: *mut CxlPool, handle: u64, pieces: In<Piece>, count: usize) -> c_int {
    status_of(|| {
        let pieces = pieces.items(count, "pieces")?;
        // SAFETY: as in `cxl_shm_cache_publish`.
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

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_evict(pool: *mut CxlPool, id: In<BlockId>) -> c_int {
    status_of(|| {
        let id = id.read(ID)?;
        with_cache(pool, |cache| Ok(cache.cache().evict(Namespace(id.name_space), BlockKey(id.key)).map(drop)?))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_clear(pool: *mut CxlPool, name_space: In<u8>) -> c_int {
    status_of(|| with_cache(pool, |cache| Ok(cache.cache().clear(name_space.id().map(Namespace)).map(drop)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_cache_metrics(pool: *mut CxlPool, text: Out<c_char>, size: usize, needed: Out<usize>) -> c_int {
    status_of(|| {
        let mut rendered = String::new();
        with_cache(pool, |cache| {
            cache.cache().metrics().render(&mut rendered);
            Ok(())
        })?;
        rendered.push('\0');
        needed.set(rendered.len());
        if text.is_null() && size == 0 {
            return Ok(());
        }
        text.check("text")?;
        if rendered.len() > size {
            return Err(Failure::new(Status::E_FULL, format!("the text has {} bytes, there is room for {size}", rendered.len())));
        }
        text.write_bytes(size, rendered.as_bytes());
        Ok(())
    })
}
