// SPDX-License-Identifier: Apache-2.0
//! The counter-examples of CACHE.md section 9 as choreographies: all of them pass while no rule is dropped, and most runs come to the end
//! of the play. That each fails without its rule is what mutants.rs is about; here are those whose rule is not the cache's own.

use cxl_sim::scenarios::{cache_cases, cache_stage};
use cxl_sim::{Scenario, explore, search};

/// Seeds of each choreography.
const SEEDS: u64 = 40;

#[test]
fn every_choreography_holds_and_is_played_to_its_end() {
    let only = std::env::var("CASE").ok();
    for &(name, scenario) in cache_cases::ALL.iter().filter(|of| only.as_ref().is_none_or(|only| of.0.starts_with(only))) {
        let begin = std::time::Instant::now();
        let summary = explore(name, SEEDS, scenario);
        let visits = |point| summary.points.get(point).copied().unwrap_or(0);
        let (played, spoiled) = (visits(cache_stage::PLAYED), visits(cache_stage::SPOILED));
        println!("  {played} scripts came to their end, {spoiled} were spoiled, {:.1} s", begin.elapsed().as_secs_f32());
        assert!(played >= summary.runs && spoiled * 10 <= summary.runs, "{name}: {played} scripts of {} runs were played", summary.runs);
    }
}

/// The lowest of some seeds on which a scenario fails with a rule dropped, and why.
fn first_failure(mutant: Option<&'static str>, scenario: Scenario) -> Option<(u64, String)> {
    search(0..SEEDS, mutant, &scenario).err().map(|failure| (failure.seed, failure.reason))
}

/// The choreography of this name.
fn case(name: &str) -> Scenario {
    cache_cases::ALL.iter().find(|of| of.0 == name).expect("it is listed").1
}

fn breaks(failure: &Option<(u64, String)>, rules: &[&str]) -> bool {
    failure.as_ref().is_some_and(|(_, reason)| rules.iter().any(|rule| reason.contains(rule)))
}

#[test]
fn a_cell_given_up_while_a_device_writes_is_noticed() {
    let found = first_failure(None, cache_cases::abort_before_the_device_is_done);
    assert!(breaks(&found, &["P1: "]), "C20: {found:?}");
}

#[test]
fn a_checksum_keeps_pulls_right_under_a_false_proof() {
    let mutant = Some("cache.timeout_is_proof");
    let scenario = cache_cases::pull_with_checksum_under_a_false_proof;
    let summary = search(0..SEEDS, mutant, &scenario).unwrap_or_else(|failure| panic!("C8: {failure}"));
    // Nothing else than the checksum saw it, and it did in many runs.
    let misses = summary.points.get("scene.checksum_differs").copied().unwrap_or(0);
    assert!(misses >= SEEDS / 4, "C8: a checksum was wrong in {misses} of {SEEDS} runs");
}

#[test]
fn a_fence_word_that_reverts_is_noticed() {
    // The rule is the host layer's (A1): a host that has one manager's row alone in view sees a fence come and go. Its loss shows in the
    // cache as two writers of one cell.
    let found = first_failure(Some("fence_row_of_granter_only"), case("c21_manager_changes"));
    assert!(breaks(&found, &["P3: ", "P1: "]), "C21: {found:?}");
}

#[test]
fn the_order_of_a_copy_is_needed_by_the_cache() {
    // C18 and C19, beside the copies' own scenario: no line, no pin and no fence check makes up for their loss.
    for (rule, name) in [
        ("copy.publish_no_fence", "c17_gone_before_the_pin"),
        ("copy.pull_no_flush", "c7_one_cell_for_all"),
        ("copy.pull_no_full_fence", "c7_one_cell_for_all"),
    ] {
        let found = first_failure(Some(rule), case(name));
        println!("{rule}: {found:?}");
        assert!(breaks(&found, &["P1: "]), "{rule}: {found:?}");
    }
}

#[test]
fn both_looks_are_needed_by_a_copy_without_a_pin() {
    for rule in ["cache.no_refetch", "cache.stamp_not_compared", "cache.cold_line_not_compared"] {
        let found = first_failure(Some(rule), case("c31_cold_copy_of_a_cell_that_goes"));
        assert!(breaks(&found, &["P1: "]), "{rule}: {found:?}");
    }
}
