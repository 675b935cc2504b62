// SPDX-License-Identifier: Apache-2.0
//! The shared prefix cache: blocks of KV cache that one host publishes and every host of the pool pulls (TraCT sections 4.2 and 4.3).
//!
//! The specification is protocols/CACHE.md. In short: the truth about a block is the descriptor of its cell, written by the cell's owner
//! alone; the hash table only says where to look; a pull looks at the descriptor before and after it copies. Whatever is in doubt is a
//! miss.
//!
//! | module | what it does |
//! |---|---|
//! | [`namespace`] | what blocks are called |
//! | `index` | hints, from a key to a cell: `lookup` reads them, `insert` writes them, `hint_room` makes room for them |
//! | `cells`, `cells::store` | what this process knows of its own cells, and the state of the rooms under it |
//! | `cells::claims`, `cells::adopt` | who owns which cells, and what becomes of those of a host that is gone |
//! | `cells::allocate`, `cells::evict`, [`policy`] | a cell for a block, and making room for one |
//! | `cells::quota`, `cells::usage` | what a namespace may have, and has |
//! | `cells::recency`, `cells::owner_requests` | when hosts last used a block; requests to owners |
//! | `cells::local`, `cells::residue` | what the processes of this host share of it, and what they leave in the machine's caches |
//! | `publish` | reserve, fill, commit |
//! | `pull` | pin, copy, verify; `fences` of the hosts that blocks are of |
//! | `pull::pins`, `pull::pinned` | what this host uses, for others to see; the block that a pin keeps |
//! | `batch` | publish and pull of several blocks with shared fences |
//! | [`queued`] | blocks of a GPU that are copied asynchronously, in the order of a stream |
//! | `service` | the upkeep that has to run |
//! | [`events`], `observe::watch` | what happened, for listeners; which blocks of a namespace come and go in the whole pool |
//! | [`survey`] | the contents of the cache of a pool, and why a key is absent |
//! | [`tier`] | lists of blocks for a storage tier, and calls that are dropped in the middle |
//! | [`trace`] | a record of requests and publishes, by salted ids |
//!
//! The documentation of the crate has an example.

mod batch;
mod cells;
mod coldest;
mod config;
mod hashing;
mod index;
#[cfg(feature = "faults")]
pub mod inspect;
mod locks;
pub mod namespace;
mod observe;
pub mod policy;
mod publish;
mod pull;
pub mod queued;
mod service;
pub mod survey;
pub mod tier;
pub mod trace;

pub(crate) use cells::residue::HOOKS;
pub use cells::usage::Share;
pub use coldest::ColdBlock;
pub use config::CacheConfig;
pub use index::lookup::BlockInfo;
pub use index::presence::Presence;
pub use namespace::{BlockKey, Namespace, NamespaceFields, Salt, chain};
pub use observe::events;
pub use observe::watch::{Changes, Watch};
pub use publish::reservation::Reservation;
pub use publish::{PublishRequest, Published, Reserved};
pub use pull::Pulled;
pub use pull::pinned::Pinned;
pub use service::Upkeep;

use crate::copy::{AheadEngine, ByPlace, CopyConfig, CopyEngine, CudaConfig, LocalPlace, LocalRange};
use crate::cpus::ThreadKind;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::limits::CELL_CLASSES;
use crate::line::Lines;
use crate::lock::LOCK_CELLS;
use crate::media::{Geometry, Stripes};
use crate::metrics::{Metrics, MissReason};
use events::{Events, Subscriber};
use smallvec::SmallVec;
use std::sync::Arc;

/// The cache as one process uses it. Cheap to clone; every clone is the same. All methods may be called from any thread.
///
/// The program has to call [`Cache::service_round`] regularly, or [`Cache::serve`] once: otherwise this process never makes room ahead, and
/// takes over nothing that others leave. [`Cache::close`] ends it. Dropped without that, its cells stay this process's, and no other cache
/// can be opened, until the process ends.
#[derive(Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

/// A list that mostly has one entry, which then costs no allocation.
type Few<T> = SmallVec<[T; 1]>;

/// What the clones of a [`Cache`], its reservations and its pins share. Each part can be used alone; the methods here join several.
struct Inner {
    host: Host,
    config: CacheConfig,
    index: index::Index,
    store: cells::store::CellStore,
    pins: pull::pins::Pins,
    requests: cells::owner_requests::OwnerRequests,
    upkeep: service::UpkeepState,
    copier: pull::copy::Copier,
    flights: queued::Flights,
    events: Events,
    metrics: Arc<Metrics>,
}

impl Inner {
    fn lines(&self) -> &Lines {
        self.host.lines()
    }

    fn geometry(&self) -> &Geometry {
        self.host.lines().layout().geometry()
    }
}

impl Cache {
    /// Opens the cache of the pool that `host` has joined, and takes over what this host has and no living process of it.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the pool was formatted without cells; [`Error::Exists`] when this process has opened it and not closed it;
    /// those of [`Host::acquire`].
    pub fn open(host: &Host, config: CacheConfig) -> Result<Cache> {
        let geometry = host.lines().layout().geometry();
        let stripes = if geometry.striped_devices() > 1 { Some(Stripes::of(geometry)?) } else { None };
        let copy = match config.copy {
            Some(copy) => copy,
            None => CopyConfig::from_env()?,
        };
        let cuda = match &config.cuda {
            Some(cuda) => cuda.clone(),
            None => CudaConfig::from_env()?,
        };
        cuda.check()?;
        let memory = host.lines().memory().clone();
        let cpus = host.config().cpus.set_of(ThreadKind::Copy);
        let engine = Arc::new(ByPlace::new(crate::copy::engine(copy, stripes, cpus)?, memory.clone(), cuda));
        Self::open_with(host, config, AheadEngine::over(engine, memory, &copy, cpus))
    }

    /// As [`Cache::open`], with a copy engine of the caller's choice.
    ///
    /// # Errors
    /// As [`Cache::open`].
    pub fn open_with(host: &Host, config: CacheConfig, engine: Arc<dyn CopyEngine>) -> Result<Cache> {
        config.check()?;
        if host.geometry().cell_chunks() == 0 {
            return Err(Error::Invalid("the pool has no cells: format it with some to use it as a prefix cache".into()));
        }
        // Through a fence and re-join of this host, if it is in the middle of one.
        drop(host.acquire(LOCK_CELLS, config.lock_timeout_ms(host))?);
        let local = cells::local::LocalCells::over(host.lines().layout(), host.local_part(&HOOKS)?)?;
        let metrics = config.metrics.clone().unwrap_or_default();
        let locks = locks::CacheLocks { host: host.clone(), timeout_ms: config.lock_timeout_ms(host), metrics: metrics.clone() };
        let events = Events::new();
        let fences = pull::fences::FenceView::of(host);
        let inner = Inner {
            index: index::Index::new(&locks, config.remembered_keys),
            store: cells::store::CellStore::new(&locks, &local, &events, config.policy),
            pins: pull::pins::Pins::new(host, &local),
            requests: cells::owner_requests::OwnerRequests::new(host, &local, config.service_ms),
            upkeep: service::UpkeepState::new(host, &metrics, &engine)?,
            copier: pull::copy::Copier { host: host.clone(), fences, engine, checksums: config.checksums },
            flights: queued::Flights::default(),
            events,
            metrics,
            host: host.clone(),
            config,
        };
        inner.pins.open_notes()?;
        let ready = inner.requests.skip_asks().and_then(|()| inner.follow_ticks()).and_then(|()| inner.store.lock_claims().map(drop));
        ready.and_then(|()| inner.store.sweep(usize::MAX)).inspect_err(|_| inner.pins.close_notes())?;
        Ok(Cache { inner: Arc::new(inner) })
    }

    /// The host that this is the cache of.
    pub fn host(&self) -> &Host {
        &self.inner.host
    }

    /// How it behaves.
    pub fn config(&self) -> &CacheConfig {
        &self.inner.config
    }

    /// What this process counted.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.inner.metrics
    }

    /// What copies payload, with its counters.
    pub fn copy_engine(&self) -> &dyn CopyEngine {
        &*self.inner.copier.engine
    }

    /// Listens to what happens to this process's blocks from now on.
    pub fn subscribe(&self) -> Subscriber {
        self.inner.events.subscribe()
    }

    /// The source of these events.
    pub fn events(&self) -> &Events {
        &self.inner.events
    }

    /// Whether a block is there. Advice: it may go right afterwards.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn lookup(&self, namespace: Namespace, key: BlockKey) -> Result<Option<BlockInfo>> {
        let found = self.inner.index.look_up(namespace, key)?;
        self.count_lookup(usize::from(found.is_some()), 1);
        Ok(found)
    }

    /// The leading blocks of a chain that are there; as many answers as blocks of the longest cached prefix. Advice, as [`Cache::lookup`].
    ///
    /// # Errors
    /// Those of the memory.
    pub fn lookup_chain(&self, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<BlockInfo>> {
        let found = self.inner.index.look_up_chain(namespace, keys)?;
        self.count_lookup(found.len(), keys.len());
        Ok(found)
    }

    fn count_lookup(&self, hits: usize, asked: usize) {
        self.inner.metrics.hits_total.add(hits as u64);
        // Blocks after the first that is missing were not looked for.
        if hits < asked {
            self.inner.metrics.misses_total.of(MissReason::Absent).inc();
        }
    }

    /// Pins a block, so that it stays until the result is dropped.
    ///
    /// # Errors
    /// [`Error::Full`] when this process has too many pins; [`Error::Fenced`]; those of the memory.
    pub fn pin(&self, namespace: Namespace, key: BlockKey) -> Result<std::result::Result<Pinned, MissReason>> {
        let answer = self.inner.pin_block(namespace, key)?;
        match &answer {
            Ok(_) => self.inner.metrics.hits_total.inc(),
            Err(reason) => self.inner.metrics.misses_total.of(*reason).inc(),
        }
        Ok(answer)
    }

    /// Pins the leading blocks of a chain that are there: hits that stay, for a scheduler that skips their prefill.
    ///
    /// # Errors
    /// As [`Cache::pin`].
    pub fn pin_chain(&self, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<Pinned>> {
        let pinned = self.inner.pin_chain(namespace, keys)?;
        self.count_lookup(pinned.len(), keys.len());
        Ok(pinned)
    }

    /// Copies a block into `destination`, which may be longer than the block.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the destination is too short; [`Error::Full`], [`Error::Fenced`]; those of the memory, except damage of the
    /// block itself, which is a miss.
    pub fn pull(&self, namespace: Namespace, key: BlockKey, destination: &mut [u8]) -> Result<Pulled> {
        let start_ns = self.inner.host.platform().now_ns();
        let address = std::ptr::NonNull::from(&mut *destination).cast::<u8>();
        let len_bytes = destination.len();
        let pulled = self.inner.pull_block(namespace, key, |block| match usize::try_from(block.len_bytes()) {
            // SAFETY: the range lies inside `destination`, which this call borrows for longer than any list lives, and which is ordinary
            // memory of the caller.
            Ok(wanted) if wanted <= len_bytes => unsafe { block.scatter_in(LocalPlace::Host, [LocalRange { address, len_bytes: wanted }]) },
            _ => Err(Error::Invalid(format!("the destination has {len_bytes} bytes, the block {}", block.len_bytes()))),
        });
        match &pulled {
            Ok(pulled) => self.count_pulled(pulled),
            Err(error) => self.count_failed(error, 1),
        }
        self.inner.metrics.pull_seconds.observe(self.inner.host.platform().now_ns().saturating_sub(start_ns));
        pulled
    }

    fn count_pulled(&self, pulled: &Pulled) {
        let metrics = &self.inner.metrics;
        match pulled {
            Pulled::Hit { len_bytes } => {
                metrics.hits_total.inc();
                metrics.pull_total.inc();
                metrics.pull_bytes_total.add(*len_bytes);
            }
            Pulled::Miss(reason) => metrics.misses_total.of(*reason).inc(),
        }
    }

    fn count_failed(&self, error: &Error, blocks: u64) {
        let reason = match error {
            Error::Fenced { .. } => MissReason::HostFenced,
            Error::Full { .. } => MissReason::PinsFull,
            Error::Invalid(_) => MissReason::Length,
            _ => MissReason::Device,
        };
        self.inner.metrics.misses_total.of(reason).add(blocks);
    }

    /// What each namespace has in this process's cells.
    pub fn shares(&self) -> Vec<(Namespace, Share)> {
        self.inner.store.cells().usage.shares()
    }

    /// What this process's cells are.
    pub fn usage(&self) -> CellUsage {
        let own = self.inner.store.cells();
        let mut usage = CellUsage { quarantined: own.count_quarantined(), ..CellUsage::default() };
        for class in 0..CELL_CLASSES {
            let (free, ready, all) = own.counts(class);
            usage.free += free;
            usage.ready += ready;
            usage.owned += all;
        }
        usage
    }

    /// Blocks that this process has pinned.
    pub fn pinned(&self) -> usize {
        self.inner.pins.cells()
    }

    /// Ends the use of the cache in good order: pins go, and other processes of this host, or other hosts, take over the cells. A [queued]
    /// copy that has not ended is not committed; this waits until the GPU does nothing for it any more.
    ///
    /// # Errors
    /// [`Error::Invalid`] while clones, reservations or pins are alive: nothing has ended, and a clone can be closed later;
    /// [`Error::Fenced`].
    pub fn close(self) -> Result<()> {
        self.inner.flights.cancel();
        let Some(inner) = Arc::into_inner(self.inner) else {
            return Err(Error::Invalid("a clone, a reservation or a pin of the cache is still alive: drop it first".into()));
        };
        inner.shut()
    }
}

/// Cells of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CellUsage {
    /// All.
    pub owned: u64,
    /// With nothing in them.
    pub free: u64,
    /// With a block.
    pub ready: u64,
    /// Held back until their other claimants are proven to have ended.
    pub quarantined: u64,
}

#[cfg(test)]
mod tests;
