// SPDX-License-Identifier: Apache-2.0
//! What becomes of chunks and messages where a fence, a lock or a damaged line comes in between.

use super::*;
use crate::coherence::CoherenceOptions;
use crate::device::PoolSpec;
use crate::host::{HostConfig, Service};
use crate::line::Line;
use crate::machine::{Machine, State};
use crate::media::{FreeAck, FreeBox, Region};
use crate::platform::MachineId;
use crate::pool::{FormatOptions, OpenOptions, Pool};
use std::sync::Arc;
use std::time::{Duration, Instant};

const CHUNK_BYTES: u64 = 256 << 10;
const PATIENCE: Duration = Duration::from_secs(30);

/// A pool of 16 MiB that several machines join from this process.
struct Bench {
    directory: tempfile::TempDir,
    spec: PoolSpec,
}

struct Member {
    host: Host,
    service: Option<Service>,
    allocator: Allocator,
}

impl Bench {
    fn new() -> Bench {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let spec = PoolSpec::new(vec![directory.path().join("pool")], Some(16 << 20)).unwrap();
        let options = FormatOptions {
            slots: 4,
            locks: 64,
            objects: 16,
            chunk_bytes: CHUNK_BYTES,
            machine: Some(MachineId([1; 16])),
            memory: Some(CoherenceOptions::default()),
            ..FormatOptions::default()
        };
        Pool::format(&spec, &options).unwrap();
        Bench { directory, spec }
    }

    fn join(&self, machine: u8) -> (Host, Service) {
        let id = MachineId([machine; 16]);
        let pool = Pool::open(&self.spec, &OpenOptions { memory: Some(CoherenceOptions::default()), ..OpenOptions::default() }).unwrap();
        let state = State::open(&self.directory.path().join("state"), pool.superblock().uuid(), id).unwrap();
        let config =
            HostConfig { seats: pool.superblock().seats(), heartbeat_ms: 10, suspect_ms: 2_000, poll_us: 500, ..HostConfig::default() };
        let host = crate::pool::join(pool.lines().clone(), Arc::new(Machine::new(id, state).unwrap()), config).unwrap();
        let service = host.serve().unwrap();
        (host, service)
    }

    fn member(&self, machine: u8) -> Member {
        let (host, service) = self.join(machine);
        let allocator = attach(&host).unwrap();
        Member { host, service: Some(service), allocator }
    }
}

fn attach(host: &Host) -> Result<Allocator> {
    Allocator::attach(host, LocalArea::of(host)?, AllocConfig { lock_timeout_ms: Some(300), spare_chunks: 64 })
}

impl Member {
    fn serve_until(&self, what: &str, mut is_done: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_done() {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.allocator.usage());
            self.allocator.service_round().unwrap();
            std::thread::yield_now();
        }
    }

    /// As after a fence that was just noticed: no operation begins until the service runs again.
    fn fence(&mut self) {
        drop(self.service.take());
        self.host.inner.note_fenced(self.host.incarnation());
    }

    fn join_again(&mut self) {
        let before = self.host.incarnation();
        self.service = Some(self.host.serve().unwrap());
        let deadline = Instant::now() + PATIENCE;
        while self.host.incarnation() == before || self.host.enter().is_err() {
            assert!(Instant::now() < deadline, "the host did not join again");
            std::thread::yield_now();
        }
    }
}

/// Flips a bit of a line.
fn damage(host: &Host, region: Region, index: u64) {
    let offset = host.lines().layout().line_offset(region, index).unwrap();
    let mut line: Line = host.lines().fetch_raw(offset).unwrap();
    line.0[20] ^= 1;
    host.lines().memory().write_line(offset, &line).unwrap();
    host.lines().memory().fence_all();
}

/// The line of `row` for `column`, of a region with one for each pair of slots.
fn pair(row: &Host, column: &Host) -> u64 {
    u64::from(row.slot()) * u64::from(row.lines().layout().geometry().slots) + u64::from(column.slot())
}

#[test]
fn a_run_whose_host_is_fenced_behind_the_claim_is_not_lost() {
    let bench = Bench::new();
    let mut member = bench.member(1);
    let most = member.allocator.layout().chunks() * 3 / 4;
    let first = member.allocator.claim_row(most, u64::MAX).unwrap();
    member.fence();
    assert!(matches!(member.allocator.cut_run(first, most, u64::MAX), Err(Error::Fenced { .. })));
    let usage = member.allocator.usage();
    assert_eq!((usage.scratch_bytes, usage.spare_bytes), (0, most * CHUNK_BYTES));
    member.join_again();
    let block = member.allocator.alloc(most * CHUNK_BYTES).unwrap();
    member.allocator.free(block.offset).unwrap();
    assert_eq!(member.allocator.usage().scratch_bytes, 0);
}

/// An offset names the block that it lies in.
#[test]
fn a_block_is_kept_by_any_part_of_it() {
    let bench = Bench::new();
    let member = bench.member(1);
    let lens = [4096, 200, 3 * CHUNK_BYTES];
    let blocks = lens.map(|len_bytes| (member.allocator.alloc(len_bytes).unwrap(), member.allocator.alloc(len_bytes).unwrap()));
    for (block, scratch) in blocks {
        member.allocator.keep(block.offset + block.len_bytes - 1).unwrap();
        member.allocator.keep(block.offset + 64).unwrap();
        assert_eq!(audit::block_of(member.host.lines(), block.offset).unwrap(), Some(block));
        assert_eq!(audit::block_of(member.host.lines(), scratch.offset).unwrap(), None);
    }
    let kept_bytes = blocks.iter().map(|(block, _)| block.len_bytes).sum::<u64>();
    assert_eq!(member.allocator.usage().kept_bytes, kept_bytes);
    // A free names the block itself, and a free block cannot be kept.
    for (block, _) in blocks {
        assert!(matches!(member.allocator.free(block.offset + 64), Err(Error::NotFound(_))));
        member.allocator.free(block.offset).unwrap();
        assert!(matches!(member.allocator.keep(block.offset + 64), Err(Error::NotFound(_))));
    }
}

/// A block of `owner` that `freer` frees; rounds of both until that is done.
fn freed_from_afar(owner: &Member, freer: &Member) {
    let block = owner.allocator.alloc(4096).unwrap();
    owner.allocator.keep(block.offset).unwrap();
    freer.allocator.free(block.offset).unwrap();
    freer.serve_until("a free from afar", || {
        owner.allocator.service_round().unwrap();
        owner.allocator.usage().kept_bytes == 0
    });
    freer.serve_until("an acknowledgement", || freer.allocator.usage().pending_frees == 0);
}

#[test]
fn a_damaged_acknowledgement_is_written_anew() {
    let bench = Bench::new();
    let (owner, freer) = (bench.member(1), bench.member(2));
    let line = pair(&owner.host, &freer.host);
    // Before anything was sent, and after the first message.
    for _ in 0..2 {
        damage(&owner.host, Region::FreeAck, line);
        assert!(owner.host.lines().fetch::<FreeAck>(line).is_err());
        owner.allocator.service_round().unwrap();
        assert!(owner.host.lines().fetch::<FreeAck>(line).is_ok());
        freed_from_afar(&owner, &freer);
    }
    // The freed block is another owner's by now.
    let again = owner.allocator.alloc(4096).unwrap();
    owner.allocator.keep(again.offset).unwrap();
    damage(&owner.host, Region::FreeAck, line);
    // As after a restart of the machine, which knows no more of the message than the pool does.
    let area = LocalArea::private(owner.allocator.layout().chunks()).unwrap();
    drop(owner.allocator);
    let config = AllocConfig { lock_timeout_ms: Some(10_000), spare_chunks: 64 };
    let allocator = Allocator::attach(&owner.host, area, config).unwrap();
    allocator.service_round().unwrap();
    assert_eq!(allocator.usage().kept_bytes, again.len_bytes);
    let owner = Member { host: owner.host, service: owner.service, allocator };
    owner.allocator.free(again.offset).unwrap();
    freed_from_afar(&owner, &freer);
}

#[test]
fn a_damaged_message_makes_room_for_the_next() {
    let bench = Bench::new();
    let (owner, freer) = (bench.member(1), bench.member(2));
    let line = pair(&freer.host, &owner.host);
    freed_from_afar(&owner, &freer);
    let before = freer.host.lines().fetch::<FreeBox>(line).unwrap().sequence;
    damage(&freer.host, Region::FreeBox, line);
    freed_from_afar(&owner, &freer);
    assert!(freer.host.lines().fetch::<FreeBox>(line).unwrap().sequence > before + 1);
    // Both sides at once.
    damage(&freer.host, Region::FreeBox, line);
    damage(&owner.host, Region::FreeAck, pair(&owner.host, &freer.host));
    freed_from_afar(&owner, &freer);
}
