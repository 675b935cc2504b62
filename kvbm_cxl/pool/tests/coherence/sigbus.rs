// SPDX-License-Identifier: Apache-2.0
//! Memory that goes bad under a mapping: typed errors, a living process, and no signals of others taken.

use crate::support::{BAD_ROLE, MIB, child, finish, map_files, map_new, new_file, pattern};
use cxl_pool::coherence::*;
use cxl_pool::line::Line;
use cxl_pool::{Error, Result};
use std::os::unix::process::ExitStatusExt;

const STRIPE: u64 = 2 * MIB;
const BUS_ADRERR: i32 = 2;
const BUS_MCEERR_AR: i32 = 4;
const BUS_MCEERR_AO: i32 = 5;

fn open(mapping: Mapping) -> MappedMemory {
    over_mapping(mapping, &CoherenceOptions::default()).unwrap()
}

fn is_lost(result: Result<()>, name: &str) -> bool {
    matches!(result, Err(Error::DeviceLost { device, .. }) if device == name)
}

type Operation = fn(&dyn Coherence) -> Result<()>;

#[test]
fn every_operation_reports_the_loss_that_it_meets() {
    let operations: [(&str, Operation); 6] = [
        ("load_line", |memory| memory.load_line(64).map(drop)),
        ("write_line", |memory| memory.write_line(64, &Line([1; 64]))),
        ("flush_line", |memory| memory.flush_line(64)),
        ("flush_range", |memory| memory.flush_range(100, 5000)),
        ("copy_in", |memory| memory.copy_in(100, &[1; 5000])),
        ("copy_out", |memory| memory.copy_out(100, &mut [1; 5000])),
    ];
    for emulator in [None, Some(EmulatorOptions { noise: 0, ..EmulatorOptions::default() })] {
        for (name, operation) in operations {
            let file = new_file(STRIPE);
            let options = CoherenceOptions { emulator, ..CoherenceOptions::default() };
            let pool = over_mapping(map_files(&[&file], STRIPE, STRIPE), &options).unwrap();
            operation(&*pool.memory).unwrap();
            file.set_len(0).unwrap();
            let first = operation(&*pool.memory);
            assert!(emulator.is_some() || is_lost(first, "device0"), "{name}");
            // The emulator meets the loss where the pending step is applied, at the latest.
            pool.memory.flush_line(64).ok();
            pool.memory.fence_all();
            assert!(is_lost(operation(&*pool.memory), "device0"), "{name} {emulator:?}");
            assert_eq!(pool.faults.lost_devices(), [LostDevice { device: "device0".into(), code: BUS_ADRERR }]);
        }
    }
}

#[test]
fn the_first_operation_on_lost_memory_fails() {
    for lines in [1, 40] {
        let file = new_file(STRIPE);
        let pool = open(map_files(&[&file], STRIPE, STRIPE));
        file.set_len(0).unwrap();
        assert!(is_lost(pool.memory.copy_out(0, &mut vec![0; lines * 64]), "device0"));
    }
}

#[test]
fn a_lost_device_leaves_the_others_alone() {
    let (first, second) = (new_file(2 * STRIPE), new_file(2 * STRIPE));
    let pool = open(map_files(&[&first, &second], 2 * STRIPE, STRIPE));
    let memory = &pool.memory;
    let bytes = pattern(1, 4 * STRIPE as usize);
    memory.copy_in(0, &bytes).unwrap();
    second.set_len(0).unwrap();
    assert!(is_lost(memory.load_line(STRIPE).map(drop), "device1"));
    assert!(is_lost(memory.write_line(3 * STRIPE, &Line([9; 64])), "device1"), "its other stripes are lost with it");
    assert!(is_lost(memory.copy_out(2 * STRIPE - 1, &mut [0; 2]), "device1"), "a range that only begins on it is lost");
    assert!(is_lost(memory.copy_out(STRIPE - 1, &mut [0; 2]), "device1"), "and one that only ends on it");
    for start in [0, 2 * STRIPE] {
        let mut read = vec![0; STRIPE as usize];
        memory.copy_out(start, &mut read).unwrap();
        assert!(read == bytes[start as usize..][..STRIPE as usize]);
        memory.write_line(start, &Line([5; 64])).unwrap();
    }
    assert!(memory.address(STRIPE, 64).is_none() && memory.address(0, 64).is_some());
    assert_eq!(pool.faults.lost_devices(), [LostDevice { device: "device1".into(), code: BUS_ADRERR }]);
    assert_eq!(pool.faults.bad_ranges(), []);
}

#[test]
fn loads_and_stores_of_others_survive_the_loss() {
    let file = new_file(2 * STRIPE);
    let pool = open(map_files(&[&file], 2 * STRIPE, STRIPE));
    let place = pool.memory.address(0, 2 * STRIPE).unwrap().as_ptr();
    file.set_len(0).unwrap();
    // SAFETY: inside the mapping, which is alive although the file is empty.
    unsafe {
        assert_eq!(place.add(100).read_volatile(), 0);
        place.add(STRIPE as usize + 5).write_volatile(7);
    }
    assert!(is_lost(pool.faults.check(0, 1), "device0"));
}

#[test]
fn many_threads_may_fault_at_once() {
    let file = new_file(8 * STRIPE);
    let pool = open(map_files(&[&file], 8 * STRIPE, STRIPE));
    file.set_len(0).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let memory = &pool.memory;
            scope.spawn(move || {
                for stripe in 0..8 {
                    assert!(is_lost(memory.load_line((stripe + thread) % 8 * STRIPE).map(drop), "device0"));
                }
            });
        }
    });
}

#[test]
fn ranges_marked_bad_stay_bad_and_others_stay_good() {
    let pool = open(map_new(4 * STRIPE));
    assert_eq!(pool.faults.bad_ranges(), []);
    pool.faults.mark_poisoned(STRIPE + 100).unwrap();
    pool.faults.mark_poisoned(2 * STRIPE).unwrap();
    assert_eq!(pool.faults.bad_ranges(), [BadRange { offset: STRIPE, len_bytes: 2 * STRIPE }]);
    for offset in [STRIPE, 2 * STRIPE - 64, 3 * STRIPE - 64] {
        assert!(matches!(pool.memory.load_line(offset), Err(Error::Poisoned { .. })));
    }
    for offset in [0, STRIPE - 64, 3 * STRIPE] {
        pool.memory.load_line(offset).unwrap();
    }
    assert!(matches!(pool.memory.copy_in(STRIPE - 1, &[1, 2]), Err(Error::Poisoned { .. })));
    pool.memory.copy_in(STRIPE - 1, &[1]).unwrap();
    pool.memory.flush_range(STRIPE, 0).unwrap();
    assert!(matches!(pool.faults.mark_poisoned(4 * STRIPE), Err(Error::OutOfRange { .. })));
}

/// Sends this thread the SIGBUS that the kernel sends for an address.
fn send_fault(code: i32, address: *const u8, lsb: i16) {
    // Linux: si_signo, si_errno, si_code, padding, then si_addr and si_addr_lsb.
    let mut info = [0u64; 16];
    info[0] = libc::SIGBUS as u64;
    info[1] = code as u64;
    info[2] = address as u64;
    info[3] = lsb as u64;
    // SAFETY: a siginfo of the kernel's size; a process may send itself any code.
    let sent = unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, libc::getpid(), libc::gettid(), libc::SIGBUS, info.as_ptr()) };
    assert_eq!(sent, 0);
}

#[test]
fn poison_marks_and_replaces_the_granule() {
    let pool = open(map_new(4 * STRIPE));
    pool.memory.copy_in(0, &pattern(3, 4 * STRIPE as usize)).unwrap();
    let place = pool.memory.address(0, 4 * STRIPE).unwrap().as_ptr();
    // SAFETY: inside the mapping.
    let at = |offset: u64| unsafe { place.add(offset as usize) };
    let before = pool.memory.load_line(STRIPE - 64).unwrap();
    send_fault(BUS_MCEERR_AR, at(STRIPE + 4242), 12);
    assert_eq!(pool.faults.bad_ranges(), [BadRange { offset: STRIPE, len_bytes: STRIPE }]);
    assert!(matches!(pool.memory.load_line(STRIPE), Err(Error::Poisoned { .. })));
    // SAFETY: inside the mapping.
    assert_eq!(unsafe { (at(STRIPE).read_volatile(), at(2 * STRIPE - 1).read_volatile()) }, (0, 0));
    assert_eq!(pool.memory.load_line(STRIPE - 64).unwrap(), before);
    assert_eq!(pool.faults.lost_devices(), []);
    // An early notice marks, but leaves alone what was not touched.
    // SAFETY: inside the mapping.
    let kept = unsafe { at(3 * STRIPE).read_volatile() };
    send_fault(BUS_MCEERR_AO, at(3 * STRIPE), 21);
    assert_eq!(pool.faults.bad_ranges().len(), 2);
    // SAFETY: inside the mapping.
    assert_eq!(unsafe { at(3 * STRIPE).read_volatile() }, kept);
}

#[test]
fn a_wide_fault_marks_all_that_it_covers() {
    let pool = open(map_new(8 * STRIPE));
    send_fault(BUS_MCEERR_AR, pool.memory.address(5 * STRIPE, 1).unwrap().as_ptr(), 23);
    assert_eq!(pool.faults.bad_ranges(), [BadRange { offset: 4 * STRIPE, len_bytes: 4 * STRIPE }]);
}

#[test]
fn more_mappings_than_the_table_holds_are_refused() {
    let status = finish(child("sigbus full table"));
    assert_eq!(status.code(), Some(0), "{status}");
}

#[test]
fn foreign_faults_reach_the_previous_handler() {
    for scenario in ["foreign fault", "foreign signal", "fault after close"] {
        let status = finish(child(&format!("sigbus {scenario}")));
        assert_eq!(status.code(), Some(PREVIOUS_HANDLER), "{scenario}: {status}");
    }
    for scenario in ["foreign fault by default", "foreign signal by default"] {
        let status = finish(child(&format!("sigbus {scenario}")));
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{scenario}: {status}");
    }
    let status = finish(child("sigbus ignored signal"));
    assert_eq!(status.code(), Some(0), "{status}");
}

const PREVIOUS_HANDLER: i32 = 42;

extern "C" fn previous_handler(_signal: i32) {
    // SAFETY: ends the process at once.
    unsafe { libc::_exit(PREVIOUS_HANDLER) }
}

fn set_handler(handler: libc::sighandler_t) {
    // SAFETY: a handler of the right signature, or a standard action.
    unsafe { libc::signal(libc::SIGBUS, handler) };
}

/// Touches memory behind the end of a file.
fn fault_in(mapping: &Mapping) {
    // SAFETY: mapped; the file behind it is empty, which is the point.
    unsafe { mapping.base.as_ptr().read_volatile() };
}

/// What the child processes of the tests above do.
pub fn victim(scenario: &str) -> i32 {
    match scenario.ends_with("default") {
        true => set_handler(libc::SIG_DFL),
        false => set_handler(previous_handler as extern "C" fn(i32) as libc::sighandler_t),
    }
    if scenario == "ignored signal" {
        set_handler(libc::SIG_IGN);
    }
    let file = new_file(STRIPE);
    let pool = open(map_files(&[&file], STRIPE, STRIPE));
    file.set_len(0).unwrap();
    assert!(is_lost(pool.memory.load_line(0).map(drop), "device0"), "our own faults stay ours");
    let foreign = map_files(&[&file], STRIPE, STRIPE);
    match scenario {
        "foreign fault" | "foreign fault by default" => fault_in(&foreign),
        // SAFETY: a signal to this thread.
        "foreign signal" | "foreign signal by default" | "ignored signal" => unsafe { assert_eq!(libc::raise(libc::SIGBUS), 0) },
        "fault after close" => {
            // The same addresses, no longer under guard.
            let again = map_files(&[&file], STRIPE, STRIPE);
            let unguarded =
                Mapping { devices: again.devices.clone(), segments: again.segments.clone(), owner: again.owner.clone(), ..again };
            drop(open(again));
            fault_in(&unguarded);
        }
        "full table" => {
            let open: Vec<_> = (0..MAX_MAPPINGS).map(|_| FaultMap::new(map_new(4096))).collect();
            assert!(open[..MAX_MAPPINGS - 1].iter().all(Result::is_ok));
            assert!(matches!(open[MAX_MAPPINGS - 1], Err(Error::Full { .. })));
            drop(open);
            assert!(FaultMap::new(map_new(4096)).is_ok(), "closed mappings make room");
        }
        _ => return BAD_ROLE,
    }
    0
}
