// SPDX-License-Identifier: Apache-2.0
//! A host of a replay, in a process of its own: it looks up, pins, pulls and publishes as an engine's connector does, and compares every
//! byte that it pulls.

use super::clock::Ahead;
use super::turns::Turns;
use super::work::{Action, TICK_NS, Work};
use crate::cache::{Member, NAMESPACE, alone, join_on};
use crate::hosts::{Lab as Pools, config, real_machine};
use crate::{fill, wrong};
use cxl_pool::cache::trace::{TraceConfig, TraceRecorder};
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, PublishRequest, Reservation, Reserved};
use cxl_pool::host::HostConfig;
use cxl_pool::metrics::EvictionReason;
use cxl_pool::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Longer than any replay: its clock jumps, and a host that waits for its turn is not dead.
const PATIENCE_MS: u64 = 1_000_000_000;
/// Tokens that an engine computes in a step, and so publishes together.
const STEP_TOKENS: u64 = 2048;
/// Longest wait for a lock on such a clock, in milliseconds.
const LOCK_TIMEOUT_MS: u64 = 100_000_000;

/// What a process of a replay is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    /// The file with the work.
    pub work: PathBuf,
    /// The file with the turns.
    pub turns: PathBuf,
    /// The pool, and where its machines keep their state.
    pub pool: PathBuf,
    pub state: PathBuf,
    /// Which of the hosts it is, and how many there are.
    pub host: u8,
    pub hosts: u8,
    /// Which machine of the pool.
    pub machine: u8,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Name of the eviction policy.
    pub eviction: String,
    /// Low and high water mark of the cells that are kept free.
    pub water_percent: (u32, u32),
    /// Actions that it may be ahead of others.
    pub ahead: u64,
    /// Where it records, if it does.
    pub record: Option<PathBuf>,
}

/// What a host did.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Side {
    /// Tokens of its requests.
    pub asked_tokens: u64,
    /// Those that it found.
    pub hit_tokens: u64,
    /// Lookups of a chain, and blocks that they found.
    pub lookups: u64,
    pub found: u64,
    /// Blocks pulled and compared.
    pub pulled: u64,
    /// Blocks that were pinned and no longer there when they were pulled.
    pub lost: u64,
    /// Blocks published.
    pub stored: u64,
    /// Blocks that were there when they were to be published.
    pub met: u64,
    /// Blocks that got no cell.
    pub refused: u64,
    /// Blocks evicted, for whatever reason.
    pub evicted: u64,
    /// Times of these, without waiting for turns and without making and comparing bytes.
    pub lookup_ns: u64,
    pub pull_ns: u64,
    pub publish_ns: u64,
}

impl Side {
    /// Adds what another host did.
    pub fn add(&mut self, other: &Side) {
        self.asked_tokens += other.asked_tokens;
        self.hit_tokens += other.hit_tokens;
        self.lookups += other.lookups;
        self.found += other.found;
        self.pulled += other.pulled;
        self.lost += other.lost;
        self.stored += other.stored;
        self.met += other.met;
        self.refused += other.refused;
        self.evicted += other.evicted;
        self.lookup_ns += other.lookup_ns;
        self.pull_ns += other.pull_ns;
        self.publish_ns += other.publish_ns;
    }
}

/// A process of a replay.
pub fn peer(order: &str) -> Result<Side> {
    let order: Order = serde_json::from_str(order).map_err(|error| Error::Invalid(format!("the order of a replay: {error}")))?;
    let turns = Turns::open(&order.turns, order.hosts.into())?;
    let done = replay(&order, &turns);
    match &done {
        Ok(_) => turns.end(order.host.into()),
        Err(_) => turns.fail(order.host.into()),
    }
    done
}

/// The salt of what is recorded: the traces are not secret.
const SALT: &str = "cxl-bench trace";

struct Host<'a> {
    recorder: Option<TraceRecorder>,
    work: &'a Work,
    member: &'a Member,
    clock: &'a Ahead,
    block_bytes: usize,
    side: Side,
}

fn replay(order: &Order, turns: &Turns) -> Result<Side> {
    let work = Work::read(&order.work)?;
    let pool = Pools::open(&order.pool)?;
    let clock = Arc::new(Ahead::new(real_machine(&pool, Path::new(&order.state), order.machine)?));
    let host_config = HostConfig { suspect_ms: PATIENCE_MS, ..config(&pool) };
    let policy = order.eviction.parse()?;
    let (low_water_percent, high_water_percent) = order.water_percent;
    let lock_timeout_ms = Some(LOCK_TIMEOUT_MS);
    let cache_config = CacheConfig { checksums: true, policy, lock_timeout_ms, low_water_percent, high_water_percent, ..alone() };
    let member = join_on(&pool, clock.clone(), host_config, cache_config, true)?;
    let record = |directory: &PathBuf| {
        TraceRecorder::start(&TraceConfig {
            directory: directory.clone(),
            salt: SALT.into(),
            block_tokens: work.block_tokens,
            most_bytes: u64::MAX,
        })
    };
    let recorder = order.record.as_ref().map(record).transpose()?;
    let block_bytes = order.block_bytes as usize;
    let mut host = Host { recorder, work: &work, member: &member, clock: &clock, block_bytes, side: Side::default() };
    let mine = work.actions.iter().zip(0u64..).filter(|((host, _), _)| *host == order.host);
    for (&(_, action), place) in mine {
        turns.set(order.host.into(), place);
        turns.wait(order.host.into(), place, order.ahead)?;
        host.act(action)?;
    }
    host.side.evicted = EvictionReason::ALL.into_iter().map(|reason| member.cache.metrics().evictions_total.of(reason).get()).sum();
    let Host { side, recorder, .. } = host;
    if let Some(missing) =
        recorder.as_ref().map(TraceRecorder::counts).map(|counts| counts.dropped + counts.failed).filter(|&missing| missing > 0)
    {
        return Err(wrong(format!("{missing} entries of the record are missing")));
    }
    drop(recorder);
    if order.machine == 0 {
        // The manager goes last: the others need it for their locks, to leave as well.
        turns.end(order.host.into());
        turns.wait_for_all(order.host.into())?;
        member.leave()?;
    } else {
        turns.leaves(order.host.into());
        member.leave()?;
        turns.end(order.host.into());
    }
    Ok(side)
}

impl Host<'_> {
    fn cache(&self) -> &Cache {
        &self.member.cache
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action {
            Action::Ask(request) => self.ask(request),
            Action::Publish(request) => self.publish(request),
            Action::Beat => {
                let heartbeat_ns = self.member.host.config().heartbeat_ms * 1_000_000;
                for _ in 0..TICK_NS / heartbeat_ns.max(1) {
                    self.clock.put_forward(heartbeat_ns);
                    self.member.host.service_round()?;
                }
                Ok(())
            }
            Action::Follow => {
                self.clock.put_forward(TICK_NS);
                self.cache().service_round()
            }
        }
    }

    fn ask(&mut self, request: u32) -> Result<()> {
        let chain = self.work.chain(request);
        let keys: Vec<BlockKey> = chain.iter().map(|&block| Work::key(block)).collect();
        let began = Instant::now();
        let pinned = self.cache().pin_chain(NAMESPACE, &keys)?;
        self.side.lookup_ns += began.elapsed().as_nanos() as u64;
        self.side.lookups += 1;
        self.side.found += pinned.len() as u64;
        let (mut expected, mut bytes) = (vec![0; self.block_bytes], vec![0; self.block_bytes]);
        let mut whole = 0;
        for (pin, &block) in pinned.iter().zip(chain) {
            let began = Instant::now();
            let miss = pin.copy_to(&mut bytes)?;
            self.side.pull_ns += began.elapsed().as_nanos() as u64;
            if miss.is_some() {
                self.side.lost += 1;
                break;
            }
            fill(&mut expected, block.into());
            if bytes != expected {
                return Err(wrong(format!("block {block} was pulled with other bytes than were published")));
            }
            bytes.fill(0);
            whole += 1;
        }
        self.side.pulled += whole as u64;
        let (asked, hit) = self.work.tokens(request, whole);
        if let Some(recorder) = &self.recorder {
            recorder.asked(NAMESPACE, &keys, asked, hit);
        }
        self.side.asked_tokens += asked;
        self.side.hit_tokens += hit;
        Ok(())
    }

    /// Publishes the whole chain step by step, as a connector does: what is there is told and not written.
    fn publish(&mut self, request: u32) -> Result<()> {
        let chain = self.work.chain(request);
        let step = ((STEP_TOKENS / self.work.block_tokens.max(1)) as usize).max(1);
        let mut parent = None;
        for blocks in chain.chunks(step) {
            let mut wishes = Vec::with_capacity(blocks.len());
            for &block in blocks {
                let key = Work::key(block);
                wishes.push(PublishRequest { namespace: NAMESPACE, key, parent, len_bytes: self.block_bytes as u64 });
                parent = Some(key);
            }
            self.publish_step(blocks, &wishes)?;
        }
        // The upkeep keeps some cells free. On a recorded clock its rounds come between two publishes.
        self.cache().service_round()
    }

    fn publish_step(&mut self, blocks: &[u32], wishes: &[PublishRequest]) -> Result<()> {
        let mut bytes = vec![0; self.block_bytes];
        let began = Instant::now();
        let reserved = self.cache().reserve_all(wishes)?;
        let mut took = began.elapsed();
        let mut cells: Vec<Reservation> = Vec::with_capacity(reserved.len());
        for (reserved, &block) in reserved.into_iter().zip(blocks) {
            match reserved {
                Reserved::Cell(mut cell) => {
                    fill(&mut bytes, block.into());
                    let began = Instant::now();
                    cell.fill([&bytes[..]])?;
                    took += began.elapsed();
                    cells.push(cell);
                }
                Reserved::Exists | Reserved::Busy => self.side.met += 1,
                Reserved::NoCell | Reserved::NoHint | Reserved::OverQuota => self.side.refused += 1,
            }
        }
        self.side.stored += cells.len() as u64;
        if let Some(recorder) = &self.recorder {
            recorder.published(NAMESPACE, &cells.iter().map(Reservation::key).collect::<Vec<_>>());
        }
        let began = Instant::now();
        self.cache().commit_all(cells)?;
        self.side.publish_ns += (took + began.elapsed()).as_nanos() as u64;
        Ok(())
    }
}
