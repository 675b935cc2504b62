// SPDX-License-Identifier: Apache-2.0
//! Processes of several hosts write blocks of their regions with plain stores, lend them, take them back and write them again, while others
//! pull them, and blocks of the same keys are published, evicted and lent elsewhere; hosts and processes crash, stand still, are fenced
//! wrongly; regions are closed, and those of dead processes reaped.
//!
//! Checked: P1 what a pull accepts is what one process lent, or published, under that key, complete; P3 no process writes to memory that
//! was given back: not a late store, not a line out of a cache; and, where nothing crashes, that every region's memory is given back once.

use super::cache_ledger::{Name, Shared};
use super::setup::{Cluster, join, no_line_half_done};
use crate::{Chances, Env, Failure, Fault, Planned, Random, Stats, When, WritePath};
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea, audit};
use cxl_pool::cache::lent::{Lend, Lending, LentRegion, Offer, Part, RegionSize, reap};
use cxl_pool::cache::{Cache, CacheConfig, Published, Pulled};
use cxl_pool::copy::CopyConfig;
use cxl_pool::host::HostConfig;
use cxl_pool::limits::{DEVICE_HEADER_BYTES, LINE_BYTES};
use cxl_pool::line::Line;
use cxl_pool::media::{CellClass, Geometry, Layout};
use cxl_pool::metrics::MissReason;
use cxl_pool::{Error, Result};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

/// Chunks of the allocator: so few that memory goes from one host to the other.
const CHUNKS: u64 = 10;
pub(super) const CHUNK_BYTES: u64 = 4096;
/// Rounds of the thread that uses and gives back memory.
const RECYCLED: u8 = 20;
/// Where zombies are made.
const ZOMBIES: &[&str] =
    &["lent.copied", "lent.lent", "lent.reference_read", "lent.referred", "lent.taken_back", "lent.written_back", "cache.commit"];
/// Visited for each block that was pulled from where it was lent.
pub const HIT: &str = "lent_scene.hit";

/// What a run is made of.
#[derive(Clone)]
struct Plan {
    host: HostConfig,
    cache: CacheConfig,
    size: RegionSize,
    parts: Vec<Part>,
    keys: u16,
    /// Operations of each start of a process.
    operations: usize,
    /// Whether another thread of the process lends.
    lender: bool,
    half_written: bool,
}

impl Plan {
    fn block_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.len_bytes as usize).sum()
    }
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with one more fault.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let mut sizes = Random::new(seed ^ 0x1e47_1e47);
    let hosts = sizes.pick(&[2, 2, 2, 3]);
    let calm = planned.is_none() && sizes.one_in(3);
    let mut cluster = Cluster::new(seed, hosts, hosts + 1, |config, random| {
        if calm {
            config.chances = Chances::default();
        }
        no_line_half_done(config, seed);
        if matches!(planned, Some(Planned { fault: Fault::CrashMachine { .. }, .. })) {
            config.write_path = WritePath::OneUnit;
        }
        let geometry = &mut config.geometry;
        (geometry.cells_per_chunk, geometry.stripes, geometry.chunk_bytes) = (random.pick(&[2, 4]), 1, CHUNK_BYTES);
        geometry.cells[0] = CellClass { cell_bytes: 64, chunks: random.between(3, 8) };
        geometry.cells[1] = CellClass { cell_bytes: 512, chunks: random.between(2, 4) };
        geometry.len_bytes = len_bytes_of(*geometry, CHUNKS);
    });
    let half_written = cluster.world.geometry().slots > 0 && seed % 2 == 1;
    let plan = plan(&mut cluster, half_written);
    let ledger = Shared::default();
    for host in cluster.hosts.clone() {
        let (ledger, plan) = (Rc::clone(&ledger), plan.clone());
        cluster.world.start(host, move |env| {
            let (ledger, plan) = (Rc::clone(&ledger), plan.clone());
            env.spawn("engine", move |env| main(&env, &ledger, &plan));
        });
    }
    if let Some(planned) = planned {
        cluster.world.plan(planned);
    } else if !calm {
        for _ in 0..cluster.random.pick(&[0, 1, 3]) {
            let when = When::Point(cluster.random.pick(ZOMBIES), cluster.random.between(1, 12));
            let for_ns = cluster.random.between(2, 40) * 1_000_000;
            let fault = if cluster.random.one_in(2) { Fault::PauseThread { for_ns } } else { Fault::PauseHost { for_ns } };
            cluster.world.plan(Planned { when, host: None, fault });
        }
    }
    let stats = cluster.world.run()?;
    let kept = audit(&cluster.world.inspector()).map_or(0, |audit| audit.kept_blocks);
    if stats.crashes == 0 && kept > 0 {
        return Err(cluster.world.failure(format!("P4: {kept} regions were never given back, and no process crashed")));
    }
    Ok(stats)
}

/// Hosts for a choreography, in which nothing fails by chance: over a pool with so many chunks for the allocator, and cells of 64 bytes for
/// the cache, so many of them in each of so many chunks. The first machine has the only seat.
pub(super) fn stage(seed: u64, hosts: usize, cells: (u32, u64), chunks: u64) -> Cluster {
    stage_with(seed, hosts, (hosts, None), cells, chunks)
}

/// The same with another number of slots than of machines, and with so many seats where a number is given.
pub(super) fn stage_with(
    seed: u64,
    hosts: usize,
    (slots, seats): (usize, Option<u32>),
    (cells_per_chunk, cell_chunks): (u32, u64),
    chunks: u64,
) -> Cluster {
    let mut cluster = Cluster::new(seed, hosts, slots, |config, _| {
        config.chances = Chances::default();
        config.write_path = if seed.is_multiple_of(2) { WritePath::OneUnit } else { WritePath::StoresAndFlush };
        let geometry = &mut config.geometry;
        geometry.seats = seats.unwrap_or(geometry.seats);
        (geometry.cells_per_chunk, geometry.stripes, geometry.chunk_bytes) = (cells_per_chunk, 1, CHUNK_BYTES);
        geometry.cells[0] = CellClass { cell_bytes: 64, chunks: cell_chunks };
        geometry.len_bytes = len_bytes_of(*geometry, chunks);
    });
    cluster.host_config.seats.truncate(1);
    cluster.host_config.suspect_ms = 30;
    cluster
}

/// A pool with room for so few chunks.
fn len_bytes_of(mut geometry: Geometry, chunks: u64) -> u64 {
    geometry.len_bytes = DEVICE_HEADER_BYTES + CHUNK_BYTES;
    while Layout::new(geometry).map_or(0, |layout| layout.chunks()) < chunks {
        geometry.len_bytes += CHUNK_BYTES;
    }
    geometry.len_bytes
}

fn plan(cluster: &mut Cluster, half_written: bool) -> Plan {
    let random = &mut cluster.random;
    let blocks = random.between(1, 4) as u32;
    // Parts that share lines with their neighbours, and parts that do not.
    let lens: &[u64] = random.pick(&[&[64, 64][..], &[40, 100], &[200], &[24, 64, 72]]);
    let (mut parts, mut end) = (Vec::new(), 0);
    for &len_bytes in lens {
        let stride_bytes = len_bytes.next_multiple_of(random.pick(&[8, 64]));
        parts.push(Part { start_bytes: end, stride_bytes, len_bytes });
        end += stride_bytes * u64::from(blocks);
    }
    Plan {
        host: cluster.host_config.clone(),
        cache: CacheConfig {
            checksums: random.one_in(2),
            low_water_percent: 0,
            high_water_percent: 40,
            lock_timeout_ms: Some(500_000),
            service_ms: 1,
            upkeep_ms: 3,
            remembered_keys: 64,
            copy: Some(CopyConfig::alone()),
            ..CacheConfig::default()
        },
        size: RegionSize { len_bytes: end, blocks, parts: parts.len() },
        parts,
        keys: random.pick(&[1, 2, 4]),
        operations: random.pick(&[20, 40, 60]),
        lender: random.one_in(2),
        half_written,
    }
}

/// What one thread decided to lend and another one is to, with the region.
type Offers = Rc<RefCell<VecDeque<(Rc<LentRegion>, Offer)>>>;

/// One process.
struct Engine<'a> {
    env: &'a Env,
    ledger: &'a Shared,
    plan: &'a Plan,
    cache: Cache,
    allocator: Arc<Allocator>,
    region: Rc<RefCell<Option<Rc<LentRegion>>>>,
    /// What each block was last written with.
    content: Vec<Option<(Name, usize)>>,
    /// What another thread is to lend.
    offers: Offers,
}

fn main(env: &Env, ledger: &Shared, plan: &Plan) -> Result<()> {
    let host = join(env, &plan.host)?;
    let config = AllocConfig { lock_timeout_ms: Some(500_000), spare_chunks: 0 };
    let allocator = Arc::new(again(env, plan, || Allocator::attach(&host, LocalArea::of(&host)?, config.clone()))?);
    let cache = again(env, plan, || Cache::open(&host, plan.cache.clone()))?;
    let mut engine = Engine {
        env,
        ledger,
        plan,
        cache: cache.clone(),
        allocator: Arc::clone(&allocator),
        region: Rc::default(),
        content: Vec::new(),
        offers: Rc::default(),
    };
    let busy = Rc::new(Cell::new(true));
    let (seen, of, kept, held) = (plan.clone(), cache.clone(), Arc::clone(&allocator), Rc::clone(&engine.region));
    env.spawn_daemon("upkeep", move |env| upkeep(&env, &seen, &of, &kept, &held));
    let (of, recycled) = (plan.clone(), Arc::clone(&allocator));
    env.spawn("recycler", move |env| recycle(&env, &of, &recycled));
    if plan.lender {
        let (of, offers, working) = (plan.clone(), Rc::clone(&engine.offers), Rc::clone(&busy));
        env.spawn("lender", move |env| lend(&env, &of, &offers, &working));
    }
    for _ in 0..plan.operations {
        engine.operate()?;
    }
    busy.set(false);
    engine.close()
}

/// What a fence, a full pool, or a line of a writer that stands still may do to any call.
fn tolerated<T>(env: &Env, plan: &Plan, result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(done) => return Ok(Some(done)),
        Err(Error::Full { .. }) => {}
        Err(Error::Fenced { .. }) => env.platform().sleep_ns(300_000),
        Err(Error::BadLine { .. }) if plan.half_written => env.platform().sleep_ns(300_000),
        Err(error) => return Err(error),
    }
    Ok(None)
}

/// Repeats what a fence cut short.
fn again<T>(env: &Env, plan: &Plan, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 0..20_000 {
        match work() {
            Err(Error::Fenced { .. }) => env.platform().sleep_ns(500_000),
            Err(Error::BadLine { .. }) if plan.half_written => env.platform().sleep_ns(500_000),
            other => return other,
        }
    }
    work()
}

type Region = Rc<RefCell<Option<Rc<LentRegion>>>>;

fn upkeep(env: &Env, plan: &Plan, cache: &Cache, allocator: &Allocator, region: &Region) -> Result<()> {
    loop {
        tolerated(env, plan, cache.service_round())?;
        tolerated(env, plan, allocator.service_round())?;
        tolerated(env, plan, reap(cache.host(), allocator))?;
        let region = region.borrow().clone();
        if let Some(region) = region {
            tolerated(env, plan, region.tidy())?;
        }
        env.platform().sleep_ns(1_000_000);
    }
}

/// Lends what the engine has offered.
fn lend(env: &Env, plan: &Plan, offers: &Offers, busy: &Cell<bool>) -> Result<()> {
    while busy.get() || !offers.borrow().is_empty() {
        let next = offers.borrow_mut().pop_front();
        match next {
            // What is lent after an error is taken back before it is written, as everything.
            Some((region, offer)) => _ = tolerated(env, plan, region.lend(offer))?,
            None => env.platform().sleep_ns(100_000),
        }
    }
    Ok(())
}

/// Uses and gives back memory of the pool: a process that still writes to what was given back is seen here.
fn recycle(env: &Env, plan: &Plan, allocator: &Allocator) -> Result<()> {
    for round in 0..RECYCLED {
        env.platform().sleep_ns(1 + env.below(2_000_000) as u64);
        let Some(block) = tolerated(env, plan, allocator.alloc(1 + env.below(2 * CHUNK_BYTES as usize) as u64))? else { continue };
        let lines = env.lines();
        let offsets = || (block.offset..block.offset + block.len_bytes).step_by(LINE_BYTES);
        let line = |offset: u64| Line([round ^ (offset / LINE_BYTES as u64) as u8 ^ env.process().0 as u8; LINE_BYTES]);
        for offset in offsets() {
            lines.memory().write_line(offset, &line(offset))?;
        }
        lines.memory().fence_all();
        env.platform().sleep_ns(1 + env.below(3_000_000) as u64);
        for offset in offsets() {
            let found = lines.fetch_raw(offset)?;
            if found != line(offset) && !plan.half_written {
                env.fail(format!("P3: another process wrote to {offset:#x}, which is this process's: {found:?}"));
            }
        }
        tolerated(env, plan, allocator.free(block.offset))?;
    }
    Ok(())
}

impl Engine<'_> {
    fn name(&self) -> Name {
        Name(0, self.env.below(self.plan.keys.into()) as u16)
    }

    fn region(&self) -> Option<Rc<LentRegion>> {
        self.region.borrow().clone()
    }

    fn operate(&mut self) -> Result<()> {
        if self.env.below(3) == 0 {
            self.env.platform().sleep_ns(1 + self.env.below(1_000_000) as u64);
        }
        let Some(region) = self.region() else { return self.create() };
        match self.env.below(24) {
            0..6 => self.write(&region),
            6..11 => self.lend(&region),
            11 => self.take_back(&region),
            12..19 => self.pull(),
            19 => self.pin(),
            20 => self.publish(),
            21 => tolerated(self.env, self.plan, self.cache.evict(self.name().namespace(), self.name().key())).map(drop),
            22 if self.env.below(3) == 0 => {
                drop(region);
                self.close()
            }
            _ => self.pull(),
        }
    }

    fn create(&mut self) -> Result<()> {
        let Some(region) = tolerated(self.env, self.plan, LentRegion::create(&self.cache, &self.allocator, self.plan.size))? else {
            return Ok(());
        };
        region.set_parts(&self.plan.parts)?;
        self.content = vec![None; region.blocks() as usize];
        *self.region.borrow_mut() = Some(Rc::new(region));
        Ok(())
    }

    fn close(&mut self) -> Result<()> {
        let Some(region) = self.region.take() else { return Ok(()) };
        // A process that lends from it gives it up first.
        while Rc::strong_count(&region) > 1 {
            self.env.platform().sleep_ns(100_000);
        }
        again(self.env, self.plan, || region.close())
    }

    /// Takes blocks back and writes to one of them.
    fn write(&mut self, region: &LentRegion) -> Result<()> {
        let block = self.env.below(self.content.len()) as u32;
        match self.env.below(3) {
            0 => region.take_back_all()?,
            _ => region.take_back(&[block])?,
        };
        let name = self.name();
        let (number, bytes) = self.ledger.borrow_mut().publication(name, self.plan.block_bytes());
        let mut at = 0;
        for part in &self.plan.parts {
            let len_bytes = part.len_bytes as usize;
            self.env
                .store(region.memory().offset() + part.start_bytes + u64::from(block) * part.stride_bytes, &bytes[at..at + len_bytes])?;
            at += len_bytes;
        }
        self.content[block as usize] = Some((name, number));
        Ok(())
    }

    fn lend(&mut self, region: &Rc<LentRegion>) -> Result<()> {
        let count = 1 + self.env.below(self.content.len());
        let wishes = self.content.iter().enumerate().filter_map(|(block, content)| {
            let (name, number) = (*content)?;
            self.ledger.borrow_mut().commits(number);
            Some(Lend { block: block as u32, namespace: name.namespace(), key: name.key(), parent: None })
        });
        let wishes: Vec<Lend> = wishes.take(count).collect();
        let offer = match region.offer(&wishes) {
            // The other thread is still at it.
            Err(Error::Invalid(_)) if self.plan.lender => return Ok(()),
            other => other?,
        };
        if self.plan.lender && self.env.below(3) > 0 {
            self.offers.borrow_mut().push_back((Rc::clone(region), offer));
            return Ok(());
        }
        if let Some(answers) = tolerated(self.env, self.plan, region.lend(offer))?
            && answers.contains(&Lending::TakenBack)
        {
            self.env.fail("P5: a block was not lent because it was taken back, and it was not");
        }
        Ok(())
    }

    fn take_back(&self, region: &LentRegion) -> Result<()> {
        region.take_back(&[self.env.below(self.content.len()) as u32]).map(drop)
    }

    fn pull(&self) -> Result<()> {
        let name = self.name();
        let mut buffer = vec![0; self.plan.block_bytes()];
        let before = self.cache.metrics().lent_pulled_total.get();
        match tolerated(self.env, self.plan, self.cache.pull(name.namespace(), name.key(), &mut buffer))? {
            Some(Pulled::Hit { len_bytes }) => {
                self.ledger.borrow_mut().accepted(self.env, name, &buffer[..len_bytes as usize], "pull");
                if self.cache.metrics().lent_pulled_total.get() > before {
                    self.env.point(HIT);
                }
            }
            Some(Pulled::Miss(MissReason::Checksum)) => self.env.fail("P1: bytes that were vouched for have another checksum"),
            Some(Pulled::Miss(_)) | None => {}
        }
        Ok(())
    }

    /// A pin of a lent block keeps nothing from being taken back: what is copied later is right, or a miss.
    fn pin(&self) -> Result<()> {
        let name = self.name();
        let Some(Ok(pinned)) = tolerated(self.env, self.plan, self.cache.pin(name.namespace(), name.key()))? else { return Ok(()) };
        self.env.platform().sleep_ns(1 + self.env.below(1_000_000) as u64);
        let mut buffer = vec![0; pinned.len_bytes() as usize];
        match tolerated(self.env, self.plan, pinned.copy_to(&mut buffer))? {
            Some(None) => self.ledger.borrow_mut().accepted(self.env, name, &buffer, "copy of a pinned block"),
            Some(Some(MissReason::Checksum)) => self.env.fail("P1: bytes that were vouched for have another checksum"),
            _ => {}
        }
        Ok(())
    }

    /// Publishes an ordinary block under a key that blocks are lent under.
    fn publish(&self) -> Result<()> {
        let name = self.name();
        let (number, bytes) = self.ledger.borrow_mut().publication(name, self.plan.block_bytes());
        self.ledger.borrow_mut().commits(number);
        tolerated(self.env, self.plan, self.cache.publish(name.namespace(), name.key(), None, &bytes)).map(|_: Option<Published>| ())
    }
}
