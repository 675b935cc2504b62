// SPDX-License-Identifier: Apache-2.0
//! KVBM's own leaders, each in a process of its own, that have nothing in common but the pool: G2 to the pool to G2.

use crate::bench::*;
use crate::child::Process;

const BLOCKS: usize = 24;

fn from_prefill_to_decode(coherence: &str, lies: u64, ranks: u32) {
    let bench = Bench::new(512);
    // The pool's manager, as any third host: hosts come and go, and one of them has to be there.
    let manager = bench.member(1);
    let (prefill, report) = Process::run(&bench, 2, coherence, &format!("prefill {BLOCKS} {lies} {ranks}"));
    assert_eq!(report.unwrap(), format!("completed {BLOCKS} failed 0"));
    let (decode, report) = Process::run(&bench, 3, coherence, &format!("decode {BLOCKS} {lies} {ranks}"));
    assert_eq!(report.unwrap(), format!("found {BLOCKS} right {}", BLOCKS as u32 * ranks));
    drop((prefill, decode));
    manager.assert_clean();
}

#[test]
fn contiguous_blocks_of_one_worker() {
    from_prefill_to_decode("native", 0, 1);
}

#[test]
fn layer_separate_blocks_of_hosts_that_are_not_coherent() {
    from_prefill_to_decode(EMULATED, 1, 1);
}

#[test]
fn blocks_of_two_ranks() {
    from_prefill_to_decode("native", 1, 2);
}

#[test]
fn blocks_outlive_the_prefill_process() {
    let bench = Bench::new(512);
    let manager = bench.member(1);
    let (prefill, report) = Process::run(&bench, 2, "native", &format!("prefill {BLOCKS} 0 1"));
    assert_eq!(report.unwrap(), format!("completed {BLOCKS} failed 0"));
    // Killed: another host adopts what it had.
    drop(prefill);
    let names: Vec<_> = crate::instance::hashes(BLOCKS).into_iter().filter_map(cxl_tier::keys::key_of).collect();
    let namespace = crate::instance::namespace();
    manager.serve_until("adoption", || manager.cache.lookup_all(namespace, &names).unwrap().iter().all(Option::is_some));
    let (_decode, report) = Process::run(&bench, 3, "native", &format!("decode {BLOCKS} 1 1"));
    assert_eq!(report.unwrap(), format!("found {BLOCKS} right {BLOCKS}"));
    manager.assert_clean();
}

#[test]
fn a_rank_that_is_missing_is_a_miss() {
    let bench = Bench::new(512);
    let manager = bench.member(1);
    // It evicts block 10 of rank 1 again: the chain ends there for both ranks.
    let (prefill, report) = Process::run(&bench, 2, "native", &format!("prefill {BLOCKS} 0 2 10"));
    assert_eq!(report.unwrap(), format!("completed {BLOCKS} failed 0"));
    let (decode, report) = Process::run(&bench, 3, "native", &format!("decode {BLOCKS} 0 2"));
    assert_eq!(report.unwrap(), "found 10 right 20");
    drop((prefill, decode));
    manager.assert_clean();
}
