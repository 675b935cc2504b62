// SPDX-License-Identifier: Apache-2.0
//! Every rule of the protocols is needed: with any one of them dropped some scenario fails.
//!
//! `MUTANT=name` runs one; the table `mutant -> scenario, seed, reason` is printed with `--nocapture`.

use cxl_sim::{Stats, names, scenarios, search};

/// What a dropped rule breaks: an invariant of protocols/LOCKS.md section 8, or progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Breaks {
    /// V1 to V8, or P1 to P5, INV or I2 to I5 of protocols/CACHE.md: a checker failed the run.
    Safety,
    /// V9: the run did not end.
    Progress,
}
use Breaks::{Progress, Safety};

/// Every rule that can be dropped, the scenario that notices it soonest, and what it breaks.
const RULES: &[(&str, &str, Breaks)] = &[
    ("accept_without_check", "duel", Safety),
    ("adopt_by_grant_number", "duel", Safety),
    ("alloc.adopt_on_fence", "alloc", Safety),
    ("alloc.claim_no_check", "alloc", Safety),
    ("alloc.no_claim_scan", "alloc", Safety),
    ("bind.beside_damaged_rows", "b5_slot_beside_damaged_rows", Safety),
    ("bind.number_was_stated", "b4_number_is_stated_dead_before_it_is_bound", Safety),
    ("bind.proof_of_seat_is_lost", "b3_slot_of_a_dead_host_that_had_a_seat", Safety),
    ("bind.silence_of_former_life", "b6_host_comes_back_after_its_silence", Safety),
    ("cache.adopt_frees_evicting", "c11_evicting_of_a_dead_host", Safety),
    ("cache.adopt_frees_writing", "c3_writing_of_a_zombie", Safety),
    ("cache.adopts_the_living", "c16_pinned_through_a_reaping", Safety),
    ("cache.cached_hint_is_final", "c24_hint_line_cached_before", Safety),
    ("cache.claim_cleared_early", "c22_claim_of_a_proven_host", Safety),
    ("cache.cold_line_not_compared", "c31_cold_copy_of_a_cell_that_goes", Safety),
    ("cache.committed_unflushed", "c25_committed_in_place", Safety),
    ("cache.evict_scans_first", "c4_pinned_behind_an_early_look", Safety),
    ("cache.fetched_before_pins", "c17_gone_before_the_pins", Safety),
    ("cache.follows_chunks_of_others", "c15_chunk_comes_back_to_another_process", Safety),
    ("cache.first_pin_unpublished", "c16_pinned_beside_another", Safety),
    ("cache.freed_before_hint_removed", "cache", Safety),
    ("cache.given_back_beside_others", "c22_given_back_beside_a_zombie", Safety),
    ("cache.given_back_unstamped", "c30_given_back_after_a_zombie", Safety),
    ("cache.given_up_unflushed", "c25_given_up_with_stores_in_a_cache", Safety),
    ("cache.hint_is_trusted", "c7_one_cell_for_all", Safety),
    ("cache.hint_room_not_asked_for", "full_window_of_another_host", Safety),
    ("cache.hint_room_of_the_pinned", "full_window_of_own_blocks", Safety),
    ("cache.joined_unflushed", "c28_machine_of_a_dead_filler_joins_again", Safety),
    ("cache.keeps_cells_of_before", "cache", Safety),
    ("cache.left_unflushed", "c29_host_of_a_dead_filler_leaves", Safety),
    ("cache.no_claim_scan", "c15_chunk_of_another_process", Safety),
    ("cache.no_fence_check_before_payloads", "c6_zombie_reserves_a_batch", Safety),
    ("cache.no_hint_room", "full_window_of_own_blocks", Safety),
    ("cache.no_refetch", "c1_cell_republished_in_mid_copy", Safety),
    ("cache.no_stripe_lock", "c9_hint_chosen_before_others", Safety),
    ("cache.no_void_check_after_copy", "c2a_stray_restores_the_line", Safety),
    ("cache.no_void_check_before_copy", "c2b_confirmed_on_a_stray", Safety),
    ("cache.no_void_rule", "c2_stray_names_new_bytes", Safety),
    ("cache.owner_reads_back", "c12_stray_on_a_line_of_its_own", Safety),
    ("cache.pin_count_saturates", "c16_pinned_many_times", Safety),
    ("cache.pin_not_counted", "c16_pinned_by_two_processes", Safety),
    ("cache.pins_stay_published", "c16_pinned_after_a_death", Safety),
    ("cache.reaped_unflushed", "c26_filler_dies_and_its_host_goes_on", Safety),
    ("cache.reaps_pins_of_the_living", "cache", Safety),
    ("cache.recount_is_published", "c16_pinned_after_a_death", Safety),
    ("cache.recount_one_a_process", "c16_pinned_thrice_beside_a_death", Safety),
    ("cache.recount_unpins", "c16_pinned_through_a_reaping", Safety),
    ("cache.release_marks_evicting", "c23_releaser_dies", Safety),
    ("cache.release_no_scan", "c13_pinned_in_quarantine", Safety),
    ("cache.released_before_the_end", "c3_writing_of_a_zombie", Safety),
    ("cache.released_beside_a_third", "damaged_line_of_claims_beside_a_zombie", Safety),
    ("cache.remove_writes_empty", "c9_others_are_still_found", Safety),
    ("cache.row_of_the_dead_is_kept", "c16_pinned_after_a_death", Safety),
    ("cache.stamp_not_compared", "c5_same_key_in_the_same_cell", Safety),
    ("cache.sweeps_by_an_early_look", "cache", Safety),
    ("cache.taken_unflushed", "c27_cells_of_a_dead_filler_taken_over", Safety),
    ("cache.the_fenced_still_write", "awaited_blocks", Safety),
    ("cache.timeout_is_proof", "c8_false_proof", Safety),
    ("cache.torn_claim_claims_nothing", "damaged_line_of_claims", Safety),
    ("cache.torn_claim_is_cleared", "damaged_line_of_claims_written_anew", Safety),
    ("cache.torn_pins_are_none", "damaged_line_of_pins", Safety),
    ("cache.trust_several_claimants", "c14_stray_among_two_claimants", Safety),
    ("cache.trusts_itself_beside_others", "c14_own_stray_beside_another_claimant", Safety),
    ("cancel_counts_as_repaired", "zombie", Safety),
    ("check_before_grant_read", "duel", Safety),
    ("check_own_manager_only", "duel", Safety),
    ("check_then_write", "zombie", Safety),
    ("claim.accept_without_check", "seats", Safety),
    ("claim.ballots_not_unique", "seats", Safety),
    ("claim.collect_before_claim", "seats", Safety),
    ("claim.no_collect", "seats", Safety),
    ("claim.no_door_check", "seats", Safety),
    ("claim.no_name_check", "seats", Safety),
    ("claim.release_not_compared", "seats", Safety),
    ("claim.suspicion_is_proof", "seats", Safety),
    ("collect_before_claim", "duel", Safety),
    ("copy.publish_no_fence", "copy", Safety),
    ("copy.pull_no_flush", "copy", Safety),
    ("copy.pull_no_full_fence", "copy", Safety),
    ("copy.pull_no_load_fence", "copy", Safety),
    ("epochs_not_unique", "duel", Safety),
    ("evict.left_at_work", "reformat", Safety),
    ("failover.claim_keeps_its_time", "failover", Safety),
    ("failover.duel_is_unrest", "failover", Safety),
    ("failover.no_patience_with_the_slow", "failover_storm", Safety),
    ("failover.patience_with_the_dead", "failover", Safety),
    ("failover.seats_wait_in_turn", "failover", Safety),
    ("failover.silence_counts_anew", "failover", Safety),
    ("failover.silence_of_another_life", "failover_rejoined", Safety),
    ("fence.row_not_published", "stall", Progress),
    ("fence.row_not_remembered", "b2_fence_row_is_lost_with_its_writer", Safety),
    ("fence_row_of_granter_only", "zombie", Safety),
    ("fetch.no_flush", "order", Safety),
    ("fetch.no_full_fence", "order", Safety),
    ("fetch.no_load_fence", "order", Safety),
    ("grant_before_fence", "duel", Safety),
    ("heal.adopt_best_readable", "damage", Safety),
    ("heal.claim_ignores_tags", "damage", Safety),
    ("heal.claim_waits_for_join", "damage_of_claimed_seats", Progress),
    ("heal.claimed_seats_are_left", "damage_of_claimed_seats", Progress),
    ("heal.epoch_is_noted_late", "b1_lines_of_two_seats_are_lost_at_once", Safety),
    ("heal.open_seats_are_left", "damage_of_slot_seats", Progress),
    ("heal.row_forgets", "damage", Safety),
    ("heal.seat_forgets", "damage", Safety),
    ("heal.seats_claim_anew", "damage_of_claimed_seats", Progress),
    ("join.accept_without_check", "rebind", Safety),
    ("join.any_departure_is_proof", "b7_owner_before_has_left", Safety),
    ("join.bind_to_machine_only", "rebind", Safety),
    ("join.no_local_lock", "join", Safety),
    ("join.no_prev_match", "rebind", Safety),
    ("join.prev_is_number", "rebind", Safety),
    ("join.suspicion_is_proof", "rebind", Safety),
    ("keeper_leaves_first", "replaced", Safety),
    ("left_before_resigned", "left_together", Safety),
    ("lines.any_incarnation", "reformat", Safety),
    ("manager_self_shortcut", "duel", Safety),
    ("no_collect", "duel", Safety),
    ("no_fence_check", "zombie", Safety),
    ("no_incarnation", "duel", Safety),
    ("no_recall", "stall", Progress),
    ("no_reqno", "duel", Safety),
    ("no_seal", "zombie", Safety),
    ("no_suspicion", "stall", Progress),
    ("no_takeover", "stall", Progress),
    ("objects.clear_backwards", "objects", Safety),
    ("objects.destroy_empty", "objects", Safety),
    ("objects.put_no_probe", "objects", Safety),
    ("objects.seal_keeps_empty", "seal", Safety),
    ("patience_with_the_dead", "patience", Safety),
    ("pauses_are_silence", "patience", Safety),
    ("publish.no_store_fence", "order", Safety),
    ("reader_no_fence_check", "zombie", Safety),
    ("record.intent_after_check", "zombie", Safety),
    ("record.no_intent", "zombie", Safety),
    ("record.version_before_grant", "zombie", Safety),
    ("restart_clears_seat_rows", "duel", Safety),
    ("settle.nothing", "order", Safety),
    ("shared_grant_line", "duel", Safety),
    ("suspicion_is_proof", "duel", Safety),
];
/// Rules whose loss does no harm, with the reason.
const HARMLESS: &[(&str, &str)] = &[];
/// Rules that are hunted in a test of their own: alloc.rs, objects.rs, ring.rs, tier.rs, witness.rs, pins.rs and, where a device takes
/// part, copy.rs, copy_gpu.rs and queued_gpu.rs.
const ELSEWHERE: [&str; 9] = ["alloc.", "objects.", "locks.", "ring.", "tier.", "witness.", "pins.", "copy.dma_", "stream."];
/// Seeds per scenario after which a mutant has survived.
const MAX_SEEDS: u64 = 1 << 14;

/// Whether a run failed by what the rule is there for.
fn is_broken(breaks: Breaks, reason: &str) -> bool {
    match breaks {
        Safety => {
            // A checker that looks between two steps says so first.
            let reason = reason.strip_prefix("invariant violated: ").unwrap_or(reason);
            reason.starts_with(['V', 'I', 'P']) && reason.as_bytes().get(1).is_some_and(u8::is_ascii_digit)
        }
        Progress => reason.starts_with("no end"),
    }
}

/// The first seed on which a scenario fails as it should with the rule dropped, and why.
fn hunt(mutant: &'static str) -> Option<(&'static str, u64, String)> {
    let rule = RULES.iter().find(|of| of.0 == mutant);
    let (soonest, breaks) = rule.map_or(("", Safety), |of| (of.1, of.2));
    let mut all = [scenarios::ALL, scenarios::cache_cases::ALL, scenarios::seat_cases::ALL].concat();
    all.retain(|of| soonest.is_empty() || of.0 == soonest);
    let (mut begin, mut end) = (0, 64);
    while begin < MAX_SEEDS {
        for &(name, scenario) in &all {
            // A run that fails by anything else, an error that a host met or a wait without end, does not count.
            let judged = |seed| match scenario(seed) {
                Err(failure) if !is_broken(breaks, &failure.reason) => Ok(Stats { seed, ..Stats::default() }),
                other => other,
            };
            if let Err(failure) = search(begin..end, Some(mutant), &judged) {
                return Some((name, failure.seed, failure.reason));
            }
        }
        (begin, end) = (end, (end * 4).min(MAX_SEEDS));
    }
    None
}

#[test]
fn the_pool_has_a_switch_for_every_rule() {
    let found = names::of_pool().expect("the pool's sources").mutants;
    let missing: Vec<&str> = RULES.iter().map(|of| of.0).filter(|name| !found.contains(name)).collect();
    assert_eq!(missing, [""; 0], "no mutant! in the pool");
    let unknown: Vec<&str> = HARMLESS.iter().map(|of| of.0).filter(|name| !found.contains(name)).collect();
    assert_eq!(unknown, [""; 0], "named here and not in the pool");
}

#[test]
fn every_dropped_rule_is_noticed() {
    let only = std::env::var("MUTANT").ok();
    let mut survivors = Vec::new();
    for mutant in names::of_pool().expect("the pool's sources").mutants {
        if ELSEWHERE.iter().any(|of| mutant.starts_with(of)) || only.as_ref().is_some_and(|only| only != mutant) {
            continue;
        }
        let begin = std::time::Instant::now();
        let kill = hunt(mutant);
        let seconds = begin.elapsed().as_secs_f32();
        match (kill, HARMLESS.iter().find(|of| of.0 == mutant)) {
            (Some((scenario, seed, reason)), None) => println!("{mutant:<26} -> {scenario}, seed {seed} ({seconds:.1} s): {reason}"),
            (Some(kill), Some(_)) => panic!("{mutant} counts as harmless: {kill:?}"),
            (None, Some((_, why))) => println!("{mutant:<26} -> harmless: {why}"),
            (None, None) => {
                println!("{mutant:<28} -> SURVIVED ({seconds:.1} s)");
                survivors.push(mutant);
            }
        }
    }
    assert_eq!(survivors, [""; 0], "nothing noticed their loss");
}
