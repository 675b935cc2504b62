// SPDX-License-Identifier: Apache-2.0
//! A pool and this process's membership in it, as one handle has them.

use crate::cache::CacheMember;
use crate::counts::Counts;
use crate::locks::Locks;
use crate::rings::RingTable;
use crate::status::{Failure, Outcome, Status};
use crate::types::{self, CacheOptions, FormatOptions, Info, Options};
use crate::upkeep;
use arc_swap::ArcSwapOption;
use bytemuck::Zeroable;
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::background::{Background, held};
use cxl_pool::copy::{CopyConfig, CopyEngine};
use cxl_pool::device::PoolSpec;
use cxl_pool::host::{Host, HostConfig, Service};
use cxl_pool::lock::LockId;
use cxl_pool::lock_table;
use cxl_pool::media::CoherenceMode;
use cxl_pool::objects::Objects;
use cxl_pool::pool::{self, CellArea, Pool, Share};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Deadline of the calls that take none, in milliseconds.
const DEFAULT_TIMEOUT_MS: u64 = 30_000;
/// Part of a pool that is cells, in hundredths, where only their size is given.
const DEFAULT_CELLS_PERCENT: u32 = 75;
/// Longest deadline, in milliseconds: 11 days, far from any overflow of a clock in nanoseconds.
pub const MAX_TIMEOUT_MS: u64 = 1_000_000_000;

pub struct Member {
    pub host: Host,
    pub objects: Objects,
    pub locks: Locks,
    pub rings: RingTable,
    pub allocator: Arc<Allocator>,
    pub counts: Counts,
    /// The prefix cache, once it is opened.
    pub cache: ArcSwapOption<CacheMember>,
    /// Keeps the host alive; declared last, because it is needed to the end.
    _service: Service,
}

/// Waits until calls that are under way have let go of what they share.
fn alone<T>(mut shared: Arc<T>, timeout_ms: u64) -> Result<T, (Arc<T>, Failure)> {
    let deadline = Instant::now() + Duration::from_millis(timeout_ms);
    loop {
        shared = match Arc::try_unwrap(shared) {
            Ok(alone) => return Ok(alone),
            Err(shared) if Instant::now() < deadline => shared,
            Err(shared) => {
                let reason = format!("calls on this pool did not end within {timeout_ms} ms");
                return Err((shared, Failure::new(Status::E_TIMEOUT, reason)));
            }
        };
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Member {
    /// Allocates a lock that protects nothing yet: what a holder in its former life left undone does not matter any more.
    pub fn new_lock(&self, timeout_ms: u64) -> Outcome<LockId> {
        let lock = lock_table::allocate_lock(&self.host, timeout_ms)?;
        match self.host.acquire(lock, timeout_ms) {
            Ok(mut guard) => {
                guard.repaired();
                Ok(lock)
            }
            Err(error) => {
                // The first error is the one to report; if this fails too, one number is lost.
                let _ = lock_table::free_lock(&self.host, lock, timeout_ms);
                Err(error.into())
            }
        }
    }
}

pub struct OpenPool {
    pool: Pool,
    base: NonNull<u8>,
    config: HostConfig,
    timeout_ms: u64,
    member: ArcSwapOption<Member>,
    /// Of lists of copies, once there was one.
    copy_engine: OnceLock<Arc<dyn CopyEngine>>,
    /// Runs while this process is a member; held while it joins or leaves.
    upkeep: Mutex<Option<Background>>,
}

// SAFETY: `base` is only an address, whose memory only the coherence layer touches; which thread does so does not matter.
unsafe impl Send for OpenPool {}
// SAFETY: as above; all else is Send and Sync by itself.
unsafe impl Sync for OpenPool {}

pub fn spec_of(text: Option<&str>) -> Outcome<PoolSpec> {
    Ok(text.map_or_else(PoolSpec::from_env, PoolSpec::parse)?)
}

fn refuse_unknown(flags: u32, known: u32, what: &str) -> Outcome<()> {
    if flags & !known == 0 { Ok(()) } else { Err(Failure::invalid(format!("{what} has unknown flags {:#x}", flags & !known))) }
}

pub fn check_flags(flags: u32, known: u32) -> Outcome<()> {
    refuse_unknown(flags, known, "the call")
}

fn or_default<T: Default + PartialEq>(value: T, default: T) -> T {
    if value == T::default() { default } else { value }
}

pub fn format(spec: Option<&str>, options: &FormatOptions) -> Outcome<()> {
    refuse_unknown(options.flags, types::FORMAT_FORCE | types::FORMAT_COHERENT, "cxl_shm_format_options_t")?;
    if options.reserved != 0 || options.reserved2 != 0 {
        return Err(Failure::invalid("reserved of cxl_shm_format_options_t is not zero"));
    }
    let share = match options.cells_percent {
        0 => DEFAULT_CELLS_PERCENT,
        percent if percent <= 100 => percent,
        percent => return Err(Failure::invalid(format!("{percent} percent of the pool cannot be cells"))),
    };
    let cells = (options.cell_bytes != 0).then_some(CellArea { cell_bytes: options.cell_bytes, share: Share::Percent(share) });
    let defaults = pool::FormatOptions::default();
    let options = pool::FormatOptions {
        stripe_bytes: (options.stripe_bytes != 0).then_some(options.stripe_bytes),
        seat_count: or_default(options.seats, defaults.seat_count),
        slots: or_default(options.slots, defaults.slots),
        locks: or_default(options.locks, defaults.locks),
        objects: options.objects,
        chunk_bytes: or_default(options.chunk_bytes, defaults.chunk_bytes),
        cells: cells.into_iter().collect(),
        coherence: if options.flags & types::FORMAT_COHERENT != 0 { CoherenceMode::Hardware } else { CoherenceMode::Software },
        force: options.flags & types::FORMAT_FORCE != 0,
        ..defaults
    };
    Pool::format(&spec_of(spec)?, &options)?;
    Ok(())
}

/// The engine of lists: as `CXL_COPY` says, but in the caller's thread alone. Who wants several threads makes several calls.
pub fn copy_engine() -> Outcome<Arc<dyn CopyEngine>> {
    Ok(cxl_pool::copy::engine(CopyConfig { workers: 0, ..CopyConfig::from_env()? }, None, None)?)
}

impl OpenPool {
    /// Opens a pool and joins it, unless the options say otherwise.
    pub fn open(spec: Option<&str>, options: &Options) -> Outcome<OpenPool> {
        refuse_unknown(options.flags, types::OPEN_READ_ONLY | types::OPEN_NO_JOIN | types::OPEN_SLOT, "cxl_shm_options_t")?;
        let read_only = options.flags & types::OPEN_READ_ONLY != 0;
        let slot = u16::try_from(options.slot).map_err(|_| Failure::invalid(format!("slot {} does not exist", options.slot)))?;
        let defaults = HostConfig::from_env()?;
        let config = HostConfig {
            slot: (options.flags & types::OPEN_SLOT != 0).then_some(slot),
            join_timeout_ms: (options.join_timeout_ms != 0).then_some(options.join_timeout_ms.min(MAX_TIMEOUT_MS)),
            heartbeat_ms: or_default(options.heartbeat_ms, defaults.heartbeat_ms).min(MAX_TIMEOUT_MS),
            suspect_ms: or_default(options.suspect_ms, defaults.suspect_ms).min(MAX_TIMEOUT_MS),
            ..defaults
        };
        config.check()?;
        let pool = Pool::open(&spec_of(spec)?, &pool::OpenOptions { read_only, ..pool::OpenOptions::default() })?;
        let Some(base) = pool.lines().memory().address(0, cxl_pool::limits::LINE_BYTES as u64) else {
            return Err(Failure::new(Status::E_NOT_A_POOL, "the start of the pool has no address in this process"));
        };
        let timeout_ms = or_default(options.timeout_ms, DEFAULT_TIMEOUT_MS.max(config.default_timeout_ms())).min(MAX_TIMEOUT_MS);
        let open = OpenPool {
            base,
            pool,
            config,
            timeout_ms,
            member: ArcSwapOption::empty(),
            copy_engine: OnceLock::new(),
            upkeep: Mutex::new(None),
        };
        if !read_only && options.flags & types::OPEN_NO_JOIN == 0 {
            open.join()?;
        }
        Ok(open)
    }

    pub fn join(&self) -> Outcome<()> {
        let mut running = held(&self.upkeep);
        if self.member.load().is_some() {
            return Err(Failure::new(Status::E_EXISTS, "this handle has joined the pool already"));
        }
        let host = self.pool.join(self.config.clone())?;
        // From here on the host has to stay alive, whatever the rest does.
        let service = host.serve()?;
        let joined = || -> Outcome<Member> {
            let config = AllocConfig { lock_timeout_ms: self.config.join_timeout_ms, ..AllocConfig::default() };
            let allocator = Arc::new(Allocator::attach(&host, LocalArea::of(&host)?, config)?);
            Ok(Member {
                rings: RingTable::new(&host, &allocator),
                objects: Objects::new(&host),
                locks: Locks::new(self.pool.layout().geometry()),
                counts: Counts::of(&host)?,
                allocator,
                cache: ArcSwapOption::empty(),
                host: host.clone(),
                _service: service,
            })
        };
        let member = Arc::new(joined().inspect_err(|_| {
            // The first error is the one to report; if leaving fails too, the host is taken for dead after a while.
            let _ = host.leave();
        })?);
        *running = Some(upkeep::start(&member)?);
        self.member.store(Some(member));
        Ok(())
    }

    /// Leaves the pool; does nothing if not joined.
    pub fn leave(&self) -> Outcome<()> {
        let mut running = held(&self.upkeep);
        let busy = |held| Failure::new(Status::E_BUSY, format!("{held} locks are held through this handle: release them first"));
        // Looked at before anything changes, so that calls under way notice nothing of an attempt that fails.
        match self.member.load().as_ref().map(|member| member.locks.count_held()) {
            None => return Ok(()),
            Some(0) => {}
            Some(held) => return Err(busy(held)),
        }
        let Some(shared) = self.member.swap(None) else { return Ok(()) };
        let member = match alone(shared, self.config.join_timeout_ms()) {
            Ok(member) => member,
            Err((shared, failure)) => {
                self.member.store(Some(shared));
                return Err(failure);
            }
        };
        // No thread can acquire any more, but one may have meanwhile.
        let held = member.locks.count_held();
        if held != 0 {
            // The upkeep has ended with what it kept up.
            let member = Arc::new(member);
            let restarted = upkeep::start(&member);
            self.member.store(Some(member));
            *running = Some(restarted?);
            return Err(busy(held));
        }
        *running = None;
        let Member { host, rings, allocator, counts, cache, _service, .. } = member;
        rings.end();
        if let Some(cache) = cache.into_inner().and_then(Arc::into_inner) {
            // Its cells are found by the host that takes this host's chunks over, its pins go with the process.
            let _ = cache.close();
        }
        // What cannot be given back is found by the host that takes this host's chunks over.
        let _ = Arc::into_inner(allocator).map(Allocator::close);
        // What this process counted stays in its host's sums. A host that is fenced publishes nothing; a later process of it does then.
        let _ = counts.publish_last(&host);
        Ok(host.leave()?)
    }

    pub fn open_cache(&self, options: &CacheOptions) -> Outcome<()> {
        let _turn = held(&self.upkeep);
        self.as_member(|member| {
            if member.cache.load().is_some() {
                return Err(Failure::new(Status::E_EXISTS, "the cache of this pool is open already"));
            }
            member.cache.store(Some(Arc::new(CacheMember::open(&member.host, options, &member.counts.metrics)?)));
            Ok(())
        })
    }

    /// Closes the cache of this process; does nothing if it is not open.
    pub fn close_cache(&self) -> Outcome<()> {
        let _turn = held(&self.upkeep);
        self.as_member(|member| {
            let Some(shared) = member.cache.swap(None) else { return Ok(()) };
            match alone(shared, self.config.join_timeout_ms()) {
                Ok(cache) => cache.close(),
                Err((shared, failure)) => {
                    member.cache.store(Some(shared));
                    Err(failure)
                }
            }
        })
    }

    pub fn as_member<T>(&self, work: impl FnOnce(&Member) -> Outcome<T>) -> Outcome<T> {
        match &*self.member.load() {
            Some(member) => work(member),
            None => Err(Failure::new(Status::E_CLOSED, "this handle has not joined the pool, or has left it: call cxl_shm_join")),
        }
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub fn copy_engine(&self) -> Outcome<&dyn CopyEngine> {
        if let Some(engine) = self.copy_engine.get() {
            return Ok(&**engine);
        }
        let engine = copy_engine()?;
        Ok(&**self.copy_engine.get_or_init(|| engine))
    }

    pub fn timeout_ms(&self, given_ms: u64) -> u64 {
        if given_ms == types::TIMEOUT_DEFAULT { self.timeout_ms } else { given_ms.min(MAX_TIMEOUT_MS) }
    }

    pub fn data(&self) -> Range<u64> {
        let layout = self.pool.layout();
        let start = layout.data_offset();
        start..start + layout.chunks() * layout.geometry().chunk_bytes
    }

    fn cells(&self) -> Range<u64> {
        let layout = self.pool.layout();
        layout.cells_offset()..layout.cells_offset() + layout.geometry().cells_len_bytes()
    }

    pub fn offset_of(&self, address: usize) -> Option<u64> {
        let offset = address.checked_sub(self.base.addr().get())? as u64;
        (offset < self.pool.lines().memory().len_bytes()).then_some(offset)
    }

    /// Refuses ranges that do not lie in the blocks.
    pub fn check_range(&self, offset: u64, len_bytes: usize) -> Outcome<()> {
        let data = self.data();
        let within =
            |range: &Range<u64>| range.contains(&offset) && offset.checked_add(len_bytes as u64).is_some_and(|end| end <= range.end);
        if within(&data) || within(&self.cells()) {
            return Ok(());
        }
        Err(Failure::new(
            Status::E_NOT_IN_POOL,
            format!("offset {offset:#x} (+{len_bytes} bytes) does not lie in the blocks, {:#x} to {:#x}", data.start, data.end),
        ))
    }

    pub fn pointer(&self, offset: u64) -> *mut c_void {
        self.base.as_ptr().wrapping_add(offset as usize).cast()
    }

    pub fn info(&self) -> Info {
        let (layout, superblock) = (self.pool.layout(), self.pool.superblock());
        let (geometry, data) = (layout.geometry(), self.data());
        let node = self.pool.payload_device().and_then(|device| device.numa_node);
        let mut info = Info {
            struct_size: size_of::<Info>(),
            uuid: *superblock.uuid(),
            pool_incarnation: superblock.incarnation(),
            len_bytes: geometry.len_bytes,
            data_offset: data.start,
            data_bytes: data.end - data.start,
            chunk_bytes: geometry.chunk_bytes,
            base: self.base.addr().get(),
            devices: geometry.devices,
            slots: geometry.slots,
            locks: geometry.locks,
            objects: geometry.objects,
            slot: types::NO_SLOT,
            numa_node: node.map_or(-1, |node| node as i32),
            ..Info::zeroed()
        };
        if self.pool.is_read_only() {
            info.flags |= types::INFO_READ_ONLY;
        }
        if superblock.coherence() == CoherenceMode::Hardware {
            info.flags |= types::INFO_COHERENT;
        }
        if self.pool.lines().memory().keeps_lines_whole() {
            info.flags |= types::INFO_WHOLE_LINES;
        }
        if let Some(member) = &*self.member.load() {
            info.flags |= types::INFO_JOINED;
            info.slot = member.host.slot().into();
            info.incarnation = member.host.incarnation();
            info.process = member.host.process_index() as u32;
        }
        // The last byte stays zero, so that the text ends.
        let room = info.memory.len() - 1;
        info.memory[..room].iter_mut().zip(self.pool.description().bytes()).for_each(|(place, byte)| *place = byte);
        info
    }
}
