// SPDX-License-Identifier: Apache-2.0
//! Every rule of the protocols is needed: with any one of them dropped some scenario fails.
//!
//! `MUTANT=name` runs one; the table `mutant -> scenario, seed, reason` is printed with `--nocapture`.

use cxl_sim::{names, run_mutant, scenarios};

/// Rules that protocols/LOCKS.md section 9 names, and those of the lines below and the records above.
const REQUIRED: &[&str] = &[
    "accept_without_check",
    "adopt_by_grant_number",
    "alloc.adopt_on_fence",
    "cancel_counts_as_repaired",
    "check_before_grant_read",
    "check_own_manager_only",
    "check_then_write",
    "collect_before_claim",
    "epochs_not_unique",
    "fence_row_of_granter_only",
    "fetch.no_flush",
    "fetch.no_full_fence",
    "fetch.no_load_fence",
    "grant_before_fence",
    "join.accept_without_check",
    "join.bind_to_machine_only",
    "join.no_local_lock",
    "join.no_prev_match",
    "join.prev_is_number",
    "join.suspicion_is_proof",
    "manager_self_shortcut",
    "no_collect",
    "no_fence_check",
    "no_incarnation",
    "no_recall",
    "no_reqno",
    "no_seal",
    "no_suspicion",
    "no_takeover",
    "objects.clear_backwards",
    "objects.destroy_empty",
    "objects.put_no_probe",
    "objects.seal_keeps_empty",
    "publish.no_store_fence",
    "reader_no_fence_check",
    "record.intent_after_check",
    "record.no_intent",
    "restart_clears_seat_rows",
    "shared_grant_line",
    "suspicion_is_proof",
];
/// Rules whose loss does no harm, with the reason.
const HARMLESS: &[(&str, &str)] = &[];
/// Which scenario notices the loss soonest, where it is not the first.
const SOONEST: &[(&str, &str)] = &[
    ("objects.clear_backwards", "seal"),
    ("objects.destroy_empty", "objects"),
    ("objects.put_no_probe", "objects"),
    ("objects.seal_keeps_empty", "seal"),
];
/// Seeds per scenario after which a mutant has survived.
const MAX_SEEDS: u64 = 4096;

/// The scenarios, the one that notices `mutant` soonest first.
fn scenarios_for(mutant: &str) -> Vec<(&'static str, scenarios::Scenario)> {
    let mut all = scenarios::ALL.to_vec();
    if let Some((_, soonest)) = SOONEST.iter().find(|of| of.0 == mutant) {
        all.sort_by_key(|of| of.0 != *soonest);
    }
    all
}

#[test]
fn the_pool_has_a_switch_for_every_rule() {
    let found = names::of_pool().expect("the pool's sources").mutants;
    let missing: Vec<&&str> = REQUIRED.iter().filter(|name| !found.contains(name)).collect();
    assert!(missing.is_empty(), "no mutant! in the pool for {missing:?}");
    let unknown: Vec<&str> = HARMLESS.iter().chain(SOONEST).map(|of| of.0).filter(|name| !found.contains(name)).collect();
    assert_eq!(unknown, [""; 0], "named here and not in the pool");
}

#[test]
fn every_dropped_rule_is_noticed() {
    let only = std::env::var("MUTANT").ok();
    let mut survivors = Vec::new();
    for mutant in names::of_pool().expect("the pool's sources").mutants {
        if only.as_ref().is_some_and(|only| only != mutant) {
            continue;
        }
        let begin = std::time::Instant::now();
        let kill = run_mutant(mutant, &scenarios_for(mutant), MAX_SEEDS);
        let seconds = begin.elapsed().as_secs_f32();
        match (kill, HARMLESS.iter().find(|of| of.0 == mutant)) {
            (Some(kill), None) => println!("{mutant:<28} -> {}, seed {} ({seconds:.1} s): {}", kill.scenario, kill.seed, kill.reason),
            (None, Some((_, why))) => println!("{mutant:<28} -> harmless: {why}"),
            (Some(kill), Some(_)) => {
                panic!("{mutant} counts as harmless, but {} fails on seed {}: {}", kill.scenario, kill.seed, kill.reason)
            }
            (None, None) => {
                println!("{mutant:<28} -> SURVIVED ({seconds:.1} s)");
                survivors.push(mutant);
            }
        }
    }
    assert_eq!(survivors, [""; 0], "nothing noticed their loss");
}
