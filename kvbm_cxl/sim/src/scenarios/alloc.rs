// SPDX-License-Identifier: Apache-2.0
//! Processes of several hosts allocate, keep, hand over and free blocks while hosts and processes crash, restart, are fenced, and one
//! machine may be gone for good.
//!
//! Checked: no block overlaps one in use (V7): a scratch block is in use while its process lives, a kept one until a process
//! begins to free it. No other process writes to it meanwhile (P3), neither late nor out of a cache, where those who had the memory before
//! often leave what they have stored. At the end, with every death proven and every free delivered, exactly the kept blocks are kept: none
//! is lost, and without a crash none is left over.

use super::setup::{Cluster, join};
use crate::{Env, Failure, Fault, Planned, SimHost, SimProcess, Stats, When, WritePath};
use cxl_pool::alloc::{AllocConfig, Allocator, Block, Finding, LocalArea, audit, block_of};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::media::{CHUNKS_PER_CLAIM, Claim, FreeAck, FreeBox, Identity};
use cxl_pool::{Error, Result};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Operations of each start of a process.
const OPERATIONS: usize = 25;
/// Rounds of every process within which a free arrives that is in no list: sender, receiver, and the process that has the chunk.
const HANDS: u64 = 4;
/// Bytes of a block that are written at most.
const WRITTEN_BYTES: u64 = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeepState {
    Scratch,
    /// A keep was begun and its end not seen.
    Doubtful,
    Kept,
}

#[derive(Clone, Copy, Debug)]
struct LedgerEntry {
    block: Block,
    process: SimProcess,
    state: KeepState,
    /// What the memory holds of it, once its owner has written it past the caches: its first bytes, all alike.
    byte: Option<u8>,
}

/// Who has what, as the callers know it.
#[derive(Default)]
struct Ledger {
    entries: BTreeMap<u64, LedgerEntry>,
    /// Kept blocks that a process began to free.
    freed: Vec<Block>,
    /// Keeps whose process died before they ended.
    doubtful: Vec<Block>,
    /// Which of the processes are through.
    done: BTreeMap<usize, (SimHost, bool)>,
    /// The last start of each process. One that is dead is not waited for: a crash of the machine may have taken its restart with it.
    starts: BTreeMap<usize, SimProcess>,
    /// The machine that does not come back once it is down.
    victim: Option<SimHost>,
    /// Rounds of upkeep that each process got through, and the frees that the last one left.
    rounds: BTreeMap<SimProcess, (u64, u64)>,
    /// Slot of each host.
    slots: BTreeMap<SimHost, u16>,
    allocated: u64,
}

type Shared = Rc<RefCell<Ledger>>;

impl Ledger {
    fn drop_dead(&mut self, env: &Env) {
        let dead = |entry: &LedgerEntry| entry.state != KeepState::Kept && !env.view(|view| view.is_alive(entry.process));
        for entry in self.entries.values().filter(|entry| dead(entry) && entry.state == KeepState::Doubtful) {
            self.doubtful.push(entry.block);
        }
        self.entries.retain(|_, entry| !dead(entry));
    }

    fn allocated(&mut self, env: &Env, block: Block) {
        self.allocated += 1;
        self.drop_dead(env);
        let end = block.offset + block.len_bytes;
        if let Some((_, other)) = self.entries.range(..end).next_back()
            && other.block.offset + other.block.len_bytes > block.offset
        {
            env.fail(format!("V7: {:?} was given {block:?}, which overlaps {other:?}", env.process()));
        }
        self.entries.insert(block.offset, LedgerEntry { block, process: env.process(), state: KeepState::Scratch, byte: None });
    }

    fn pick(&self, env: &Env, wanted: impl Fn(&LedgerEntry) -> bool) -> Option<Block> {
        let found: Vec<Block> = self.entries.values().filter(|entry| wanted(entry)).map(|entry| entry.block).collect();
        (!found.is_empty()).then(|| found[env.below(found.len())])
    }

    fn set(&mut self, offset: u64, state: KeepState) {
        if let Some(entry) = self.entries.get_mut(&offset) {
            entry.state = state;
        }
    }
}

/// Bytes of a block that are written.
fn written(block: Block) -> u64 {
    block.len_bytes.min(WRITTEN_BYTES)
}

/// Writes to a new block: with plain stores, which are never flushed, or past the caches.
fn write(env: &Env, ledger: &Shared, block: Block) -> Result<()> {
    let byte = 1 + env.below(255) as u8;
    let bytes = vec![byte; written(block) as usize];
    match env.below(3) {
        0 => env.store(block.offset, &bytes),
        1 => {
            env.memory().copy_in(block.offset, &bytes)?;
            env.memory().fence_all();
            if let Some(entry) = ledger.borrow_mut().entries.get_mut(&block.offset) {
                entry.byte = Some(byte);
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Checks that this process's blocks and retained blocks still have their content.
fn check(env: &Env, ledger: &Ledger) {
    for entry in ledger.entries.values().filter(|entry| entry.process == env.process() || entry.state == KeepState::Kept) {
        let (Some(byte), block) = (entry.byte, entry.block) else { continue };
        let is_whole = |offset: u64| env.view(|view| view.line(offset).0.iter().all(|&found| found == byte));
        if let Some(offset) = (block.offset..block.offset + written(block)).step_by(LINE_BYTES).find(|&offset| !is_whole(offset)) {
            env.fail(format!("P3: another process wrote to {offset:#x} in {entry:?}"));
        }
    }
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with one more fault.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let mut sizes = crate::Random::new(seed);
    let hosts = sizes.pick(&[1, 2, 2, 3, 3]);
    let mut may_crash = true;
    let mut cluster = Cluster::new(seed, hosts, hosts + 1, |config, random| {
        // A machine that loses power while it writes a line in eight stores can leave it half done for ever. That such a line blocks
        // what it belongs to until an operator acts is another matter than this scenario's.
        may_crash = random.one_in(2) || matches!(planned, Some(Planned { fault: Fault::CrashMachine { .. }, .. }));
        config.write_path = if may_crash { WritePath::OneUnit } else { WritePath::StoresAndFlush };
        if !may_crash {
            config.chances.crash_machine = 0;
        }
    });
    let ledger = Shared::default();
    let processes = cluster.random.pick(&[1, 1, 2]);
    let mut number = 0;
    for host in cluster.hosts.clone() {
        for _ in 0..processes {
            let (ledger, config, index) = (Rc::clone(&ledger), cluster.host_config.clone(), number);
            number += 1;
            ledger.borrow_mut().done.insert(index, (host, false));
            cluster.world.start(host, move |env| {
                let (ledger, config) = (Rc::clone(&ledger), config.clone());
                ledger.borrow_mut().done.insert(index, (host, false));
                ledger.borrow_mut().starts.insert(index, env.process());
                env.spawn("main", move |env| main(&env, &ledger, &config, index));
            });
        }
    }
    if let Some(planned) = planned {
        cluster.world.plan(planned);
    }
    if cluster.random.one_in(2) {
        // A zombie that is about to claim a chunk, which others find free meanwhile; and often one of those others stands still later, when
        // the zombie may have started again with a claim that was never good.
        for point in ["alloc.chosen", "alloc.keep"] {
            let when = When::Point(point, cluster.random.between(1, 12));
            let for_ns = cluster.random.between(10, 40) * 1_000_000;
            cluster.world.plan(Planned { when, host: None, fault: Fault::PauseHost { for_ns } });
        }
    }
    if hosts > 1 && may_crash && cluster.random.one_in(3) {
        // The last machine is gone for good at some moment.
        let at = cluster.random.between(2_000, 60_000);
        let fault = Fault::CrashMachine { restart_after_ns: None };
        ledger.borrow_mut().victim = cluster.hosts.last().copied();
        cluster.world.plan(Planned { when: When::Step(at), host: cluster.hosts.last().copied(), fault });
    }
    let stats = cluster.world.run()?;
    judge(&cluster, &ledger.borrow(), &stats)?;
    Ok(stats)
}

/// What must hold when all hosts are through.
fn judge(cluster: &Cluster, ledger: &Ledger, stats: &Stats) -> std::result::Result<(), Failure> {
    let fail = |reason: String| Err(cluster.world.failure(reason));
    if ledger.allocated == 0 {
        return fail("no process ever allocated: nothing was tested".into());
    }
    let lines = cluster.world.inspector();
    let kept: Vec<Block> = ledger.entries.values().filter(|entry| entry.state == KeepState::Kept).map(|entry| entry.block).collect();
    for &block in &kept {
        match block_of(&lines, block.offset) {
            Ok(Some(found)) if found == block => {}
            other => return fail(format!("kept block {block:?} is lost: {other:?}")),
        }
    }
    let audit = match audit(&lines) {
        Ok(audit) => audit,
        Err(error) => return fail(format!("audit: {error}")),
    };
    // A host may just have been fenced, wrongly, or its machine crashed: it joins again and continues with its chunks.
    let is_left = |chunk: u64| {
        let may_return = |host: SimHost| ledger.victim != Some(host) || cluster.world.view(|view| view.is_up(host));
        !ledger.slots.iter().any(|(&host, &slot)| may_return(host) && is_claimed_by(cluster, slot, chunk))
    };
    let wrong = |finding: &&Finding| !matches!(finding, Finding::Orphan { chunk } if !is_left(*chunk));
    if let Some(finding) = audit.findings.iter().find(wrong) {
        return fail(format!("audit: {finding:?}"));
    }
    let doubtful = ledger.entries.values().filter(|entry| entry.state == KeepState::Doubtful).count() + ledger.doubtful.len();
    // A crash may lose frees that were under way.
    let left_over = if stats.crashes == 0 { 0 } else { ledger.freed.len() };
    let most = (kept.len() + doubtful + left_over) as u64;
    if audit.kept_blocks < kept.len() as u64 || audit.kept_blocks > most {
        return fail(format!("{} blocks are kept, expected {} to {most}", audit.kept_blocks, kept.len()));
    }
    Ok(())
}

fn is_claimed_by(cluster: &Cluster, slot: u16, chunk: u64) -> bool {
    let line = u64::from(slot) * cluster.world.layout().claim_lines() + chunk / CHUNKS_PER_CLAIM as u64;
    let bit = chunk as usize % CHUNKS_PER_CLAIM;
    cluster.world.view(|view| view.peek::<Claim>(line).bits[bit / 8]) >> (bit % 8) & 1 != 0
}

fn main(env: &Env, ledger: &Shared, config: &HostConfig, index: usize) -> Result<()> {
    let host = join(env, config)?;
    ledger.borrow_mut().slots.insert(env.host(), host.slot());
    ledger.borrow_mut().rounds.insert(env.process(), (0, 0));
    let alloc_config = AllocConfig { lock_timeout_ms: Some(500_000), spare_chunks: env.below(2) };
    let allocator = Rc::new(again(env, || Allocator::attach(&host, LocalArea::of(&host)?, alloc_config.clone()))?);
    let (upkeep, seen, of) = (Rc::clone(&allocator), Rc::clone(ledger), host.clone());
    env.spawn_daemon("upkeep", move |env| {
        loop {
            // Any host may be the one whose machine has a seat, so all of them state the death.
            gone(&env, &seen.borrow()).into_iter().try_for_each(|(slot, incarnation)| of.declare_dead(slot, incarnation))?;
            round(&env, &seen, &upkeep)?;
            env.platform().sleep_ns(200_000);
        }
    });
    for _ in 0..OPERATIONS {
        operate(env, ledger, &allocator)?;
        check(env, &ledger.borrow());
    }
    ledger.borrow_mut().done.insert(index, (env.host(), true));
    settle(env, ledger, &host, &allocator)
}

/// Whether what cut an operation short ends by itself: a fence, or claims of another host that is stopped in the middle of them, so that
/// this host cannot tell which chunks are its own.
fn is_passing(error: &Error) -> bool {
    matches!(error, Error::Fenced { .. } | Error::BadLine { region: "Claim", .. })
}

/// Repeats interrupted work.
fn again<T>(env: &Env, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 0..200 {
        match work() {
            Err(error) if is_passing(&error) => env.platform().sleep_ns(500_000),
            other => return other,
        }
    }
    work()
}

/// Whether upkeep got through. A line may look damaged while its writer is stopped in the middle of it, and a fence ends by itself.
fn is_through(result: Result<()>) -> Result<bool> {
    match result {
        Err(Error::Fenced { .. } | Error::BadLine { .. }) => Ok(false),
        other => other.map(|()| true),
    }
}

/// One round of upkeep, and what it left to do. One thread of a process does them all, so that their number tells when it stands still.
fn round(env: &Env, ledger: &Shared, allocator: &Allocator) -> Result<()> {
    if is_through(allocator.service_round())? {
        let mut ledger = ledger.borrow_mut();
        let (rounds, pending) = ledger.rounds.entry(env.process()).or_default();
        (*rounds, *pending) = (*rounds + 1, allocator.usage().pending_frees);
    }
    Ok(())
}

fn operate(env: &Env, ledger: &Shared, allocator: &Allocator) -> Result<()> {
    let mine = |entry: &LedgerEntry| entry.process == env.process();
    match env.below(10) {
        0..4 => {
            let chunk_bytes = env.lines().layout().geometry().chunk_bytes;
            let len_bytes = [64, 64, 1000, 30_000, chunk_bytes, 2 * chunk_bytes + 1][env.below(6)];
            match allocator.alloc(len_bytes) {
                Ok(block) if block.len_bytes < len_bytes => env.fail(format!("{block:?} for {len_bytes} bytes")),
                Ok(block) => {
                    ledger.borrow_mut().allocated(env, block);
                    write(env, ledger, block)?;
                }
                Err(Error::Full { .. }) => {}
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
        4..6 => {
            let block = ledger.borrow().pick(env, |entry| mine(entry) && entry.state == KeepState::Scratch);
            let Some(block) = block else { return Ok(()) };
            ledger.borrow_mut().set(block.offset, KeepState::Doubtful);
            // Others may find it from now on.
            env.memory().flush_range(block.offset, written(block))?;
            env.memory().fence_all();
            match allocator.keep(block.offset) {
                Ok(()) => ledger.borrow_mut().set(block.offset, KeepState::Kept),
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
        6 => {
            let block = ledger.borrow().pick(env, |entry| mine(entry) && entry.state == KeepState::Scratch);
            let Some(block) = block else { return Ok(()) };
            let entry = ledger.borrow_mut().entries.remove(&block.offset);
            match allocator.free(block.offset) {
                // No thread can have got it before this thread continues: it is the only one of this process that allocates.
                Ok(()) if env.below(4) != 0 || matches!(allocator.free(block.offset), Err(Error::NotFound(_))) => {}
                Ok(()) => env.fail(format!("{block:?} was freed twice")),
                Err(error) if is_passing(&error) => ledger.borrow_mut().entries.extend(entry.map(|entry| (block.offset, entry))),
                Err(error) => return Err(error),
            }
        }
        7..9 => {
            let picked = {
                let mut ledger = ledger.borrow_mut();
                let block = ledger.pick(env, |entry| entry.state == KeepState::Kept);
                block.and_then(|block| ledger.entries.remove(&block.offset))
            };
            let Some(entry) = picked else { return Ok(()) };
            ledger.borrow_mut().freed.push(entry.block);
            match allocator.free(entry.block.offset) {
                Ok(()) => {}
                Err(error) if is_passing(&error) => {
                    // It is still kept.
                    let mut ledger = ledger.borrow_mut();
                    ledger.freed.retain(|&block| block != entry.block);
                    ledger.entries.insert(entry.block.offset, entry);
                }
                Err(error) => return Err(error),
            }
        }
        _ => {
            again(env, || allocator.adopt_dead())?;
        }
    }
    Ok(())
}

/// Waits until all hosts are through and everything under way has arrived, and takes over what machines left that are gone for good.
fn settle(env: &Env, ledger: &Shared, host: &Host, allocator: &Allocator) -> Result<()> {
    let mut quiet_since: Option<BTreeMap<SimProcess, u64>> = None;
    loop {
        env.platform().sleep_ns(2_000_000);
        let gone = gone(env, &ledger.borrow());
        let mut proven = true;
        if let Some((slot, incarnation)) = gone {
            proven = host.is_proven_dead(slot, incarnation)?;
        }
        let adopted = is_through(allocator.adopt_dead().map(|_| ()))?;
        let rounds = rounds(env, &ledger.borrow());
        let same = quiet_since.as_ref().is_none_or(|since| since.keys().eq(rounds.keys()));
        if !adopted || !proven || !same || !is_quiet(env, &ledger.borrow()) {
            quiet_since = None;
            continue;
        }
        // What a process had in hand at that moment passes through other hosts before it is freed.
        let since = quiet_since.get_or_insert_with(|| rounds.clone());
        if rounds.iter().all(|(process, rounds)| since.get(process).is_some_and(|since| rounds - since >= HANDS)) {
            return Ok(());
        }
    }
}

/// Rounds of each living process.
fn rounds(env: &Env, ledger: &Ledger) -> BTreeMap<SimProcess, u64> {
    let living = ledger.rounds.iter().filter(|(process, _)| env.view(|view| view.is_alive(**process)));
    living.map(|(&process, &(rounds, _))| (process, rounds)).collect()
}

/// The membership of the machine that is gone for good, by the identity line that it left.
fn gone(env: &Env, ledger: &Ledger) -> Option<(u16, u32)> {
    let victim = ledger.victim.filter(|victim| !env.view(|view| view.is_up(*victim)))?;
    let slot = *ledger.slots.get(&victim)?;
    Some((slot, env.view(|view| view.peek::<Identity>(slot.into()).incarnation)))
}

/// Whether all that are left are through, and every message to them is taken.
fn is_quiet(env: &Env, ledger: &Ledger) -> bool {
    env.view(|view| {
        let is_gone = |host: &SimHost| ledger.victim == Some(*host) && !view.is_up(*host);
        let left_slot = ledger.victim.filter(&is_gone).and_then(|victim| ledger.slots.get(&victim));
        let slots = u64::from(view.layout().geometry().slots);
        let taken = |sender, receiver| {
            let message: FreeBox = view.peek(sender * slots + receiver);
            message.sequence == view.peek::<FreeAck>(receiver * slots + sender).sequence
        };
        let waiting = |(process, (_, pending)): (&SimProcess, &(u64, u64))| *pending != 0 && view.is_alive(*process);
        !ledger.rounds.iter().any(waiting)
            && ledger.done.iter().all(|(index, (host, done))| {
                *done || is_gone(host) || !ledger.starts.get(index).is_some_and(|process| view.is_alive(*process))
            })
            && (0..slots).all(|receiver| {
                left_slot.is_some_and(|slot| u64::from(*slot) == receiver) || (0..slots).all(|sender| taken(sender, receiver))
            })
    })
}
