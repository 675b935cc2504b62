// SPDX-License-Identifier: Apache-2.0
//! A pool of its own for each test, hosts of this process on it, and messages that are all different.

use crate::load;
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::device::PoolSpec;
use cxl_pool::host::{Host, HostConfig, Service};
use cxl_pool::machine::{Machine, State};
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{FormatOptions, OpenOptions, Pool};
use cxl_pool::ring::{RingConfig, Rings};
use std::sync::Arc;
use tempfile::TempDir;

/// Longest wait for anything that has to happen, in milliseconds: it only ends a test that hangs.
pub const PATIENCE_MS: u64 = 180_000;

pub struct Lab {
    pub directory: TempDir,
    pub pool: Pool,
}

/// A host of this process.
pub struct Member {
    pub rings: Rings,
    pub allocator: Arc<Allocator>,
    pub host: Host,
    _service: Service,
}

pub fn ring_config() -> RingConfig {
    RingConfig { ring_bytes: 4096, beat_ms: 10, peer_timeout_ms: 800, ..RingConfig::default() }
}

pub fn host_config(pool: &Pool) -> HostConfig {
    // A join may have to wait for a manager that is taken for dead first.
    let (suspect_ms, join_timeout_ms) = (load::ms(300), Some(load::ms(10_000)));
    HostConfig { seats: pool.superblock().seats(), heartbeat_ms: 10, suspect_ms, join_timeout_ms, poll_us: 500, ..HostConfig::default() }
}

fn machine(number: u8) -> MachineId {
    MachineId([number + 1; 16])
}

impl Lab {
    pub fn new() -> Lab {
        let directory = tempfile::Builder::new().prefix("cxl-ring-").tempdir_in("/dev/shm").unwrap();
        let spec = PoolSpec::new(vec![directory.path().join("pool")], Some(24 << 20)).unwrap();
        let options =
            FormatOptions { machine: Some(machine(0)), slots: 8, locks: 32, objects: 64, chunk_bytes: 256 << 10, ..Default::default() };
        let pool = Pool::format(&spec, &options).unwrap();
        Lab { directory, pool }
    }

    /// A host on machine `number`, through a mapping of its own.
    pub fn join(&self, number: u8) -> Member {
        let spec = PoolSpec::new(vec![self.directory.path().join("pool")], None).unwrap();
        let pool = Pool::open(&spec, &OpenOptions::default()).unwrap();
        let state = State::open(&self.directory.path().join("state"), pool.superblock().uuid(), machine(number)).unwrap();
        let machine = Machine::new(machine(number), state).unwrap();
        let host = cxl_pool::pool::join(pool.lines().clone(), Arc::new(machine), host_config(&pool)).unwrap();
        let service = host.serve().unwrap();
        let allocator = Arc::new(Allocator::attach(&host, LocalArea::of(&host).unwrap(), AllocConfig::default()).unwrap());
        let rings = Rings::new(&host, allocator.clone(), ring_config()).unwrap();
        Member { rings, allocator, host, _service: service }
    }
}

/// Message `number` of `sender`: its length and every word of it are its own.
pub fn message(sender: u64, number: u64, most_bytes: u64) -> Vec<u8> {
    let len_bytes = (number * 7919 + sender * 31) % (most_bytes + 1);
    let words = (0..len_bytes.div_ceil(8)).map(|word| (sender << 48 ^ number << 20 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.truncate(len_bytes as usize);
    bytes
}
