// SPDX-License-Identifier: Apache-2.0
//! The prefix cache of one handle: reservations and pins by number, because C cannot own them.

use crate::numbers::Numbers;
use crate::status::{Failure, Outcome, Status};
use crate::types::{Block, BlockId, CACHE_CHECKSUMS, CacheOptions, Piece};
use cxl_pool::cache::policy::PolicyKind;
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, Namespace, Pinned, PublishRequest, Pulled, Reservation, Reserved, Upkeep};
use cxl_pool::copy::{CopyConfig, LocalPlace, LocalRange};
use cxl_pool::host::Host;
use cxl_pool::metrics::{Metrics, MissReason};
use std::ptr::NonNull;
use std::sync::Arc;

pub struct CacheMember {
    /// Declared before the cache, so that reservations and pins go first.
    reservations: Numbers<Box<Reservation>>,
    pins: Numbers<Arc<Pinned>>,
    upkeep: Upkeep,
    cache: Cache,
}

fn miss(what: impl std::fmt::Display) -> Failure {
    Failure::new(Status::E_NOT_FOUND, format!("the block is not in the cache ({what})"))
}

fn unknown_error(handle: u64) -> Failure {
    Failure::new(Status::E_CLOSED, format!("{handle} is not the handle of a reserved or pinned block (was it given back?)"))
}

fn ranges(pieces: &[Piece]) -> Outcome<Vec<LocalRange>> {
    let range = |piece: &Piece| match NonNull::new(piece.ptr as *mut u8) {
        Some(address) => Ok(LocalRange { address, len_bytes: piece.len_bytes }),
        None if piece.len_bytes == 0 => Ok(LocalRange { address: NonNull::dangling(), len_bytes: 0 }),
        None => Err(Failure::invalid("a piece of some bytes begins at NULL")),
    };
    pieces.iter().map(range).collect()
}

/// The first `len_bytes` bytes of `pieces`.
fn first_bytes(pieces: &[LocalRange], len_bytes: u64) -> Outcome<Vec<LocalRange>> {
    let mut left = usize::try_from(len_bytes).map_err(|_| Failure::invalid("the block does not fit this machine's addresses"))?;
    let mut taken = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let len_bytes = piece.len_bytes.min(left);
        left -= len_bytes;
        taken.push(LocalRange { address: piece.address, len_bytes });
    }
    if left == 0 { Ok(taken) } else { Err(Failure::invalid(format!("the pieces are {left} bytes too short for the block"))) }
}

/// Fills a reservation from pieces.
///
/// # Safety
/// The pieces may be read and no thread writes to them.
unsafe fn fill(reservation: &mut Reservation, pieces: &[LocalRange]) -> cxl_pool::Result<()> {
    // SAFETY: as demanded of the caller.
    unsafe { Reservation::fill_all_raw(std::slice::from_mut(reservation), LocalPlace::Host, |_| pieces.iter().copied()) }
}

impl CacheMember {
    pub fn open(host: &Host, options: &CacheOptions, metrics: &Arc<Metrics>) -> Outcome<CacheMember> {
        if options.flags & !CACHE_CHECKSUMS != 0 || options.reserved != 0 {
            return Err(Failure::invalid("cxl_shm_cache_options_t has unknown flags, or its reserved member is not zero"));
        }
        let policy = PolicyKind::ALL.into_iter().find(|&kind| kind as u32 == options.policy);
        let policy = policy.ok_or_else(|| Failure::invalid(format!("eviction policy {} does not exist", options.policy)))?;
        let mut config = CacheConfig {
            policy,
            checksums: options.flags & CACHE_CHECKSUMS != 0,
            metrics: Some(metrics.clone()),
            ..CacheConfig::default()
        };
        if options.low_water_percent != 0 || options.high_water_percent != 0 {
            (config.low_water_percent, config.high_water_percent) = (options.low_water_percent, options.high_water_percent);
        }
        if options.copy_workers != 0 {
            config.copy = Some(CopyConfig { workers: options.copy_workers as usize, ..CopyConfig::from_env()? });
        }
        let cache = Cache::open(host, config)?;
        let upkeep = cache.serve()?;
        Ok(CacheMember { reservations: Numbers::new(), pins: Numbers::new(), upkeep, cache })
    }

    /// Ends it: reservations are given up, pins given back.
    pub fn close(self) -> Outcome<()> {
        let CacheMember { reservations, pins, upkeep, cache } = self;
        drop((reservations, pins));
        drop(upkeep);
        Ok(cache.close()?)
    }

    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    fn describe(&self, handle: u64, offset: u64, len_bytes: u64, address: Option<NonNull<u8>>, owner: u32) -> Block {
        Block {
            struct_size: size_of::<Block>(),
            handle,
            offset,
            len_bytes,
            ptr: address.map_or(0, |address| address.as_ptr().addr()),
            owner,
            reserved: 0,
        }
    }

    pub fn reserve(&self, id: &BlockId, parent: Option<[u8; 16]>, len_bytes: u64) -> Outcome<Block> {
        let reservation = self.make_reservation(id, parent, len_bytes)?;
        let (offset, address) = (reservation.offset(), reservation.address());
        let owner = self.cache.host().slot().into();
        let handle = self.reservations.add(Box::new(reservation));
        Ok(self.describe(handle, offset, len_bytes, address, owner))
    }

    fn make_reservation(&self, id: &BlockId, parent: Option<[u8; 16]>, len_bytes: u64) -> Outcome<Reservation> {
        let request =
            PublishRequest { namespace: Namespace(id.name_space), key: BlockKey(id.key), parent: parent.map(BlockKey), len_bytes };
        let full = |what: &str| Err(Failure::new(Status::E_FULL, what));
        match self.cache.reserve(&request)? {
            Reserved::Cell(reservation) => Ok(reservation),
            Reserved::Exists => Err(Failure::new(Status::E_EXISTS, "a block of this key is in the cache, or is being written")),
            Reserved::Busy => Err(Failure::new(Status::E_BUSY, "the block of this key is being evicted: try again")),
            Reserved::NoCell => full("no cell is free and none can be evicted: unpin blocks, or wait until other hosts make room"),
            Reserved::NoHint => full("the part of the hint table where this key belongs is full: evict blocks"),
            Reserved::OverQuota => full("the namespace has used up its quota with blocks that are in use"),
        }
    }

    /// Publishes a block from pieces.
    ///
    /// # Safety
    /// The pieces may be read and no thread writes to them.
    pub unsafe fn publish(&self, id: &BlockId, parent: Option<[u8; 16]>, pieces: &[Piece]) -> Outcome<()> {
        let ranges = ranges(pieces)?;
        let len_bytes = ranges.iter().try_fold(0u64, |sum, range| sum.checked_add(range.len_bytes as u64));
        let len_bytes = len_bytes.ok_or_else(|| Failure::invalid("the pieces have more bytes than there are"))?;
        let mut reservation = self.make_reservation(id, parent, len_bytes)?;
        // SAFETY: as demanded of the caller.
        unsafe { fill(&mut reservation, &ranges) }?;
        Ok(reservation.commit()?)
    }

    /// Fills a reservation from pieces.
    ///
    /// # Safety
    /// As [`CacheMember::publish`].
    pub unsafe fn fill(&self, handle: u64, pieces: &[Piece]) -> Outcome<()> {
        let ranges = ranges(pieces)?;
        // Out of the table while it is filled: no call commits or aborts it meanwhile, and the table is not locked.
        let mut reservation = self.take_reservation(handle)?;
        // SAFETY: as demanded of the caller.
        let filled = unsafe { fill(&mut reservation, &ranges) };
        self.reservations.insert(handle, reservation);
        Ok(filled?)
    }

    fn take_reservation(&self, handle: u64) -> Outcome<Box<Reservation>> {
        self.reservations.remove(handle).ok_or_else(|| match self.pins.has(handle) {
            true => Failure::invalid(format!("{handle} is a pinned block, not a reserved one")),
            false => unknown_error(handle),
        })
    }

    fn no_pin(&self, handle: u64) -> Failure {
        match self.reservations.has(handle) {
            true => Failure::invalid(format!("{handle} is a reserved block, not a pinned one")),
            false => unknown_error(handle),
        }
    }

    pub fn commit(&self, handle: u64) -> Outcome<()> {
        Ok(self.take_reservation(handle)?.commit()?)
    }

    pub fn abort(&self, handle: u64) -> Outcome<()> {
        Ok(self.take_reservation(handle)?.abort()?)
    }

    /// Copies a block to pieces, which may have more room; returns its length.
    ///
    /// # Safety
    /// The pieces may be written and no other thread uses them.
    pub unsafe fn pull(&self, id: &BlockId, pieces: &[Piece]) -> Outcome<u64> {
        let ranges = ranges(pieces)?;
        let keys = [BlockKey(id.key)];
        let places = |_, len_bytes| first_bytes(&ranges, len_bytes).unwrap_or_default();
        // SAFETY: as demanded of the caller.
        let pulled = unsafe { self.cache.pull_all_raw(Namespace(id.name_space), &keys, LocalPlace::Host, places) }?;
        match pulled[..] {
            [Pulled::Hit { len_bytes }] => Ok(len_bytes),
            [Pulled::Miss(MissReason::Length)] => Err(Failure::invalid("the pieces are too short for the block")),
            [Pulled::Miss(reason)] => Err(miss(reason)),
            _ => Err(miss("absent")),
        }
    }

    fn add_pin(&self, pinned: Pinned) -> Block {
        let (offset, len_bytes, address, owner) = (pinned.offset(), pinned.len_bytes(), pinned.address(), pinned.owner().into());
        let handle = self.pins.add(Arc::new(pinned));
        self.describe(handle, offset, len_bytes, address, owner)
    }

    pub fn pin(&self, id: &BlockId) -> Outcome<Block> {
        match self.cache.pin(Namespace(id.name_space), BlockKey(id.key))? {
            Ok(pinned) => Ok(self.add_pin(pinned)),
            Err(reason) => Err(miss(reason)),
        }
    }

    /// Pins the first blocks of a chain; returns their handles.
    pub fn pin_chain(&self, namespace: [u8; 16], keys: &[[u8; 16]]) -> Outcome<Vec<u64>> {
        let pinned = self.cache.pin_chain(Namespace(namespace), bytemuck::cast_slice(keys))?;
        Ok(pinned.into_iter().map(|pinned| self.add_pin(pinned).handle).collect())
    }

    fn pin_of(&self, handle: u64) -> Outcome<Arc<Pinned>> {
        self.pins.get(handle).ok_or_else(|| self.no_pin(handle))
    }

    /// Copies a pinned block to pieces, which may have more room.
    ///
    /// # Safety
    /// As [`CacheMember::pull`].
    pub unsafe fn read(&self, handle: u64, pieces: &[Piece]) -> Outcome<()> {
        let pinned = self.pin_of(handle)?;
        let taken = first_bytes(&ranges(pieces)?, pinned.len_bytes())?;
        // SAFETY: as demanded of the caller.
        let mut list = unsafe { pinned.scatter_in(LocalPlace::Host, taken) }?;
        pinned.copy(&mut list)?.map_or(Ok(()), |reason| Err(miss(reason)))
    }

    pub fn invalidate(&self, handle: u64) -> Outcome<()> {
        Ok(self.pin_of(handle)?.invalidate()?)
    }

    /// Whether a pinned block is what it was.
    pub fn check(&self, handle: u64) -> Outcome<()> {
        if self.pin_of(handle)?.is_unchanged()? { Ok(()) } else { Err(miss("it changed while it was used")) }
    }

    pub fn unpin(&self, handle: u64) -> Outcome<()> {
        self.pins.remove(handle).map(drop).ok_or_else(|| self.no_pin(handle))
    }
}
