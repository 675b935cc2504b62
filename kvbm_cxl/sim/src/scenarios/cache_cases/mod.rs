// SPDX-License-Identifier: Apache-2.0
//! The counter-examples of CACHE.md section 9 as choreographies: each passes on the production code, for every seed, and fails with the
//! rule dropped that it is about. The model checker that found them models one line as one step; here the production code takes the same
//! ways through the same places.
//!
//! Then follow cases without a number: lines that a device damages under hosts that work.
//!
//! The roles: Z is the host that is taken for dead and resumes, A another publisher, B the next one, R a reader. The warden directs.

mod adopt;
mod awaited;
mod caches;
mod claims;
mod damage;
mod plain;
mod pull;
mod strays;
mod window;
mod writers;

pub use writers::{abort_before_the_device_is_done, pull_with_checksum_under_a_false_proof};

use super::Scenario;
use super::cache_ledger::Name;

/// The host that is taken for dead.
const Z: usize = 1;
/// Another publisher.
const A: usize = 2;
/// A reader, or the next publisher.
const R: usize = 3;

/// A block.
const K: Name = Name(0, 1);
/// Another one.
const L: Name = Name(0, 2);
/// And another.
const M: Name = Name(0, 3);

/// Every choreography with the name under which its seeds are replayed: the number of the counter-example, and what happens.
pub const ALL: &[(&str, Scenario)] = &[
    ("c1_cell_republished_in_mid_copy", pull::republished_in_mid_copy),
    ("c2_stray_names_new_bytes", strays::names_new_bytes),
    ("c2a_stray_restores_the_line", strays::restores_the_line),
    ("c2b_confirmed_on_a_stray", strays::confirmed_on_a_stray),
    ("c3_writing_of_a_zombie", writers::zombie_goes_on_copying),
    ("c4_pinned_behind_an_early_look", plain::pinned_behind_an_early_look),
    ("c5_same_key_in_the_same_cell", pull::same_key_in_the_same_cell),
    ("c6_zombie_reserves_what_was_adopted", writers::zombie_reserves_what_was_adopted),
    ("c6_zombie_reserves_a_batch", writers::zombie_reserves_a_batch),
    ("c7_one_cell_for_all", plain::one_cell_for_all),
    ("c8_false_proof", writers::zombie_goes_on_copying),
    ("c8_false_proof_and_a_pin", writers::pinned_under_a_false_proof),
    ("c9_others_are_still_found", plain::others_are_still_found),
    ("c9_hint_chosen_before_others", plain::hint_chosen_before_others),
    ("c10_cell_wanted_before_its_hint_is_gone", plain::cell_wanted_before_its_hint_is_gone),
    ("c11_evicting_of_a_dead_host", adopt::evicting_of_a_dead_host),
    ("c12_stray_on_a_line_of_its_own", strays::on_a_line_of_the_owner),
    ("c13_pinned_in_quarantine", adopt::pinned_in_quarantine),
    ("c14_stray_among_two_claimants", claims::stray_among_two_claimants),
    ("c14_own_stray_beside_another_claimant", claims::own_stray_beside_another_claimant),
    ("c15_chunk_of_another_process", claims::chunk_of_another_process),
    ("c15_chunk_comes_back_to_another_process", claims::comes_back_to_another_process),
    ("c16_pinned_beside_another", plain::pinned_beside_another),
    ("c16_pinned_by_two_processes", plain::pinned_by_two_processes),
    ("c16_pinned_many_times", plain::pinned_many_times),
    ("c16_pinned_thrice_beside_a_death", plain::pinned_thrice_beside_a_death),
    ("c16_pinned_through_a_reaping", plain::pinned_through_a_reaping),
    ("c16_pinned_after_a_death", plain::pinned_after_a_death),
    ("c17_gone_before_the_pin", plain::gone_before_the_pin),
    ("c17_gone_before_the_pins", plain::gone_before_the_pins),
    ("c20_abort_after_the_device", writers::abort_after_the_device),
    ("c21_manager_changes", claims::manager_changes),
    ("c22_claim_of_a_proven_host", claims::claim_of_a_proven_host),
    ("c22_given_back_beside_a_zombie", claims::given_back_beside_a_zombie),
    ("c23_releaser_dies", claims::releaser_dies),
    ("c24_hint_line_cached_before", plain::hint_line_cached_before),
    ("c25_committed_in_place", caches::committed_in_place),
    ("c25_given_up_with_stores_in_a_cache", caches::given_up),
    ("c26_filler_dies_and_its_host_goes_on", caches::host_goes_on),
    ("c27_cells_of_a_dead_filler_taken_over", caches::taken_over),
    ("c28_machine_of_a_dead_filler_joins_again", caches::joined_again),
    ("c29_host_of_a_dead_filler_leaves", caches::left),
    ("c30_given_back_after_a_zombie", claims::given_back_after_a_zombie),
    ("c31_cold_copy_of_a_cell_that_goes", pull::cold_copy_of_a_cell_that_goes),
    ("awaited_blocks", awaited::awaited),
    ("full_window_of_own_blocks", window::of_own_blocks),
    ("full_window_of_another_host", window::of_another_host),
    ("damaged_line_of_pins", damage::line_of_pins),
    ("damaged_line_of_claims", damage::line_of_claims),
    ("damaged_line_of_claims_written_anew", damage::line_of_claims_written_anew),
    ("damaged_line_of_claims_beside_a_zombie", damage::line_of_claims_beside_a_zombie),
];
