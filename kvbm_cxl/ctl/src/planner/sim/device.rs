// SPDX-License-Identifier: Apache-2.0
//! The pool's devices: the time of a transfer, and their load.
//!
//! A device serves transfers one after the other, in the order in which they begin, at its own speed; a transfer ends when the last
//! device is done with its part, and not before the instance's own link is. NAND with a cache adds the cost of misses: the instance waits
//! for one miss after the other, each of which brings pages ahead; the device serves several pages at a time.

use super::{Ns, gib_blocks, ns};
use crate::counted::CountedCache;
use crate::planner::error::Planned;
use crate::planner::keys::Rack;
use crate::planner::trace::Block;
use cxl_pool::cache::policy::PolicyKind;

const GB: f64 = 1e9;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Read,
    Write,
}

/// A block that is transferred.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    pub block: u32,
    pub named: &'a Block,
    /// The device that has its cell, where blocks are not interleaved.
    pub device: usize,
}

#[derive(Clone, Default)]
struct Device {
    free: Ns,
    busy: Ns,
}

/// What the devices had to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// The part of the time that a device was busy, of all devices on average.
    pub mean: f64,
    /// Of the busiest one.
    pub most: f64,
}

struct Nand {
    cache: CountedCache,
    dirty: Vec<bool>,
    pages: f64,
    /// The instance's wait for a block that misses.
    stall_s: f64,
    read_s: f64,
    write_s: f64,
}

pub struct Devices {
    devices: Vec<Device>,
    nand: Option<Nand>,
    block_bytes: f64,
    interleave: bool,
    device_gb_s: f64,
    read_gb_s: f64,
    write_gb_s: f64,
    latency_s: f64,
    block_latencies: f64,
}

impl Devices {
    /// Idle ones, for blocks with numbers below `blocks`.
    pub fn new(rack: &Rack, block_bytes: f64, blocks: usize) -> Self {
        let pages = (block_bytes / (rack.nand_page_kib * 1024.0)).ceil();
        let nand = || Nand {
            cache: CountedCache::new(PolicyKind::Lru, gib_blocks(rack.nand_cache_gib, block_bytes), blocks),
            dirty: vec![false; blocks],
            pages,
            stall_s: (pages / (1.0 + rack.nand_read_ahead)).ceil() * rack.nand_read_us / 1e6,
            read_s: rack.nand_read_us / 1e6 / rack.nand_ways,
            write_s: rack.nand_write_us / 1e6 / rack.nand_ways,
        };
        Devices {
            devices: vec![Device::default(); rack.devices as usize],
            nand: (rack.nand_cache_gib > 0.0).then(nand),
            block_bytes,
            interleave: rack.interleave != 0.0,
            device_gb_s: rack.device_gb_s,
            read_gb_s: rack.read_gb_s,
            write_gb_s: rack.write_gb_s,
            latency_s: rack.latency_ns / 1e9,
            block_latencies: rack.block_latencies,
        }
    }

    pub fn count(&self) -> usize {
        self.devices.len()
    }

    /// Seconds for so many blocks without other transfers and without misses.
    pub fn alone_s(&self, blocks: usize, way: Way) -> f64 {
        if blocks == 0 {
            return 0.0;
        }
        let bytes = blocks as f64 * self.block_bytes;
        let devices = if self.interleave { self.devices.len() as f64 } else { 1.0 };
        self.latency(blocks) + bytes / (self.link(way).min(devices * self.device_gb_s) * GB)
    }

    fn link(&self, way: Way) -> f64 {
        match way {
            Way::Read => self.read_gb_s,
            Way::Write => self.write_gb_s,
        }
    }

    fn latency(&self, blocks: usize) -> f64 {
        self.latency_s * (self.block_latencies * blocks as f64).max(1.0)
    }

    /// Begins a transfer, and gives its end.
    pub fn transfer(&mut self, now: Ns, parts: &[Part], way: Way, tick: u32) -> Planned<Ns> {
        if parts.is_empty() {
            return Ok(now);
        }
        let mut work_s = vec![0.0; self.devices.len()];
        let mut stall_s = 0.0;
        for part in parts {
            let (nand_s, waits_s) = match &mut self.nand {
                Some(nand) => nand.access(part, way, tick)?,
                None => (0.0, 0.0),
            };
            stall_s += waits_s;
            if let Some(work_s) = work_s.get_mut(part.device.min(self.devices.len() - 1)) {
                *work_s += self.block_bytes / (self.device_gb_s * GB) + nand_s;
            }
        }
        if self.interleave {
            let share_s = work_s.iter().sum::<f64>() / self.devices.len() as f64;
            work_s.fill(share_s);
        }
        let link_s = parts.len() as f64 * self.block_bytes / (self.link(way) * GB);
        let mut end = now.saturating_add(ns(link_s + stall_s));
        for (device, work_s) in self.devices.iter_mut().zip(work_s).filter(|(_, work_s)| *work_s > 0.0) {
            device.free = device.free.max(now).saturating_add(ns(work_s));
            device.busy = device.busy.saturating_add(ns(work_s));
            end = end.max(device.free);
        }
        Ok(end.saturating_add(ns(self.latency(parts.len()))))
    }

    /// What they had to do in this time.
    pub fn load(&self, span: Ns) -> Load {
        let part = |busy: Ns| busy as f64 / span.max(1) as f64;
        let mean = self.devices.iter().map(|device| part(device.busy)).sum::<f64>() / self.devices.len().max(1) as f64;
        Load { mean, most: self.devices.iter().map(|device| part(device.busy)).fold(0.0, f64::max) }
    }
}

impl Nand {
    /// The device's and the instance's time for a block, in addition to that of its bytes.
    fn access(&mut self, part: &Part, way: Way, tick: u32) -> Planned<(f64, f64)> {
        let (block, is_write) = (part.block as usize, way == Way::Write);
        if self.cache.has(part.block) {
            self.cache.touch(part.block, tick);
            self.set_dirty(block, is_write || self.dirty.get(block) == Some(&true));
            return Ok((0.0, 0.0));
        }
        let evicted = self.cache.insert(part.block, part.named.key, part.named.parent, tick)?;
        let is_kept = self.cache.has(part.block);
        let mut busy_s = 0.0;
        if let Some(evicted) = evicted.map(|evicted| evicted as usize).filter(|&evicted| self.dirty.get(evicted) == Some(&true)) {
            busy_s += self.pages * self.write_s;
            self.set_dirty(evicted, false);
        }
        if is_write && !is_kept {
            busy_s += self.pages * self.write_s;
        }
        self.set_dirty(block, is_write && is_kept);
        match way {
            Way::Read => Ok((busy_s + self.pages * self.read_s, self.stall_s)),
            Way::Write => Ok((busy_s, 0.0)),
        }
    }

    fn set_dirty(&mut self, block: usize, is_dirty: bool) {
        if let Some(dirty) = self.dirty.get_mut(block) {
            *dirty = is_dirty;
        }
    }
}
