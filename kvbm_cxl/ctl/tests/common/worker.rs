// SPDX-License-Identifier: Apache-2.0
//! A host process of the tests: it joins the pool that CXL_POOL names and does what the lines on its standard input say, one line of JSON
//! each way.

use cxl_pool::alloc::{AllocConfig, Allocator, Block, LocalArea};
use cxl_pool::coherence::Coherence;
use cxl_pool::device::PoolSpec;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::line::Line;
use cxl_pool::lock::LockId;
use cxl_pool::lock_table::{allocate_lock, free_lock};
use cxl_pool::objects::Objects;
use cxl_pool::pool::{OpenOptions, Pool};
use cxl_pool::{Error, Result};
use serde::{Deserialize, Serialize};
use std::io::BufRead;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for a lock, in milliseconds.
const LOCK_TIMEOUT_MS: u64 = 20_000;
/// How often something is tried again after a fence.
const FENCE_RETRIES: usize = 20;

/// What the parent wants.
#[derive(Serialize, Deserialize, Debug, Clone, Copy)]
pub enum Order {
    /// Make the counter and its lock.
    Prepare,
    /// Publish the blocks of a round.
    Publish { round: u64 },
    /// Find, copy and verify the blocks of a round.
    Pull { round: u64 },
    /// Take the lock and count, so many times.
    Count { lock: u32, turns: u32 },
    /// Leave the pool.
    Leave,
}

/// What a host answers.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub enum Reply {
    /// It has joined.
    Joined { slot: u16, incarnation: u32 },
    /// The lock of the counter.
    Prepared { lock: u32 },
    /// Blocks were published or pulled.
    Moved { blocks: u64, bytes: u64, ns: u64 },
    /// The counter as this host left or found it: how often it was raised, and how often another host had raised it before.
    Counted { total: u64, handed_over: u64 },
    /// It has left.
    Left,
    /// It failed.
    Failed { message: String },
}

/// Lines of replies begin with this, so that they stand apart from the test harness's own.
pub const REPLY: &str = "reply ";
const BLOCKS: u64 = 40;
const BLOCK_BYTES: u64 = 4096;

fn reply(reply: &Reply) {
    println!("{REPLY}{}", serde_json::to_string(reply).unwrap());
}

/// Serves until its standard input ends or asks it to leave.
pub fn run() {
    if let Err(error) = serve() {
        reply(&Reply::Failed { message: error.to_string() });
    }
}

fn serve() -> Result<()> {
    let pool = Pool::open(&PoolSpec::from_env()?, &OpenOptions::default())?;
    // The hosts share few cores with everything else.
    let config = HostConfig { suspect_ms: 5_000, join_timeout_ms: Some(30_000), ..HostConfig::default() };
    let host = pool.join(config)?;
    let service = host.serve()?;
    let local = LocalArea::private(pool.layout().chunks())?;
    let allocator = Allocator::attach(&host, local, AllocConfig { lock_timeout_ms: Some(LOCK_TIMEOUT_MS), ..AllocConfig::default() })?;
    let objects = Objects::new(&host);
    let mut worker =
        Worker { pool: &pool, host: &host, allocator, objects, blocks: Vec::new(), directory: None, counter: None, buffer: Vec::new() };
    reply(&Reply::Joined { slot: host.slot(), incarnation: host.incarnation() });
    for line in std::io::stdin().lock().lines().map_while(std::result::Result::ok) {
        let answer = match serde_json::from_str(&line).unwrap() {
            Order::Leave => {
                worker.clean_up()?;
                break;
            }
            Order::Prepare => worker.prepare()?,
            Order::Publish { round } => worker.publish(round)?,
            Order::Pull { round } => worker.pull(round)?,
            Order::Count { lock, turns } => worker.count(lock, turns)?,
        };
        worker.allocator.service_round()?;
        reply(&answer);
    }
    worker.allocator.close()?;
    drop(service);
    host.leave()?;
    reply(&Reply::Left);
    Ok(())
}

struct Worker<'a> {
    pool: &'a Pool,
    host: &'a Host,
    allocator: Allocator,
    objects: Objects,
    /// Blocks published last.
    blocks: Vec<Block>,
    directory: Option<Block>,
    /// The counter and its lock, with the host that made them.
    counter: Option<(Block, LockId)>,
    buffer: Vec<u8>,
}

/// Tries again while this host is fenced; it joins again by itself.
fn patiently<T>(mut work: impl FnMut() -> Result<T>) -> Result<T> {
    let mut tries = 0;
    loop {
        match work() {
            Err(Error::Fenced { .. }) if tries < FENCE_RETRIES => {
                tries += 1;
                std::thread::sleep(Duration::from_millis(50));
            }
            other => return other,
        }
    }
}

impl Worker<'_> {
    fn memory(&self) -> &Arc<dyn Coherence> {
        self.pool.lines().memory()
    }

    /// A block that other hosts may read: kept.
    fn kept_block(&self, len_bytes: u64) -> Result<Block> {
        let block = patiently(|| self.allocator.alloc(len_bytes))?;
        patiently(|| self.allocator.keep(block.offset))?;
        Ok(block)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.memory().copy_in(offset, bytes)?;
        self.memory().fence_stores();
        Ok(())
    }

    /// Copies what is in the memory now, past this host's caches.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.memory().flush_range(offset, bytes.len() as u64)?;
        self.memory().fence_all();
        self.memory().copy_out(offset, bytes)?;
        self.memory().fence_loads();
        Ok(())
    }

    fn prepare(&mut self) -> Result<Reply> {
        let block = self.kept_block(64)?;
        self.write(block.offset, &Line::ZERO.0)?;
        patiently(|| self.objects.replace(COUNTER, block.offset, 64, LOCK_TIMEOUT_MS))?;
        let lock = patiently(|| allocate_lock(self.host, LOCK_TIMEOUT_MS))?;
        self.counter = Some((block, lock));
        Ok(Reply::Prepared { lock })
    }

    /// Frees everything that this host has published.
    fn free_blocks(&mut self) -> Result<()> {
        for block in std::mem::take(&mut self.blocks).into_iter().chain(self.directory.take()) {
            patiently(|| self.allocator.free(block.offset))?;
        }
        Ok(())
    }

    /// Leaves a pool that was named on the command line as empty as it was.
    fn clean_up(&mut self) -> Result<()> {
        let Some((block, lock)) = self.counter.take() else { return Ok(()) };
        let gone = |result: Result<()>| match result {
            // A fence after the commit may have hidden that it was done.
            Err(Error::NotFound(_)) => Ok(()),
            other => other,
        };
        gone(patiently(|| self.objects.destroy(DIRECTORY, LOCK_TIMEOUT_MS)))?;
        gone(patiently(|| self.objects.destroy(COUNTER, LOCK_TIMEOUT_MS)))?;
        gone(patiently(|| free_lock(self.host, lock, LOCK_TIMEOUT_MS)))?;
        self.free_blocks()?;
        patiently(|| self.allocator.free(block.offset))
    }

    fn publish(&mut self, round: u64) -> Result<Reply> {
        self.free_blocks()?;
        self.buffer.resize(BLOCK_BYTES as usize, 0);
        let mut spent = Duration::ZERO;
        let mut directory = Directory { round, blocks: Vec::new() };
        for number in 0..BLOCKS {
            fill(round, number, &mut self.buffer);
            let begun = Instant::now();
            let block = self.kept_block(BLOCK_BYTES)?;
            self.write(block.offset, &self.buffer)?;
            spent += begun.elapsed();
            self.blocks.push(block);
            directory.blocks.push((block.offset, BLOCK_BYTES));
        }
        let begun = Instant::now();
        let encoded = directory.encode();
        let place = self.kept_block(encoded.len() as u64)?;
        self.write(place.offset, &encoded)?;
        // The name last: who finds it finds everything behind it.
        patiently(|| self.objects.replace(DIRECTORY, place.offset, encoded.len() as u64, LOCK_TIMEOUT_MS))?;
        spent += begun.elapsed();
        self.directory = Some(place);
        Ok(Reply::Moved { blocks: BLOCKS, bytes: BLOCKS * BLOCK_BYTES, ns: spent.as_nanos() as u64 })
    }

    fn pull(&mut self, round: u64) -> Result<Reply> {
        let begun = Instant::now();
        let found = self.objects.get(DIRECTORY, LOCK_TIMEOUT_MS)?;
        if found.len_bytes > Directory::len_bytes(MAX_BLOCKS) {
            return Err(Error::Invalid(format!("a directory of {} bytes is too large", found.len_bytes)));
        }
        let mut encoded = vec![0; found.len_bytes as usize];
        self.read(found.offset, &mut encoded)?;
        let directory = Directory::decode(&encoded)?;
        let mut spent = begun.elapsed();
        if directory.round != round {
            return Err(Error::Invalid(format!("found the blocks of round {}, published were those of round {round}", directory.round)));
        }
        let mut bytes = 0;
        let mut buffer = std::mem::take(&mut self.buffer);
        for (number, &(offset, len_bytes)) in directory.blocks.iter().enumerate() {
            if len_bytes > self.memory().len_bytes() {
                return Err(Error::Invalid(format!("block {number} has {len_bytes} bytes, more than the pool")));
            }
            buffer.resize(len_bytes as usize, 0);
            let begun = Instant::now();
            self.read(offset, &mut buffer)?;
            spent += begun.elapsed();
            if let Some(at) = first_wrong(round, number as u64, &buffer) {
                return Err(Error::Invalid(format!("byte {at} of block {number} of round {round} (pool offset {offset:#x}) is wrong")));
            }
            bytes += len_bytes;
        }
        self.buffer = buffer;
        Ok(Reply::Moved { blocks: directory.blocks.len() as u64, bytes, ns: spent.as_nanos() as u64 })
    }

    /// Raises the shared counter under the lock: read, add, write. Without mutual exclusion counts are lost.
    fn count(&mut self, lock: u32, turns: u32) -> Result<Reply> {
        let place = self.objects.get(COUNTER, LOCK_TIMEOUT_MS)?.offset;
        let slot = u64::from(self.host.slot()) + 1;
        let mut line = Line::ZERO;
        for turn in 0..turns.max(1) {
            let guard = self.host.acquire(lock, LOCK_TIMEOUT_MS)?;
            line = self.pool.lines().fetch_raw(place)?;
            let field = |number: usize| line.0[number * 8..][..8].iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte));
            let (total, last, handed_over) = (field(0), field(1), field(2));
            if turns > 0 {
                let fields = [total + 1, slot, handed_over + u64::from(last != 0 && last != slot)];
                fields.iter().enumerate().for_each(|(number, value)| line.0[number * 8..][..8].copy_from_slice(&value.to_le_bytes()));
                self.memory().write_line(place, &line)?;
                self.memory().fence_stores();
            }
            drop(guard);
            // A moment without the lock now and then, so that the other host gets its turns.
            if turn % 4 == 3 {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        let field = |number: usize| line.0[number * 8..][..8].iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte));
        Ok(Reply::Counted { total: field(0), handed_over: field(2) })
    }
}

/// Name of the directory object.
const DIRECTORY: &[u8] = b"demo-directory";
/// Name of the counter object.
const COUNTER: &[u8] = b"demo-counter";
/// First bytes of a directory.
const MAGIC: u64 = u64::from_le_bytes(*b"demo-dir");
/// Most blocks of a directory.
const MAX_BLOCKS: u64 = 4096;
/// Bytes of a directory's head and of each entry.
const HEAD_BYTES: usize = 24;
const ENTRY_BYTES: usize = 16;

/// SplitMix64: every seed gives another sequence, and every position in it another word.
fn word(seed: u64, position: u64) -> u64 {
    let mut z = seed.wrapping_add(position.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn seed(round: u64, block: u64) -> u64 {
    word(round.wrapping_mul(0xd134_2543_de82_ef95), block)
}

/// Writes the bytes of a block.
fn fill(round: u64, block: u64, bytes: &mut [u8]) {
    let seed = seed(round, block);
    for (position, chunk) in bytes.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&word(seed, position as u64).to_le_bytes()[..chunk.len()]);
    }
}

/// The first byte that is not the block's.
fn first_wrong(round: u64, block: u64, bytes: &[u8]) -> Option<usize> {
    let seed = seed(round, block);
    bytes.chunks(8).enumerate().find_map(|(position, chunk)| {
        let right = word(seed, position as u64).to_le_bytes();
        let at = chunk.iter().zip(right).position(|(byte, right)| *byte != right)?;
        Some(position * 8 + at)
    })
}

/// Where the blocks of a round are.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Directory {
    /// The round.
    round: u64,
    /// Pool offset and length of each block.
    blocks: Vec<(u64, u64)>,
}

impl Directory {
    /// As it lies in the pool.
    fn encode(&self) -> Vec<u8> {
        let head = [MAGIC, self.round, self.blocks.len() as u64];
        let entries = self.blocks.iter().flat_map(|&(offset, len_bytes)| [offset, len_bytes]);
        head.into_iter().chain(entries).flat_map(u64::to_le_bytes).collect()
    }

    /// Bytes that a directory of `blocks` blocks takes.
    fn len_bytes(blocks: u64) -> u64 {
        HEAD_BYTES as u64 + blocks * ENTRY_BYTES as u64
    }

    /// Reads one.
    fn decode(bytes: &[u8]) -> Result<Directory> {
        let mut words = bytes.chunks_exact(8).map(|word| word.iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte)));
        let mut next = || words.next().ok_or_else(|| Error::Invalid("the directory is cut off".into()));
        if next()? != MAGIC {
            return Err(Error::Invalid("there is no directory where its name points".into()));
        }
        let (round, count) = (next()?, next()?);
        if count > MAX_BLOCKS {
            return Err(Error::Invalid(format!("the directory names {count} blocks, more than {MAX_BLOCKS}")));
        }
        let blocks = (0..count).map(|_| Ok((next()?, next()?))).collect::<Result<_>>()?;
        Ok(Directory { round, blocks })
    }
}
