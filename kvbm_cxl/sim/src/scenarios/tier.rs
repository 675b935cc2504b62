// SPDX-License-Identifier: Apache-2.0
//! Workers of a storage tier on several hosts put lists of blocks, ask for them and get them, in turns of a few blocks. They drop calls at
//! any moment and give the memory to another use at once; blocks are evicted meanwhile; hosts and processes crash, stand still, and are
//! fenced wrongly.
//!
//! Checked: P1 what a get accepts, and what a READY cell holds, is what one put found in its memory while its call lived, complete; T1 and
//! T2, where nothing fails and there is room for all: what a put says is there is found by has and by get; T3 no call touches memory after
//! it was dropped.

use super::cache_ledger::{Name, Shared};
use super::setup::{Cluster, join, no_line_half_done};
use super::tier_memory::Memory;
use crate::{Chances, Env, Failure, Fault, Planned, Random, Stats, When, WritePath};
use cxl_pool::cache::tier::{Answer, TierBlock, TierBlocks};
use cxl_pool::cache::{Cache, CacheConfig};
use cxl_pool::copy::CopyConfig;
use cxl_pool::host::HostConfig;
use cxl_pool::media::CellClass;
use cxl_pool::{Error, Result};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::rc::Rc;

/// Steps between two looks at every cell.
const LOOK_STEPS: u64 = 256;
const CELL_BYTES: u64 = 256;
/// Where zombies are made.
const ZOMBIES: &[&str] = &["cache.commit", "cache.copied", "cache.copying", "cache.filled", "cache.may_write", "cache.pin_confirmed"];
/// Visited for each block that was got.
pub const GOT: &str = "tier_scene.got";
/// Visited for each call that was dropped.
pub const DROPPED: &str = "tier_scene.dropped";

/// What a run is made of.
#[derive(Clone)]
struct Plan {
    host: HostConfig,
    cache: CacheConfig,
    /// Keys of the model.
    keys: u16,
    len_bytes: usize,
    blocks_per_turn: usize,
    operations: usize,
    /// Nothing is evicted, and there is room for all.
    roomy: bool,
    half_written: bool,
}

/// What the workers of a run share, outside of the pool.
#[derive(Clone, Default)]
struct Told {
    ledger: Shared,
    /// Blocks of which a put said that they are there.
    there: Rc<RefCell<BTreeSet<Name>>>,
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with one more fault.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let mut sizes = Random::new(seed ^ 0x71e4_71e4);
    let (hosts, roomy, keys) = (sizes.pick(&[2, 2, 3]), sizes.one_in(3), sizes.pick(&[3, 6, 10]));
    let calm = planned.is_none() && (roomy || sizes.one_in(3));
    let mut cluster = Cluster::new(seed, hosts, hosts + 1, |config, random| {
        if calm {
            config.chances = Chances::default();
        }
        no_line_half_done(config, seed);
        if matches!(planned, Some(Planned { fault: Fault::CrashMachine { .. }, .. })) {
            config.write_path = WritePath::OneUnit;
        }
        let chunks = if roomy { u64::from(keys) * hosts as u64 } else { random.between(2, 5) };
        (config.geometry.cells_per_chunk, config.geometry.stripes) = (random.pick(&[1, 2, 4]), random.pick(&[1, 2]));
        config.geometry.cells[0] = CellClass { cell_bytes: CELL_BYTES, chunks };
    });
    let random = &mut cluster.random;
    let plan = Plan {
        host: cluster.host_config.clone(),
        cache: CacheConfig {
            checksums: random.one_in(2),
            low_water_percent: if roomy { 0 } else { random.pick(&[0, 20]) },
            high_water_percent: 40,
            lock_timeout_ms: Some(500_000),
            service_ms: 1,
            upkeep_ms: 3,
            remembered_keys: 64,
            copy: Some(CopyConfig::alone()),
            ..CacheConfig::default()
        },
        keys,
        len_bytes: random.pick(&[130, 192, CELL_BYTES as usize]),
        blocks_per_turn: random.pick(&[1, 2, 3]),
        operations: random.pick(&[15, 30]),
        roomy,
        half_written: !calm,
    };
    let told = Told::default();
    let (watched, lines) = (Rc::clone(&told.ledger), cluster.world.inspector());
    cluster.world.check_always(move |view| match watched.try_borrow() {
        Ok(ledger) if view.step().is_multiple_of(LOOK_STEPS) => ledger.ready_is_whole(view, &lines),
        _ => Ok(()),
    });
    for host in cluster.hosts.clone() {
        let (told, plan) = (told.clone(), plan.clone());
        cluster.world.start(host, move |env| {
            let (told, plan) = (told.clone(), plan.clone());
            told.ledger.borrow_mut().restarted |= env.generation() > 0;
            env.spawn("worker", move |env| main(&env, &told, &plan));
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
    cluster.world.run()
}

fn main(env: &Env, told: &Told, plan: &Plan) -> Result<()> {
    let host = join(env, &plan.host)?;
    let cache = loop {
        match Cache::open(&host, plan.cache.clone()) {
            Err(Error::Fenced { .. }) => env.platform().sleep_ns(500_000),
            Err(Error::BadLine { .. }) if plan.half_written => env.platform().sleep_ns(500_000),
            other => break other?,
        }
    };
    let (kept, half_written) = (cache.clone(), plan.half_written);
    env.spawn_daemon("upkeep", move |env| {
        loop {
            match kept.service_round() {
                Ok(()) | Err(Error::Fenced { .. }) => {}
                Err(Error::BadLine { .. }) if half_written => {}
                Err(error) => return Err(error),
            }
            env.platform().sleep_ns(1_000_000);
        }
    });
    let tier = TierBlocks::new(&cache, vec![Name(0, 0).namespace()], Name(0, 0).namespace(), plan.len_bytes as u64);
    let mut worker = Worker { env, told, plan, cache, tier: tier.in_turns_of(plan.blocks_per_turn), reused: Vec::new() };
    for _ in 0..plan.operations {
        worker.operate()?;
    }
    worker.settle();
    Ok(())
}

/// A call that was dropped: its memory, and whether its thread has ended.
type Reused = (Vec<Memory>, Rc<Cell<bool>>);

/// One worker.
struct Worker<'a> {
    env: &'a Env,
    told: &'a Told,
    plan: &'a Plan,
    cache: Cache,
    tier: TierBlocks,
    reused: Vec<Reused>,
}

impl Worker<'_> {
    fn operate(&mut self) -> Result<()> {
        if self.env.below(3) == 0 {
            self.env.platform().sleep_ns(1 + self.env.below(1_000_000) as u64);
        }
        self.look_at_reused();
        match self.env.below(10) {
            0..3 => self.put(),
            3..6 => self.get(),
            6 => self.has(),
            7 => self.drop_call(true),
            8 => self.drop_call(false),
            _ if self.plan.roomy => self.has(),
            _ => return self.evict(),
        }
        Ok(())
    }

    /// Names of a list, each once.
    fn names(&self) -> Vec<Name> {
        let (first, count) = (self.env.below(self.plan.keys.into()) as u16, 1 + self.env.below(self.plan.keys.min(5).into()) as u16);
        (0..count).map(|step| Name(0, (first + step) % self.plan.keys)).collect()
    }

    fn sources(&self, names: &[Name]) -> Vec<Memory> {
        let source = |&name: &Name| {
            let mut ledger = self.told.ledger.borrow_mut();
            let (number, bytes) = ledger.publication(name, self.plan.len_bytes);
            ledger.commits(number);
            Memory::holding(&bytes)
        };
        names.iter().map(source).collect()
    }

    fn destinations(&self, names: &[Name]) -> Vec<Memory> {
        names.iter().map(|_| Memory::new(self.plan.len_bytes)).collect()
    }

    /// Whether up to now nothing failed that takes blocks away.
    fn is_calm(&self) -> bool {
        self.plan.roomy && !self.plan.half_written && self.env.view(|view| self.told.ledger.borrow().no_host_failed(view))
    }

    /// Fails the run for an error that no fault explains.
    fn explain(&self, answers: &[Answer]) {
        for answer in answers {
            let Answer::Failed(error) = answer else { continue };
            match **error {
                Error::Fenced { .. } | Error::Full { .. } => {}
                Error::BadLine { .. } if self.plan.half_written => {}
                _ => self.env.fail(format!("a list met an error that no fault explains: {error}")),
            }
        }
    }

    fn put(&self) {
        let names = self.names();
        let sources = self.sources(&names);
        // SAFETY: no other thread uses the sources, which live longer than the call.
        let answers = unsafe { self.tier.put(&blocks(&names, &sources), &self.tier.call().turns()) };
        self.explain(&answers);
        // A host tells others of a block by later stores; this test needs none, so it waits until the lines have arrived.
        self.env.memory().fence_all();
        let there = names.iter().zip(&answers).filter(|(_, answer)| matches!(answer, Answer::Done | Answer::Exists));
        self.told.there.borrow_mut().extend(there.map(|(name, _)| *name));
    }

    fn get(&self) {
        let names = self.names();
        let must_be: Vec<bool> = names.iter().map(|name| self.told.there.borrow().contains(name)).collect();
        let places = self.destinations(&names);
        // SAFETY: no other thread uses the places, which live longer than the call.
        let answers = unsafe { self.tier.get(&blocks(&names, &places), &self.tier.call().turns()) };
        self.explain(&answers);
        for (((answer, place), name), must_be) in answers.iter().zip(places).zip(names).zip(must_be) {
            if matches!(answer, Answer::Done) {
                self.env.point(GOT);
                self.told.ledger.borrow_mut().accepted(self.env, name, &place.bytes(), "get");
            } else if must_be && self.is_calm() {
                self.env.fail(format!("T1: a put said that {name:?} is there, nothing took it away, and a get says {answer:?}"));
            }
        }
    }

    fn has(&self) {
        let names = self.names();
        let must_be: Vec<bool> = names.iter().map(|name| self.told.there.borrow().contains(name)).collect();
        let answers = self.tier.has(&names.iter().map(|name| name.key()).collect::<Vec<_>>());
        self.explain(&answers);
        for ((answer, name), must_be) in answers.iter().zip(names).zip(must_be) {
            if must_be && !matches!(answer, Answer::Done) && self.is_calm() {
                self.env.fail(format!("T2: a put said that {name:?} is there, nothing took it away, and has says {answer:?}"));
            }
        }
    }

    /// Begins a call, drops it at any moment, and gives its memory to another use.
    fn drop_call(&mut self, is_put: bool) {
        let names = self.names();
        let memory = if is_put { self.sources(&names) } else { self.destinations(&names) };
        // Nothing of a process that crashes waits for its threads.
        let (call, has_ended) = (ManuallyDrop::new(self.tier.call()), Rc::new(Cell::new(false)));
        let (tier, turns, used, ended) = (self.tier.clone(), call.turns(), memory.clone(), Rc::clone(&has_ended));
        self.env.spawn("call", move |_| {
            let list = blocks(&names, &used);
            // SAFETY: the memory lives as long as this thread, and its next use begins when the call was dropped.
            drop(unsafe { if is_put { tier.put(&list, &turns) } else { tier.get(&list, &turns) } });
            ended.set(true);
            Ok(())
        });
        self.env.platform().sleep_ns(1 + self.env.below(40_000) as u64);
        drop(ManuallyDrop::into_inner(call));
        memory.iter().for_each(Memory::reuse);
        self.env.point(DROPPED);
        self.reused.push((memory, has_ended));
    }

    fn look_at_reused(&mut self) {
        for (memory, _) in &self.reused {
            if !memory.iter().all(Memory::is_as_reused) {
                self.env.fail("T3: a call that was dropped wrote to memory that another use has");
            }
        }
        self.reused.retain(|(_, has_ended)| !has_ended.get());
    }

    /// Waits until every thread of a call that was dropped has ended.
    fn settle(&mut self) {
        while !self.reused.is_empty() {
            self.env.platform().sleep_ns(500_000);
            self.look_at_reused();
        }
    }

    fn evict(&self) -> Result<()> {
        let name = self.names()[0];
        match self.cache.evict(name.namespace(), name.key()) {
            Ok(_) | Err(Error::Fenced { .. } | Error::Full { .. }) => Ok(()),
            Err(Error::BadLine { .. }) if self.plan.half_written => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// A list of blocks, each with the one before it as its parent.
fn blocks(names: &[Name], memory: &[Memory]) -> Vec<TierBlock> {
    let parents = std::iter::once(None).chain(names.iter().copied().map(Some));
    memory.iter().zip(names).zip(parents).map(|((memory, &name), parent)| memory.block(name, parent)).collect()
}
