// SPDX-License-Identifier: Apache-2.0
//! The counter-examples of LENT.md as choreographies: each passes on the production code, for every seed, and fails with the rule dropped
//! that it is about. Nothing fails by chance in them; what hardware does unasked, and who goes on when, the seed decides.

use super::Scenario;
use super::cache_ledger::{Name, Shared, is_fenced};
use super::cache_stage::HALF_READ;
use super::cache_stage::halting::Halting;
use super::lent::{CHUNK_BYTES, stage};
use super::setup::{Cluster, join, join_over};
use crate::{Env, Failure, Fault, Planned, SimHost, Stats, When};
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::cache::lent::{Lend, Lending, LentRegion, Part, RegionSize, reap};
use cxl_pool::cache::{Cache, CacheConfig, Pulled};
use cxl_pool::copy::CopyConfig;
use cxl_pool::host::Host;
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::{Line, Lines};
use cxl_pool::metrics::MissReason;
use cxl_pool::{Error, Result};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// Every choreography with the name under which its seeds are replayed.
pub const ALL: &[(&str, Scenario)] = &[
    ("z1_same_block_again", same_block_again),
    ("z1_same_block_again_and_no_pin", same_block_again_and_no_pin),
    ("z2_taken_back_while_being_lent", taken_back_while_being_lent),
    ("z3_bytes_never_written", bytes_never_written),
    ("z4_successor_in_the_same_memory", successor_in_the_same_memory),
    ("z5_reaper_on_another_machine", reaper_on_another_machine),
];
/// Visited by each script that came to its end.
pub const PLAYED: &str = "lent_scene.played";

const K: Name = Name(0, 0);
/// Bytes of a block: two parts.
const PARTS: [Part; 2] =
    [Part { start_bytes: 0, stride_bytes: 128, len_bytes: 128 }, Part { start_bytes: 256, stride_bytes: 64, len_bytes: 64 }];
const BLOCK_BYTES: usize = 192;
const SIZE: RegionSize = RegionSize { len_bytes: 384, blocks: 2, parts: 2 };
/// Rounds of a script that does the same again and again.
const ROUNDS: usize = 6;
const TIMEOUT_MS: u64 = 500_000;

/// A play: hosts, and what their scripts tell each other outside of the pool.
struct Play {
    cluster: Cluster,
    ledger: Shared,
    stage: Rc<Cell<u32>>,
    /// The host whose service stands still.
    silent: Rc<Cell<Option<SimHost>>>,
    checksums: bool,
}

/// A process that has joined and opened what it needs.
struct Actor {
    env: Env,
    cache: Cache,
    allocator: Arc<Allocator>,
    ledger: Shared,
    stage: Rc<Cell<u32>>,
}

impl Play {
    /// So many hosts over a pool with so many chunks.
    fn new(seed: u64, hosts: usize, chunks: u64) -> Self {
        // The machine that stays is the first.
        let mut cluster = stage(seed, hosts, (2, 6), chunks);
        let checksums = cluster.random.one_in(2);
        Play { cluster, ledger: Shared::default(), stage: Rc::default(), silent: Rc::default(), checksums }
    }

    fn host(&self, index: usize) -> SimHost {
        self.cluster.hosts[index]
    }

    /// Gives a script to a process of a host, which runs again when the process is started again.
    fn role(&mut self, host: usize, script: impl Fn(&Actor) -> Result<()> + 'static) {
        let (config, ledger, stage) = (self.cluster.host_config.clone(), Rc::clone(&self.ledger), Rc::clone(&self.stage));
        let (script, silent, checksums, host) = (Rc::new(script), Rc::clone(&self.silent), self.checksums, self.host(host));
        self.cluster.world.start(host, move |env| {
            let (config, ledger, stage, script) = (config.clone(), Rc::clone(&ledger), Rc::clone(&stage), Rc::clone(&script));
            let silent = Rc::clone(&silent);
            env.spawn("main", move |env| {
                let memory = Arc::new(Halting { memory: env.memory(), env: env.clone() });
                let lines = Lines::new(memory, env.lines().layout().clone(), &crate::POOL_UUID, crate::POOL_INCARNATION);
                let host = join_over(&env, lines, &config, move || silent.get() == Some(host))?;
                let actor = Actor::enter(&env, host, ledger, stage, checksums)?;
                script(&actor)?;
                env.point(PLAYED);
                Ok(())
            });
        });
    }

    fn run(mut self) -> std::result::Result<Stats, Failure> {
        self.cluster.world.run()
    }
}

impl Actor {
    fn enter(env: &Env, host: Host, ledger: Shared, stage: Rc<Cell<u32>>, checksums: bool) -> Result<Actor> {
        let config = AllocConfig { lock_timeout_ms: Some(TIMEOUT_MS), spare_chunks: 0 };
        let allocator = Arc::new(Allocator::attach(&host, LocalArea::of(&host)?, config)?);
        let copy = Some(CopyConfig::alone());
        let cache =
            CacheConfig { checksums, copy, lock_timeout_ms: Some(TIMEOUT_MS), remembered_keys: 64, upkeep_ms: 1, ..CacheConfig::default() };
        let cache = Cache::open(&host, cache)?;
        Ok(Actor { env: env.clone(), cache, allocator, ledger, stage })
    }

    fn until(&self, stage: u32) {
        while self.stage.get() < stage {
            self.env.platform().sleep_ns(20_000);
        }
    }

    fn create(&self) -> Result<LentRegion> {
        let region = LentRegion::create(&self.cache, &self.allocator, SIZE)?;
        region.set_parts(&PARTS)?;
        Ok(region)
    }

    /// Writes a new version of K to block 0, and sees to it that it leaves the cache soon. Returns its number.
    fn write(&self, region: &LentRegion) -> Result<usize> {
        let (number, bytes) = self.ledger.borrow_mut().publication(K, BLOCK_BYTES);
        let (head, tail) = bytes.split_at(PARTS[0].len_bytes as usize);
        self.env.store(region.memory().offset(), head)?;
        self.env.store(region.memory().offset() + PARTS[1].start_bytes, tail)?;
        self.env.memory().flush_range(region.memory().offset(), region.memory().len_bytes())?;
        Ok(number)
    }

    fn wish() -> Lend {
        Lend { block: 0, namespace: K.namespace(), key: K.key(), parent: None }
    }

    fn lend(&self, region: &LentRegion, number: usize) -> Result<Lending> {
        self.ledger.borrow_mut().commits(number);
        Ok(region.lend_all(&[Self::wish()])?[0])
    }

    /// Pulls K, and checks P1.
    fn pull(&self) -> Result<bool> {
        let mut buffer = [0; BLOCK_BYTES];
        match self.cache.pull(K.namespace(), K.key(), &mut buffer)? {
            Pulled::Hit { len_bytes } => {
                self.ledger.borrow_mut().accepted(&self.env, K, &buffer[..len_bytes as usize], "pull");
                Ok(true)
            }
            Pulled::Miss(MissReason::Checksum) => {
                self.env.fail("P1: bytes that were vouched for have another checksum");
                Ok(false)
            }
            Pulled::Miss(_) => Ok(false),
        }
    }

    fn pull_until(&self, stage: u32) -> Result<()> {
        while self.stage.get() < stage {
            self.pull()?;
        }
        Ok(())
    }

    /// Runs the upkeep of the allocator, until `is_so`.
    fn upkeep_until(&self, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        while !is_so()? {
            self.cache.service_round()?;
            self.allocator.service_round()?;
            self.env.platform().sleep_ns(500_000);
        }
        Ok(())
    }
}

/// Z1: one block is lent, taken back, written and lent again under the same key, while a reader copies it.
fn same_block_again(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut play = Play::new(seed, 2, 8);
    play.role(0, |me| {
        let region = me.create()?;
        for _ in 0..ROUNDS {
            region.take_back(&[0])?;
            let number = me.write(&region)?;
            me.lend(&region, number)?;
            me.stage.set(1);
            me.env.platform().sleep_ns(1 + me.env.below(200_000) as u64);
        }
        region.take_back(&[0])?;
        me.write(&region)?;
        me.env.platform().sleep_ns(100_000);
        me.stage.set(2);
        Ok(())
    });
    play.role(1, |me| {
        me.until(1);
        me.pull_until(2)
    });
    play.run()
}

/// Z1, with a reader that is stopped in the middle and whose host is taken for dead: its pin does not keep the reference any more.
fn same_block_again_and_no_pin(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut play = Play::new(seed, 2, 8);
    let place = if play.checksums { "lent.reference_read" } else { HALF_READ };
    let (reader, silent) = (play.host(1), Rc::clone(&play.silent));
    play.role(0, move |me| {
        let region = me.create()?;
        let number = me.write(&region)?;
        me.lend(&region, number)?;
        me.env.memory().fence_all();
        me.stage.set(1);
        while me.env.view(|view| view.visits_by(reader, place)) == 0 {
            me.env.platform().sleep_ns(100_000);
        }
        silent.set(Some(reader));
        me.until(2);
        region.take_back(&[0])?;
        let number = me.write(&region)?;
        if me.lend(&region, number)? != Lending::Lent {
            return Err(Error::Invalid("the play went another way: a fenced reader's pin counts for nothing".into()));
        }
        me.env.memory().fence_all();
        me.env.resume(reader);
        silent.set(None);
        Ok(())
    });
    play.role(1, move |me| {
        me.until(1);
        let (slot, incarnation, stage, host) = (me.cache.host().slot(), me.cache.host().incarnation(), Rc::clone(&me.stage), me.env.host());
        me.env.plan(Planned { when: When::Point(place, 1), host: Some(host), fault: Fault::PauseThread { for_ns: u64::MAX } });
        me.env.spawn_daemon("watch", move |env| {
            while !env.view(|view| is_fenced(view, slot, incarnation)) {
                env.platform().sleep_ns(500_000);
            }
            stage.set(2);
            Ok(())
        });
        match me.pull() {
            Err(Error::Fenced { .. }) => Ok(()),
            other => other.map(drop),
        }
    });
    play.run()
}

/// Z2: a block is taken back, and written, by another thread than the one that is lending it just now.
fn taken_back_while_being_lent(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut play = Play::new(seed, 2, 8);
    play.role(0, |me| {
        let region = Rc::new(me.create()?);
        let offered = Rc::new(Cell::new(None));
        let (lent, offers, over) = (Rc::clone(&region), Rc::clone(&offered), Rc::clone(&me.stage));
        me.env.spawn("lender", move |env| {
            while over.get() < 2 {
                match offers.take() {
                    Some(offer) => _ = lent.lend(offer)?,
                    None => env.platform().relax(1),
                }
            }
            Ok(())
        });
        for _ in 0..2 * ROUNDS {
            let number = me.write(&region)?;
            me.ledger.borrow_mut().commits(number);
            let visits = me.env.view(|view| view.visits("lent.lent"));
            offered.set(Some(region.offer(&[Actor::wish()])?));
            me.stage.set(1);
            // At once, or once the line says LENT.
            let early = me.env.below(3) == 0;
            while !early && me.env.view(|view| view.visits("lent.lent")) == visits {
                me.env.yield_now()?;
            }
            region.take_back(&[0])?;
            me.write(&region)?;
            me.env.platform().sleep_ns(1 + me.env.below(50_000) as u64);
        }
        me.stage.set(2);
        Ok(())
    });
    play.role(1, |me| {
        me.until(1);
        me.pull_until(2)
    });
    play.run()
}

/// Z3: a block of which the engine has never written a part is pulled as its own host sees it. The memory had another life, which the
/// host's cache remembers.
fn bytes_never_written(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut play = Play::new(seed, 2, 3);
    play.role(0, |me| {
        let mut seen = vec![0; 3 * CHUNK_BYTES as usize];
        let block = me.allocator.alloc(seen.len() as u64)?;
        me.env.memory().copy_out(block.offset, &mut seen)?;
        me.allocator.free(block.offset)?;
        me.allocator.service_round()?;
        me.stage.set(1);
        me.until(2);
        let region = me.create()?;
        let (number, bytes) = me.ledger.borrow_mut().publication(K, PARTS[0].len_bytes as usize);
        me.ledger.borrow_mut().commits(number);
        me.env.store(region.memory().offset(), &bytes)?;
        let mut mine = [0; BLOCK_BYTES];
        me.env.memory().copy_out(region.memory().offset(), &mut mine[..128])?;
        me.env.memory().copy_out(region.memory().offset() + PARTS[1].start_bytes, &mut mine[128..])?;
        if me.lend(&region, number)? != Lending::Lent {
            return Err(Error::Invalid("the play went another way: the block is lent".into()));
        }
        let mut buffer = [0; BLOCK_BYTES];
        let pulled = me.cache.pull(K.namespace(), K.key(), &mut buffer)?;
        if buffer != mine || !matches!(pulled, Pulled::Hit { .. }) {
            me.env.fail(format!("P1: {pulled:?} of a block that is lent, and not as its host saw it"));
        }
        Ok(())
    });
    play.role(1, |me| {
        me.until(1);
        let block = loop {
            match me.allocator.alloc(3 * CHUNK_BYTES) {
                Err(Error::Full { .. }) => me.env.platform().sleep_ns(500_000),
                other => break other?,
            }
        };
        me.env.memory().copy_in(block.offset, &vec![0x77; block.len_bytes as usize])?;
        me.env.memory().fence_all();
        me.allocator.free(block.offset)?;
        me.allocator.service_round()?;
        me.stage.set(2);
        Ok(())
    });
    play.run()
}

/// Z4: a process dies with a block lent; the next one of its machine has a region in the same memory, and writes to the block.
fn successor_in_the_same_memory(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut play = Play::new(seed, 2, 3);
    play.role(1, |me| {
        if me.env.generation() == 0 {
            let region = me.create()?;
            let number = me.write(&region)?;
            me.lend(&region, number)?;
            me.env.memory().fence_all();
            me.stage.set(1);
            me.until(2);
            me.env.inflict(me.env.host(), Fault::CrashProcess { restart_after_ns: Some(100_000) });
        }
        let mut region = None;
        me.upkeep_until(|| match me.create() {
            Err(Error::Full { .. } | Error::Fenced { .. }) => Ok(false),
            made => {
                region = Some(made?);
                Ok(true)
            }
        })?;
        if let Some(region) = region {
            me.write(&region)?;
            me.env.memory().fence_all();
            me.stage.set(3);
        }
        Ok(())
    });
    play.role(0, |me| {
        me.until(1);
        if me.pull()? {
            me.stage.set(2);
        }
        // By and by the process that comes next serves what the first one had.
        me.pull_until(3)?;
        for _ in 0..10 {
            me.pull()?;
        }
        me.stage.set(2.max(me.stage.get()));
        Ok(())
    });
    play.run()
}

/// Z5: the host of a process that died leaves; another host gets its chunks. What the process wrote is still in its machine's cache.
fn reaper_on_another_machine(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut play = Play::new(seed, 2, 3);
    let (gone, dying) = (play.host(1), Rc::new(Cell::new(None)));
    let died = Rc::clone(&dying);
    play.role(1, move |me| {
        died.set(Some(me.env.process()));
        let len_bytes = CHUNK_BYTES;
        let region = LentRegion::create(&me.cache, &me.allocator, RegionSize { len_bytes, ..SIZE })?;
        let (_, bytes) = me.ledger.borrow_mut().publication(K, len_bytes as usize);
        me.env.memory().fence_all();
        me.stage.set(me.stage.get() + 1);
        me.until(2);
        // More lines than the cache writes back by itself before the other host has the memory.
        me.env.store(region.memory().offset(), &bytes)?;
        me.env.exit()
    });
    // Another process of the same host.
    let (config, stage) = (play.cluster.host_config.clone(), Rc::clone(&play.stage));
    play.cluster.world.start(gone, move |env| {
        let (config, stage, dying) = (config.clone(), Rc::clone(&stage), Rc::clone(&dying));
        env.spawn("sibling", move |env| {
            let host = join(&env, &config)?;
            stage.set(stage.get() + 1);
            while stage.get() < 2 {
                env.platform().sleep_ns(20_000);
            }
            while dying.get().is_some_and(|dying| env.view(|view| view.is_alive(dying))) {
                env.yield_now()?;
            }
            host.leave()?;
            stage.set(3);
            env.point(PLAYED);
            Ok(())
        });
    });
    play.role(0, |me| {
        me.until(3);
        // It has the chunks of the host that left, and leaves the region in them alone.
        me.upkeep_until(|| Ok(me.allocator.adopt_dead()? > 0 || !me.allocator.kept_blocks().is_empty()))?;
        if reap(me.cache.host(), &me.allocator)? == 0 {
            return Ok(());
        }
        let mut lines = Vec::new();
        for _ in 0..3 {
            let block = me.allocator.alloc(CHUNK_BYTES)?;
            lines.extend((block.offset..block.offset + block.len_bytes).step_by(LINE_BYTES));
        }
        let offsets = || lines.iter().copied();
        let line = |offset: u64| Line([(offset / LINE_BYTES as u64) as u8 | 1; LINE_BYTES]);
        offsets().try_for_each(|offset| me.env.memory().write_line(offset, &line(offset)))?;
        me.env.memory().fence_all();
        for _ in 0..20 {
            for offset in offsets() {
                if me.env.lines().fetch_raw(offset)? != line(offset) {
                    me.env.fail(format!("P3: another process wrote to {offset:#x}, which is this process's"));
                }
            }
        }
        Ok(())
    });
    play.run()
}
