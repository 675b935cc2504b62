// SPDX-License-Identifier: Apache-2.0
//! A child process: one process of one host.

use crate::leases::host_config;
use crate::log::{self, Event};
use cxl_pool::alloc::{AllocConfig, Allocator, Block, LocalArea};
use cxl_pool::device::PoolSpec;
use cxl_pool::host::Host;
use cxl_pool::lock::FIRST_USER_LOCK;
use cxl_pool::objects::{Object, Objects};
use cxl_pool::pool::{OpenOptions, Pool};
use cxl_pool::{Error, Result};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Names the pool; only set for children.
pub const POOL: &str = "STORM_POOL";
/// Path of the child's log.
pub const LOG: &str = "STORM_LOG";
/// Path of a file that tells the children to leave once it exists.
pub const STOP: &str = "STORM_STOP";
/// Number of the child's start, different in every start.
pub const START: &str = "STORM_START";
/// Path of the file that tells that a start was killed, without the number of the start.
pub const DEAD: &str = "STORM_DEAD";
/// The object that holds the count.
pub const COUNTER: &[u8] = b"counter";

const TIMEOUT_MS: u64 = 20_000;
/// Objects that one start of a child publishes at most at a time.
const MOST_OBJECTS: usize = 8;

struct Worker {
    host: Host,
    allocator: Arc<Allocator>,
    objects: Objects,
    log: File,
    start: u64,
    random: u64,
    dead: String,
    published: Vec<(Vec<u8>, Block)>,
    next_name: u64,
}

/// Runs the child if this process is one; the result is its exit status.
pub fn run_if_child() -> Option<i32> {
    let spec = std::env::var(POOL).ok()?;
    let mut log = log::open(&PathBuf::from(std::env::var(LOG).ok()?)).ok()?;
    match run(&spec, log.try_clone().ok()?) {
        Ok(()) => Some(0),
        Err(error) => {
            let _ = log::append(&mut log, &Event::Error(error.to_string()));
            Some(1)
        }
    }
}

fn run(spec: &str, log: File) -> Result<()> {
    let pool = Pool::open(&PoolSpec::parse(spec)?, &OpenOptions::default())?;
    let host = pool.join(host_config())?;
    let service = host.serve()?;
    let config = AllocConfig { lock_timeout_ms: Some(TIMEOUT_MS), ..AllocConfig::default() };
    let allocator = Arc::new(again(|| Allocator::attach(&host, LocalArea::of(&host)?, config.clone()))?);
    let stop = Arc::new(AtomicBool::new(false));
    let upkeep = {
        let (allocator, stop) = (allocator.clone(), stop.clone());
        std::thread::spawn(move || {
            while !stop.load(Ordering::Acquire) {
                // A storm fences and stops; whatever a round could not do, the next one does.
                let _ = allocator.service_round();
                std::thread::sleep(Duration::from_millis(5));
            }
        })
    };
    let start: u64 = std::env::var(START).ok().and_then(|number| number.parse().ok()).unwrap_or(0);
    let random = start.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let objects = Objects::new(&host);
    let dead = std::env::var(DEAD).unwrap_or_default();
    let mut worker = Worker { host, allocator, objects, log, start, random, dead, published: Vec::new(), next_name: 0 };
    let stop_file = std::env::var(STOP).unwrap_or_default();
    let mut operations = 0u64;
    while !Path::new(&stop_file).exists() {
        match worker.operate() {
            Ok(()) => operations += 1,
            Err(Error::Fenced { .. } | Error::Timeout { .. } | Error::Full { .. }) => {}
            Err(error) => return Err(error),
        }
        if operations.is_multiple_of(16) {
            worker.tell(&Event::Progress(operations))?;
        }
    }
    worker.withdraw_all()?;
    stop.store(true, Ordering::Release);
    let _ = upkeep.join();
    let Worker { host, allocator, .. } = worker;
    if let Some(allocator) = Arc::into_inner(allocator) {
        again_with(allocator, Allocator::close)?;
    }
    host.leave()?;
    drop(service);
    Ok(())
}

/// Repeats what a fence interrupted.
fn again<T>(mut work: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match work() {
            Err(Error::Fenced { .. } | Error::Timeout { .. }) => std::thread::sleep(Duration::from_millis(2)),
            other => return other,
        }
    }
}

fn again_with(allocator: Allocator, close: impl Fn(Allocator) -> Result<()>) -> Result<()> {
    match close(allocator) {
        // What stays behind is adopted.
        Err(Error::Fenced { .. } | Error::Timeout { .. }) | Ok(()) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Byte `position` of the object `name`: unique for the object and the position.
fn byte_of(name: &[u8], position: usize) -> u8 {
    let seed = name.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    let word = (seed ^ (position as u64 / 8)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word >> (position % 8 * 8)) as u8
}

impl Worker {
    fn tell(&mut self, event: &Event) -> Result<()> {
        log::append(&mut self.log, event).map_err(|source| Error::Os { what: "write the log".into(), source })
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn operate(&mut self) -> Result<()> {
        match self.random(7) {
            0 | 1 => self.count(),
            6 => self.clean_up(),
            2 => self.publish(),
            3 => self.withdraw(),
            4 => self.verify_some(),
            _ => self.scratch(),
        }
    }

    /// Counts the shared counter up under a lock of mode S.
    fn count(&mut self) -> Result<()> {
        let counter = self.objects.get(COUNTER, TIMEOUT_MS)?;
        let mut guard = self.host.acquire(FIRST_USER_LOCK, TIMEOUT_MS)?;
        // A count that was cut short is either in the line or not: there is nothing to repair.
        guard.repaired();
        let memory = self.host.lines().memory().clone();
        let mut value = [0; 8];
        memory.flush_range(counter.offset, 8)?;
        memory.fence_all();
        memory.copy_out(counter.offset, &mut value)?;
        let next = u64::from_le_bytes(value) + 1;
        memory.copy_in(counter.offset, &next.to_le_bytes())?;
        memory.fence_stores();
        memory.fence_all();
        drop(guard);
        self.tell(&Event::Counted(next))
    }

    /// Keeps a block full of its own bytes and publishes it under a name.
    fn publish(&mut self) -> Result<()> {
        if self.published.len() >= MOST_OBJECTS {
            return self.withdraw();
        }
        let name = format!("{}-{}", self.start, self.next_name).into_bytes();
        self.next_name += 1;
        let len_bytes = 64 + self.random(6_000);
        let block = self.allocator.alloc(len_bytes)?;
        let result = self.fill_and_publish(&name, block, len_bytes);
        if result.is_err() {
            // Kept or not, named or not: a fence leaves the outcome open, so ask before the block is given back.
            again(|| match self.objects.destroy(&name, TIMEOUT_MS) {
                Err(Error::NotFound(_)) => Ok(()),
                other => other,
            })?;
            again(|| self.allocator.free(block.offset))?;
            return result;
        }
        self.published.push((name, block));
        Ok(())
    }

    fn fill_and_publish(&self, name: &[u8], block: Block, len_bytes: u64) -> Result<()> {
        let bytes: Vec<u8> = (0..len_bytes as usize).map(|position| byte_of(name, position)).collect();
        let memory = self.host.lines().memory();
        memory.copy_in(block.offset, &bytes)?;
        memory.fence_stores();
        self.allocator.keep(block.offset)?;
        self.objects.put(name, block.offset, len_bytes, TIMEOUT_MS)
    }

    /// Takes an object of our own back.
    fn withdraw(&mut self) -> Result<()> {
        if self.published.is_empty() {
            return self.publish();
        }
        let chosen = self.random(self.published.len() as u64) as usize;
        let (name, block) = self.published.swap_remove(chosen);
        again(|| match self.objects.destroy(&name, TIMEOUT_MS) {
            // A try whose outcome was unknown did it.
            Err(Error::NotFound(_)) => Ok(()),
            other => other,
        })?;
        again(|| self.allocator.free(block.offset))
    }

    fn withdraw_all(&mut self) -> Result<()> {
        while !self.published.is_empty() {
            self.withdraw()?;
        }
        Ok(())
    }

    /// Reads an object of any process; what is still published after the copy must have its bytes.
    fn verify_some(&mut self) -> Result<()> {
        let all: Vec<Object> = self.objects.list(TIMEOUT_MS)?.into_iter().filter(|object| object.name != COUNTER).collect();
        if all.is_empty() {
            return Ok(());
        }
        let object = &all[self.random(all.len() as u64) as usize];
        let memory = self.host.lines().memory().clone();
        let mut bytes = vec![0; object.len_bytes as usize];
        memory.flush_range(object.offset, object.len_bytes)?;
        memory.fence_all();
        memory.copy_out(object.offset, &mut bytes)?;
        memory.fence_all();
        match self.objects.get(&object.name, TIMEOUT_MS) {
            Ok(now) if now == *object => {}
            Ok(_) | Err(Error::NotFound(_)) => return Ok(()),
            Err(error) => return Err(error),
        }
        if let Some(at) = (0..bytes.len()).find(|&at| bytes[at] != byte_of(&object.name, at)) {
            let name = String::from_utf8_lossy(&object.name).into_owned();
            let what = format!("byte {at} of object {name} at {:#x} is {:#x}", object.offset, bytes[at]);
            self.tell(&Event::Wrong(what))?;
        }
        Ok(())
    }

    /// Takes back what a killed process left behind; its block may belong to any host.
    fn clean_up(&mut self) -> Result<()> {
        for object in self.objects.list(TIMEOUT_MS)? {
            let name = String::from_utf8_lossy(&object.name).into_owned();
            let Some((start, _)) = name.split_once('-') else { continue };
            if Path::new(&format!("{}{start}", self.dead)).exists() {
                match self.objects.destroy(&object.name, TIMEOUT_MS) {
                    Ok(()) => return again(|| self.allocator.free(object.offset)),
                    Err(Error::NotFound(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// A block of our own for a moment: no other process may write it.
    fn scratch(&mut self) -> Result<()> {
        let len_bytes = 64 + self.random(30_000);
        let block = self.allocator.alloc(len_bytes)?;
        let name = format!("scratch {} {}", self.start, self.random);
        let bytes: Vec<u8> = (0..len_bytes as usize).map(|position| byte_of(name.as_bytes(), position)).collect();
        let memory = self.host.lines().memory().clone();
        memory.copy_in(block.offset, &bytes)?;
        memory.fence_stores();
        let mut back = vec![0; bytes.len()];
        memory.flush_range(block.offset, len_bytes)?;
        memory.fence_all();
        memory.copy_out(block.offset, &mut back)?;
        if back != bytes {
            self.tell(&Event::Wrong(format!("scratch block at {:#x} (+{len_bytes}) was written by another process", block.offset)))?;
        }
        again(|| self.allocator.free(block.offset))
    }
}
