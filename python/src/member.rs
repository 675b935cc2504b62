// SPDX-License-Identifier: Apache-2.0
//! This process as part of its host, for as long as anything needs it.

use crate::failure::Outcome;
use crate::handle::{End, held};
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::background::Background;
use cxl_pool::host::{Host, Service};
use cxl_pool::objects::Objects;
use cxl_pool::pool::Pool;
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Period of the allocator's upkeep.
const UPKEEP: Duration = Duration::from_millis(100);

pub struct Member {
    pub pool: Pool,
    pub host: Host,
    pub end: Arc<End>,
    /// Blocks in the hands of Python: while there are some, closing does not wait for the end.
    pub blocks: AtomicUsize,
    allocator: Mutex<Option<Keeper>>,
    /// Declared last: the host stays alive to the end.
    service: Option<Service>,
}

/// The allocator, once there was a need for one, and its upkeep.
struct Keeper {
    allocator: Arc<Allocator>,
    upkeep: Background,
}

impl Keeper {
    fn start(host: &Host) -> cxl_pool::Result<Keeper> {
        let config = AllocConfig { lock_timeout_ms: host.config().join_timeout_ms, ..AllocConfig::default() };
        let allocator = Arc::new(Allocator::attach(host, LocalArea::of(host)?, config)?);
        let (kept, of, mut is_bound) = (allocator.clone(), host.clone(), false);
        let round = move || {
            if !std::mem::replace(&mut is_bound, true) {
                of.bind_upkeep("binding the upkeep thread of the allocator to its CPUs");
            }
            // The next round tries again.
            if let Err(error) = kept.service_round() {
                of.failed_rounds().record("the upkeep of the allocator", &error);
            }
            Some(UPKEEP)
        };
        let upkeep = Background::start("cxl-alloc", "start the upkeep thread of the allocator", None, round)?;
        Ok(Keeper { allocator, upkeep })
    }

    fn end(self) {
        drop(self.upkeep);
        // What cannot be given back is found by the host that takes this host's chunks over.
        let _ = Arc::into_inner(self.allocator).map(Allocator::close);
    }
}

impl Member {
    pub fn new(pool: Pool, host: Host, service: Service) -> Self {
        Member { pool, host, end: Arc::default(), blocks: AtomicUsize::new(0), allocator: Mutex::new(None), service: Some(service) }
    }

    pub fn allocator(&self) -> Outcome<Arc<Allocator>> {
        let mut keeper = held(&self.allocator);
        if let Some(keeper) = &*keeper {
            return Ok(keeper.allocator.clone());
        }
        let started = Keeper::start(&self.host)?;
        Ok(keeper.insert(started).allocator.clone())
    }

    pub fn objects(&self) -> Objects {
        Objects::new(&self.host)
    }

    /// Addresses at which this process maps the pool; none where it has no mapping.
    pub fn addresses(&self) -> Range<usize> {
        let memory = self.pool.lines().memory();
        let start = memory.address(0, cxl_pool::limits::LINE_BYTES as u64).map_or(0, |start| start.addr().get());
        if start == 0 { 0..0 } else { start..start.saturating_add(memory.len_bytes() as usize) }
    }

    /// Deadline of what takes none, in milliseconds.
    pub fn timeout_ms(&self) -> u64 {
        self.host.config().join_timeout_ms()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(keeper) = held(&self.allocator).take() {
            keeper.end();
        }
        let left = self.host.leave();
        self.service = None;
        self.end.tell(left);
    }
}
