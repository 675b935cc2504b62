// SPDX-License-Identifier: Apache-2.0

mod apart;
mod content;
mod earlier;

use super::*;
use crate::line::{empty_line, verify_line};
use crate::media::{MediaLine, Region, Seat};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

struct Bench {
    folder: tempfile::TempDir,
    paths: Vec<PathBuf>,
}

const SIZE: u64 = 6 << 20;

impl Bench {
    fn new(count: usize) -> Bench {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let paths = (0..count).map(|index| folder.path().join(format!("device{index}"))).collect();
        Bench { folder, paths }
    }

    fn formatted(count: usize) -> Bench {
        let bench = Bench::new(count);
        Pool::format(&bench.spec(), &options()).unwrap();
        bench
    }

    fn spec(&self) -> PoolSpec {
        PoolSpec::new(self.paths.clone(), Some(SIZE)).unwrap()
    }

    fn spec_of(&self, order: &[usize]) -> PoolSpec {
        PoolSpec::new(order.iter().map(|&index| self.paths[index].clone()).collect(), None).unwrap()
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        self.paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
    }

    fn bytes_of(&self, index: usize) -> Vec<u8> {
        std::fs::read(&self.paths[index]).unwrap()
    }

    fn patch(&self, index: usize, offset: u64, bytes: &[u8]) {
        File::options().write(true).open(&self.paths[index]).unwrap().write_all_at(bytes, offset).unwrap();
    }

    /// Changes a field of a superblock and makes its CRC right again.
    fn patch_superblock(&self, index: usize, offset: usize, value: &[u8]) {
        let mut bytes = std::fs::read(&self.paths[index]).unwrap()[..4096].to_vec();
        bytes[offset..offset + value.len()].copy_from_slice(value);
        bytes[12..16].fill(0);
        let crc = crc32c::crc32c(&bytes);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        self.patch(index, 0, &bytes);
    }
}

fn options() -> FormatOptions {
    FormatOptions {
        slots: 4,
        locks: 32,
        objects: 16,
        chunk_bytes: 64 << 10,
        stripe_bytes: Some(64 << 10),
        machine: Some(MachineId([3; 16])),
        memory: Some(CoherenceOptions::default()),
        ..FormatOptions::default()
    }
}

fn open(spec: &PoolSpec) -> Result<Pool> {
    Pool::open(spec, &OpenOptions { memory: Some(CoherenceOptions::default()), ..OpenOptions::default() })
}

fn open_read_only(spec: &PoolSpec) -> Result<Pool> {
    Pool::open(spec, &OpenOptions { memory: Some(CoherenceOptions::default()), read_only: true, ..OpenOptions::default() })
}

fn refusal(outcome: Result<Pool>) -> String {
    match outcome {
        Err(error @ (Error::NotAPool { .. } | Error::HasContent { .. })) => error.to_string(),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it opened"),
    }
}

#[test]
fn a_formatted_pool_holds_every_line_sealed_and_empty() {
    for count in [1, 2, 3] {
        let bench = Bench::new(count);
        let made = Pool::format(&bench.spec(), &options()).unwrap();
        let pool = open(&bench.spec_of(&(0..count).collect::<Vec<_>>())).unwrap();
        assert_eq!(pool.superblock(), made.superblock());
        assert_eq!(pool.superblock().seats()[0], MachineId([3; 16]));
        assert_eq!(pool.devices().len(), count);
        assert_eq!(pool.lines().memory().len_bytes(), pool.layout().geometry().len_bytes);
        let mut lines = 0;
        for span in pool.layout().spans() {
            for index in 0..span.lines {
                let line = pool.lines().fetch_raw(pool.layout().line_offset(span.region, index).unwrap()).unwrap();
                assert_eq!(line, empty_line(pool.lines(), span.region, index));
                verify_line(pool.lines(), span.region, index, &line).unwrap();
                // A line of another place does not verify here.
                assert!(verify_line(pool.lines(), span.region, index + 1, &line).is_err());
                lines += 1;
            }
        }
        assert_eq!(lines, pool.layout().spans().iter().map(|span| span.lines).sum::<u64>());
        assert_eq!(Seat::REGION, Region::Seat);
        assert_eq!(pool.lines().fetch::<Seat>(0).unwrap(), Seat { crc: pool.lines().fetch::<Seat>(0).unwrap().crc, ..Seat::default() });
        pool.check_not_replaced().unwrap();
    }
}

#[test]
fn open_writes_nothing() {
    let bench = Bench::formatted(2);
    let before = bench.bytes();
    let pool = open(&bench.spec()).unwrap();
    pool.check_not_replaced().unwrap();
    drop(pool);
    assert!(open(&bench.spec_of(&[0])).is_err());
    assert!(bench.bytes() == before);
    let empty = Bench::new(1);
    assert!(refusal(open(&empty.spec())).contains("no such device"));
    assert!(!empty.paths[0].exists(), "open does not create");
    File::create(&empty.paths[0]).unwrap().set_len(SIZE).unwrap();
    assert!(refusal(open(&empty.spec())).contains("empty: there is no pool"));
    assert!(empty.bytes()[0].iter().all(|&byte| byte == 0), "open does not format");
}

#[test]
fn permuted_devices_are_the_same_pool() {
    let bench = Bench::formatted(3);
    let pool = open(&bench.spec_of(&[0, 1, 2])).unwrap();
    let offsets: Vec<u64> = (0..40).map(|step| pool.layout().data_offset() + step * 60 * 1024 + 64).collect();
    for &offset in &offsets {
        let end = offset + 8;
        if end <= pool.lines().memory().len_bytes() {
            pool.lines().memory().copy_in(offset, &offset.to_le_bytes()).unwrap();
        }
    }
    pool.lines().memory().fence_stores();
    for order in [[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let again = open(&bench.spec_of(&order)).unwrap();
        let names: Vec<_> = again.devices().iter().map(|info| PathBuf::from(&info.name)).collect();
        assert_eq!(names, bench.paths);
        for &offset in offsets.iter().filter(|&&offset| offset + 8 <= again.lines().memory().len_bytes()) {
            let mut bytes = [0; 8];
            again.lines().memory().copy_out(offset, &mut bytes).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), offset);
        }
    }
}

#[test]
fn unequal_devices_are_used_up_to_the_common_size() {
    let bench = Bench::new(2);
    File::create(&bench.paths[0]).unwrap().set_len(SIZE).unwrap();
    File::create(&bench.paths[1]).unwrap().set_len(2 * SIZE + 4096).unwrap();
    let spec = PoolSpec::new(bench.paths.clone(), None).unwrap();
    let pool = Pool::format(&spec, &options()).unwrap();
    assert_eq!(pool.layout().geometry().len_bytes, 2 * SIZE);
    drop(pool);
    open(&bench.spec_of(&[1, 0])).unwrap().check_not_replaced().unwrap();
}

#[test]
fn a_missing_device_is_named() {
    let bench = Bench::formatted(3);
    for missing in 0..3 {
        let rest: Vec<usize> = (0..3).filter(|&index| index != missing).collect();
        let reason = refusal(open(&bench.spec_of(&rest)));
        assert!(reason.contains(&format!("device {missing} of 3")) && reason.contains("is missing"), "{reason}");
        assert!(reason.contains(&format!("device{missing}\"")), "its recorded name: {reason}");
    }
}

#[test]
fn a_foreign_device_is_refused() {
    let (bench, other) = (Bench::formatted(2), Bench::formatted(2));
    for (first, second) in [(&bench.paths[0], &other.paths[1]), (&bench.paths[0], &other.paths[0])] {
        let spec = PoolSpec::new(vec![first.clone(), second.clone()], None).unwrap();
        assert!(refusal(open(&spec)).contains("foreign"));
    }
    // A copy of a device under another name.
    std::fs::copy(&bench.paths[0], &other.paths[0]).unwrap();
    let spec = PoolSpec::new(vec![bench.paths[0].clone(), other.paths[0].clone(), bench.paths[1].clone()], None).unwrap();
    assert!(refusal(open(&spec)).contains("one is a copy"));
    // A device left over from an earlier format of the same pool.
    let old = std::fs::read(&bench.paths[1]).unwrap();
    let uuid = old[16..32].to_vec();
    Pool::format(&bench.spec(), &FormatOptions { force: true, ..options() }).unwrap();
    bench.patch(1, 0, &old[..4096]);
    bench.patch_superblock(0, 16, &uuid);
    assert!(refusal(open(&bench.spec_of(&[0, 1]))).contains("another format"));
}

#[test]
fn a_truncated_device_is_refused() {
    let bench = Bench::formatted(2);
    for len in [SIZE - 4096, 2 << 20, 4096, 0] {
        File::options().write(true).open(&bench.paths[1]).unwrap().set_len(len).unwrap();
        let reason = refusal(open(&bench.spec_of(&[0, 1])));
        assert!(["it is empty", "fewer than", "truncated"].iter().any(|text| reason.contains(text)), "{len}: {reason}");
    }
}

#[test]
fn garbage_and_newer_formats_are_refused_and_an_unknown_ro_compat_bit_reads_only() {
    let bench = Bench::formatted(1);
    bench.patch_superblock(0, 48, &1u64.to_le_bytes());
    assert!(refusal(open(&bench.spec())).contains("ro-compat bits 0x1"));
    assert!(open_read_only(&bench.spec()).unwrap().is_read_only());
    bench.patch_superblock(0, 56, &8u64.to_le_bytes());
    assert!(refusal(open_read_only(&bench.spec())).contains("incompat bits 0x8"));
    bench.patch_superblock(0, 8, &7u16.to_le_bytes());
    assert!(refusal(open(&bench.spec())).contains("version 7.0 is newer"));
    bench.patch(0, 0, b"#!/bin/sh\n");
    assert!(refusal(open(&bench.spec())).contains("foreign"));
}

#[test]
fn a_read_only_pool_refuses_every_write_and_needs_no_write_permission() {
    let bench = Bench::formatted(2);
    let pool = open_read_only(&bench.spec()).unwrap();
    let before = bench.bytes();
    let memory = pool.lines().memory();
    let offset = pool.layout().line_offset(Region::Seat, 0).unwrap();
    assert!(matches!(memory.write_line(offset, &Line::ZERO), Err(Error::Invalid(_))));
    assert!(matches!(memory.copy_in(pool.layout().data_offset(), &[1; 64]), Err(Error::Invalid(_))));
    assert!(matches!(pool.lines().publish(0, Seat::default()), Err(Error::Invalid(_))));
    assert!(matches!(pool.join(HostConfig::default()), Err(Error::Invalid(_))));
    pool.lines().fetch::<Seat>(0).unwrap();
    assert!(bench.bytes() == before);
}

#[test]
fn format_refuses_what_is_not_empty_and_says_what_it_is() {
    let bench = Bench::formatted(2);
    let before = bench.bytes();
    let again = |options: FormatOptions| Pool::format(&bench.spec(), &options);
    let reason = refusal(again(options()));
    let pool = open(&bench.spec()).unwrap();
    assert!(reason.contains(&uuid_text(pool.superblock().uuid())), "{reason}");
    assert!(reason.contains(&format!("{:#x}", pool.superblock().incarnation())), "{reason}");
    assert!(bench.bytes() == before, "a refused format writes nothing");
    drop(pool);
    // A damaged pool, then data that starts late in the header of the last device only.
    bench.patch(0, 100, &[0xff]);
    assert!(refusal(again(options())).contains("cannot be read (damaged"));
    for path in &bench.paths {
        std::fs::write(path, vec![0; SIZE as usize]).unwrap();
    }
    bench.patch(1, DEVICE_HEADER_BYTES - 1, &[1]);
    let reason = refusal(again(options()));
    assert!(reason.contains("device1: it holds unknown data (at byte 0x1fffff)") && reason.contains("--force"), "{reason}");
    again(FormatOptions { force: true, ..options() }).unwrap();
    assert_eq!(bench.bytes()[1][DEVICE_HEADER_BYTES as usize - 1], 0);
    open(&bench.spec()).unwrap();
}

#[test]
fn a_format_under_an_open_pool_is_noticed() {
    let bench = Bench::formatted(2);
    let pool = open(&bench.spec()).unwrap();
    pool.check_not_replaced().unwrap();
    let new = Pool::format(&bench.spec(), &FormatOptions { force: true, ..options() }).unwrap();
    assert_ne!(pool.superblock().uuid(), new.superblock().uuid());
    match pool.check_not_replaced() {
        Err(Error::Replaced { was, now }) => {
            assert_eq!((was, now), (pool.superblock().incarnation(), new.superblock().incarnation()));
        }
        other => panic!("{other:?}"),
    }
    new.check_not_replaced().unwrap();
    // Lines of the old pool do not pass for lines of the new one.
    assert!(matches!(pool.lines().fetch::<Seat>(0), Err(Error::BadLine { .. })));
    bench.patch(1, 0, &[0; 64]);
    assert!(matches!(new.check_not_replaced(), Err(Error::Replaced { now: 0, .. })), "the last device counts as well");
}

fn join(bench: &Bench, pool: &Pool, machine: u8, config: HostConfig) -> Host {
    let id = MachineId([machine; 16]);
    let state = crate::machine::State::open(bench.folder.path(), pool.superblock().uuid(), id).unwrap();
    let machine = Arc::new(Machine::new(id, state).unwrap());
    super::join(pool.lines().clone(), machine, HostConfig { seats: pool.superblock().seats(), ..config }).unwrap()
}

#[test]
fn a_machine_that_joins_is_served_as_soon_as_it_can_claim_a_seat() {
    let bench = Bench::new(1);
    Pool::format(&bench.spec(), &FormatOptions { machine: None, ..options() }).unwrap();
    // Who left has said so: the time for hosts that fall silent is no reason to wait.
    let config = || HostConfig { suspect_ms: 600_000, ..HostConfig::default() };
    for machine in 4..8 {
        let pool = open(&bench.spec()).unwrap();
        let host = join(&bench, &pool, machine, config());
        host.service_round().unwrap();
        host.leave().unwrap();
    }
}

#[test]
fn a_host_stops_when_its_pool_is_formatted_under_it() {
    let bench = Bench::formatted(1);
    let pool = open(&bench.spec()).unwrap();
    let host = join(&bench, &pool, 3, HostConfig { heartbeat_ms: 1, ..HostConfig::default() });
    host.service_round().unwrap();
    drop(host.enter().unwrap());
    let new = Pool::format(&bench.spec(), &FormatOptions { force: true, ..options() }).unwrap();
    let formatted = bench.bytes();
    // A heartbeat is due some time; from then on nothing of this host is written any more, and every call says why.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !matches!(host.service_round(), Err(Error::Replaced { .. })) {
        assert!(std::time::Instant::now() < deadline, "the host never noticed");
    }
    match host.enter().map(|_| ()) {
        Err(Error::Replaced { was, now }) => {
            assert_eq!((was, now), (pool.superblock().incarnation(), new.superblock().incarnation()));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(host.acquire(0, 1_000).map(|_| ()), Err(Error::Replaced { .. })));
    assert!(matches!(host.service_round(), Err(Error::Replaced { .. })));
    let differing = bench.bytes()[0].iter().zip(&formatted[0]).filter(|(now, then)| now != then).count();
    assert_eq!(differing, 0, "the old host wrote to the new pool");
}

#[test]
fn a_format_that_does_not_fit_is_refused_before_anything_is_written() {
    let bench = Bench::new(2);
    bench.paths.iter().for_each(|path| std::fs::write(path, vec![0; SIZE as usize]).unwrap());
    let formatted = |options: FormatOptions| Pool::format(&bench.spec(), &options);
    for wrong in [
        FormatOptions { slots: 65, ..options() },
        FormatOptions { stripe_bytes: Some(3 << 12), ..options() },
        FormatOptions { stripe_bytes: Some(1 << 30), ..options() },
        FormatOptions { stripe_bytes: Some(0), ..options() },
        FormatOptions { chunk_bytes: 1 << 29, ..options() },
        FormatOptions { seats: vec![MachineId([3; 16])], ..options() },
        FormatOptions { seats: (0..9).map(|id| MachineId([id + 10; 16])).collect(), ..options() },
    ] {
        assert!(matches!(formatted(wrong), Err(Error::Invalid(_))));
    }
    let spec = PoolSpec::new(bench.paths.clone(), Some(SIZE + 4096)).unwrap();
    let too_long = Pool::format(&spec, &options()).err().unwrap();
    assert!(matches!(&too_long, Error::Partition { problem: crate::error::PartitionProblem::TooLong { .. }, .. }), "{too_long:?}");
    assert!(bench.bytes().iter().flatten().all(|&byte| byte == 0));
    let link = bench.paths[0].with_file_name("link");
    std::os::unix::fs::symlink(&bench.paths[0], &link).unwrap();
    let twice = PoolSpec::new(vec![bench.paths[0].clone(), link], Some(SIZE)).unwrap();
    assert!(refusal(Pool::format(&twice, &options())).contains("same device"));
}

#[test]
fn two_that_format_at_once_do_not_mix() {
    let bench = Bench::new(1);
    let (device, _) = Device::open_or_create(&bench.paths[0], SIZE, &Sysfs::default()).unwrap();
    let turn = device.lock_for_format().unwrap();
    assert!(refusal(Pool::format(&bench.spec(), &options())).contains("another process is formatting"));
    drop(turn);
    Pool::format(&bench.spec(), &options()).unwrap();
}

#[test]
fn a_device_truncated_under_an_open_pool_is_lost_and_named() {
    let bench = Bench::formatted(2);
    let pool = open(&bench.spec()).unwrap();
    File::options().write(true).open(&bench.paths[1]).unwrap().set_len(0).unwrap();
    match pool.check_not_replaced() {
        Err(Error::DeviceLost { device, .. }) => assert!(device.ends_with("device1"), "{device}"),
        other => panic!("{other:?}"),
    }
    assert!(refusal(open(&bench.spec())).contains("empty"));
}

#[test]
fn a_pool_works_through_the_emulator_of_hosts_without_coherence() {
    let bench = Bench::new(2);
    let memory = Some("emulated:seed=7".parse::<CoherenceOptions>().unwrap());
    let made = Pool::format(&bench.spec(), &FormatOptions { memory, ..options() }).unwrap();
    assert!(made.description().starts_with("emulated"), "{}", made.description());
    let native = open(&bench.spec()).unwrap();
    let emulated = Pool::open(&bench.spec(), &OpenOptions { memory, ..OpenOptions::default() }).unwrap();
    native.lines().publish(0, Seat { epoch: 9, ..Seat::default() }).unwrap();
    assert_eq!(emulated.lines().fetch::<Seat>(0).unwrap().epoch, 9);
    emulated.lines().publish(1, Seat { epoch: 10, ..Seat::default() }).unwrap();
    assert_eq!(native.lines().fetch::<Seat>(1).unwrap().epoch, 10);
    Pool::format(&bench.spec(), &FormatOptions { force: true, ..options() }).unwrap();
    assert!(matches!(emulated.check_not_replaced(), Err(Error::Replaced { .. })));
}

/// Memory of a host that stops for ever after a number of writes.
struct Stops {
    memory: Arc<dyn Coherence>,
    writes_left: std::sync::atomic::AtomicI64,
}

impl Stops {
    fn step(&self) -> Result<()> {
        let left = self.writes_left.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
        if left > 0 { Ok(()) } else { Err(Error::Closed) }
    }
}

impl Coherence for Stops {
    crate::coherence::forward_coherence!(memory: len_bytes load_line flush_line fence_stores fence_all fence_loads flush_range copy_out);

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        self.step().and_then(|()| self.memory.write_line(offset, line))
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        self.step().and_then(|()| self.memory.copy_in(offset, source))
    }

    fn address(&self, _offset: u64, _len_bytes: u64) -> Option<std::ptr::NonNull<u8>> {
        None
    }
}

#[test]
fn a_format_that_stops_anywhere_leaves_no_pool() {
    let bench = Bench::formatted(2);
    let old = bench.bytes();
    let superblock = Superblock::new(&SuperblockParts {
        uuid: [9; 16],
        incarnation: 9,
        layout: (**open(&bench.spec()).unwrap().layout()).clone(),
        coherence: CoherenceMode::Software,
        seats: vec![],
        devices: (1..3).map(|id| DeviceRecord { id: [id; 16], len_bytes: SIZE, name: "x".into() }).collect(),
    })
    .unwrap();
    for writes in 1.. {
        assert!(writes < 10_000, "the format never ends");
        old.iter().enumerate().for_each(|(index, bytes)| bench.patch(index, 0, &bytes[..4096]));
        let pool = open(&bench.spec()).unwrap();
        let memory: Arc<dyn Coherence> = Arc::new(Stops { memory: pool.lines().memory().clone(), writes_left: writes.into() });
        let lines = Lines::new(memory.clone(), Arc::new(superblock.layout().clone()), superblock.uuid(), superblock.incarnation());
        let outcome =
            erase_superblocks(&*memory, 2).and_then(|()| write_regions(&lines)).and_then(|()| write_superblocks(&*memory, &superblock));
        if outcome.is_ok() {
            assert_eq!(open(&bench.spec()).unwrap().superblock().uuid(), &[9; 16]);
            assert!(writes > 2 + 2 + 16 + 2 * 64);
            return;
        }
        refusal(open(&bench.spec()));
        assert!(matches!(pool.check_not_replaced(), Err(Error::Replaced { .. })));
    }
}

#[test]
fn a_format_that_fails_leaves_no_file_of_its_own() {
    let bench = Bench::new(2);
    let spec = |size| PoolSpec::new(bench.paths.clone(), Some(size)).unwrap();
    let kept = |paths: &[PathBuf]| paths.iter().map(|path| path.exists()).collect::<Vec<_>>();
    assert!(Pool::format(&spec(1 << 20), &options()).is_err());
    assert_eq!(kept(&bench.paths), [false, false]);
    std::fs::write(&bench.paths[1], [7; 100]).unwrap();
    assert!(Pool::format(&spec(SIZE), &options()).is_err());
    assert_eq!(kept(&bench.paths), [false, true], "a file that was there before stays");
    std::fs::remove_file(&bench.paths[1]).unwrap();
    Pool::format(&spec(SIZE), &options()).unwrap();
    let nowhere = bench.folder.path().join("no such folder/pool");
    let spec = PoolSpec::new(vec![nowhere], Some(SIZE)).unwrap();
    assert!(refusal(Pool::format(&spec, &options())).contains("make the folder first"));
}

#[test]
fn hosts_at_work_are_evicted_or_keep_their_pool() {
    let bench = Bench::formatted(1);
    let pool = open(&bench.spec()).unwrap();
    let id = MachineId([3; 16]);
    let state = crate::machine::State::open(bench.folder.path(), pool.superblock().uuid(), id).unwrap();
    let machine = Arc::new(Machine::new(id, state).unwrap());
    let config = HostConfig { heartbeat_ms: 5, seats: pool.superblock().seats(), ..HostConfig::default() };
    let host = super::join(pool.lines().clone(), machine, config).unwrap();
    let service = host.serve().unwrap();
    let force = FormatOptions { force: true, ..options() };
    match Pool::format(&bench.spec(), &force) {
        Err(Error::InUse { slots }) => assert_eq!(slots, [host.slot()]),
        other => panic!("{:?}", other.map(|_| ())),
    }
    drop(host.enter().unwrap());
    pool.check_not_replaced().unwrap();

    // An operation is under way: the format waits for its end, and none of its lines is on the new pool.
    let (begun, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    let new = std::thread::scope(|scope| {
        scope.spawn(|| {
            let op = host.enter().unwrap();
            begun.store(true, Ordering::SeqCst);
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
            while host.enter().is_ok() {
                assert!(std::time::Instant::now() < deadline, "the host never noticed");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
            ended.store(true, Ordering::SeqCst);
            drop(op);
        });
        while !begun.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let new = Pool::format(&bench.spec(), &FormatOptions { evict_hosts: true, ..force }).unwrap();
        assert!(ended.load(Ordering::SeqCst), "the format did not wait");
        new
    });
    assert!(matches!(host.enter().map(|_| ()), Err(Error::Replaced { .. })));
    drop((service, host));
    for span in new.layout().spans() {
        for index in 0..span.lines {
            let found = new.lines().fetch_raw(span.offset + index * 64).unwrap();
            assert!(found == empty_line(new.lines(), span.region, index), "line {index} of {:?}", span.region);
        }
    }
}

#[test]
fn a_file_that_is_removed_or_replaced_is_noticed_and_the_host_goes_on() {
    let bench = Bench::formatted(1);
    let pool = open(&bench.spec()).unwrap();
    let id = MachineId([3; 16]);
    let state = crate::machine::State::open(bench.folder.path(), pool.superblock().uuid(), id).unwrap();
    let machine = Arc::new(Machine::new(id, state).unwrap().watching(pool.devices()));
    let config = HostConfig { heartbeat_ms: 1, seats: pool.superblock().seats(), ..HostConfig::default() };
    let host = super::join(pool.lines().clone(), machine, config).unwrap();
    let sees = |count| {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while host.moved_files() != count {
            host.service_round().unwrap();
            assert!(std::time::Instant::now() < deadline, "never {count}");
        }
    };
    sees(0);
    let (path, aside) = (&bench.paths[0], bench.folder.path().join("aside"));
    std::fs::rename(path, &aside).unwrap();
    sees(1);
    std::fs::copy(&aside, path).unwrap();
    host.service_round().unwrap();
    assert_eq!(host.moved_files(), 1, "another file of the same name");
    std::fs::rename(&aside, path).unwrap();
    sees(0);
    drop(host.enter().unwrap());
}

#[test]
fn a_segment_that_is_truncated_or_replaced_stops_its_host_with_an_error() {
    for is_truncated in [true, false] {
        let bench = Bench::formatted(1);
        let pool = open(&bench.spec()).unwrap();
        let id = MachineId([3; 16]);
        let state = crate::machine::State::open(bench.folder.path(), pool.superblock().uuid(), id).unwrap();
        let local = state.directory().join("local");
        let state = state.guarding(pool.faults().clone());
        let config = HostConfig { heartbeat_ms: 1, seats: pool.superblock().seats(), ..HostConfig::default() };
        let machine = Arc::new(Machine::new(id, state).unwrap());
        let host = super::join(pool.lines().clone(), machine, config).unwrap();
        let length = std::fs::metadata(&local).unwrap();
        assert!(std::os::unix::fs::MetadataExt::blocks(&length) * 512 >= length.len(), "all of it has its memory");
        match is_truncated {
            true => File::options().write(true).open(&local).unwrap().set_len(0).unwrap(),
            false => std::fs::rename(&local, bench.folder.path().join("aside")).unwrap(),
        }
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while host.service_round().is_ok() {
            assert!(std::time::Instant::now() < deadline, "it was not noticed");
        }
        let expected = if is_truncated { "truncated" } else { "removed, replaced" };
        let before = bench.bytes();
        for _ in 0..3 {
            let texts =
                [host.service_round().unwrap_err(), host.enter().map(|_| ()).unwrap_err(), host.acquire(1, 100).map(|_| ()).unwrap_err()];
            for text in texts.map(|error| error.to_string()) {
                assert!(text.contains(expected), "{text}");
            }
        }
        if is_truncated {
            assert!(matches!(pool.lines().publish(0, Seat::default()), Err(Error::DeviceLost { .. })), "slot 0 is another host's");
        }
        assert!(bench.bytes() == before, "it wrote after it had lost its memory");
    }
}

/// Page faults of this thread so far that took no device.
fn faults() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: room for one; all of it is zero before.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    // SAFETY: as above, zeros or what the system said.
    unsafe { usage.assume_init() }.ru_minflt
}

#[test]
fn memory_is_mapped_ahead_where_it_takes_no_more_of_it() {
    let bench = Bench::formatted(1);
    let touch = |pool: &Pool| {
        let before = faults();
        for page in 0..SIZE / 4096 {
            pool.lines().memory().copy_out(page * 4096, &mut [0]).unwrap();
        }
        faults() - before
    };
    let open = |bench: &Bench, read_only| Pool::open(&bench.spec_of(&[0]), &OpenOptions { read_only, ..OpenOptions::default() }).unwrap();
    let mapped = open(&bench, false);
    assert_eq!((mapped.map_ahead(60_000), touch(&mapped)), (mapped.lines().memory().len_bytes(), 0));
    for late in [open(&bench, true), open(&bench, false)] {
        assert_eq!(late.map_ahead(0), 0);
        assert!(touch(&late) > 0);
    }

    let holes = Bench::new(1);
    let file = File::create(&holes.paths[0]).unwrap();
    file.set_len(SIZE).unwrap();
    Pool::format(&holes.spec_of(&[0]), &options()).unwrap();
    let (punch, at) = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, SIZE / 2);
    // SAFETY: a plain system call on an open descriptor.
    assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), punch, at as libc::off_t, (SIZE - at) as libc::off_t) }, 0);
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&holes.paths[0]).unwrap());
    let had = blocks();
    assert_eq!((open(&holes, false).map_ahead(60_000), blocks()), (0, had));
    assert!(had * 512 < SIZE);
}
