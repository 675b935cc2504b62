// SPDX-License-Identifier: Apache-2.0
//! A prefill process is killed at every step of a put. Decode gets whole blocks or misses.

use crate::bench::*;
use crate::child::Process;
use cxl_tier::Outcome;
use std::collections::HashMap;

const BLOCKS: usize = 5;

fn kill_at_every_step(coherence: &str) {
    let bench = Bench::new(512);
    let decode = bench.member_over(1, coherence);
    let blocks = decode.blocks();
    let (whole, points) = Process::run(&bench, 2, coherence, &format!("put 1 {BLOCKS}"));
    drop(whole);
    let mut times: HashMap<String, u64> = HashMap::new();
    let points = points.unwrap();
    let steps = points.split(' ').map(|point| {
        let count = times.entry(point.to_owned()).or_default();
        *count += 1;
        (point.to_owned(), *count)
    });
    let mut found_at: HashMap<String, Vec<usize>> = HashMap::new();
    // Keys of its own for each step, so that nothing of the round before counts.
    for (seed, (point, times)) in (100..).zip(steps) {
        let keys = chain(BLOCKS, seed);
        let (mut prefill, report) = Process::run(&bench, 2, coherence, &format!("put {seed} {BLOCKS} {point} {times}"));
        let found = get(&blocks, &keys, seed).iter().filter(|outcome| outcome.is_ok()).count();
        if let Some(outcomes) = report {
            // How often it waits for a lock differs, and it has chunks by now: it was through before it came to this step.
            assert_eq!(found, BLOCKS, "{point} {times}: {outcomes}");
            continue;
        }
        assert!(prefill.was_killed(), "{point} {times}");
        found_at.entry(point.clone()).or_default().push(found);
        decode.assert_clean();
        // No key is stuck: what is missing can be stored by others, once the dead process's reservations are given up.
        decode.serve_until("keys of a dead process", || {
            put(&blocks, &keys, seed).iter().all(|outcome| matches!(outcome, Outcome::Done | Outcome::Exists))
        });
        assert_eq!(get(&blocks, &keys, seed), all(Outcome::Done, BLOCKS), "{point} {times}");
    }
    println!("blocks found after a kill at each point: {found_at:?}");
    assert_eq!(found_at["cache.may_write"], [0]);
    assert_eq!(found_at["cache.filled"], [0], "a block was there before it was committed");
    // Some of them where the kill comes between two of their descriptors.
    assert!(found_at["cache.commit"].iter().enumerate().all(|(before, found)| *found <= before), "{found_at:?}");
    assert_eq!(found_at["cache.ready"], [BLOCKS], "a block was not there after it was committed");
}

#[test]
fn wherever_prefill_is_killed_a_block_is_whole_or_missing() {
    kill_at_every_step("native");
}

#[test]
fn nor_does_a_host_that_is_not_coherent_leave_a_part_of_one() {
    kill_at_every_step(EMULATED);
}
