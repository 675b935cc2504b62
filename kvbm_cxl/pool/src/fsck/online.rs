// SPDX-License-Identifier: Apache-2.0
//! Damaged lines of a pool that hosts are using: what each one costs now, whether its owner writes it again by itself, and what the
//! operator does otherwise (LOCKS.md 12.18). Nothing is written.

use super::damage;
use super::report::{FindingPlace, Report};
use super::view::View;
use super::watch::{Activity, watch};
use crate::error::Result;
use crate::limits::INTENTS;
use crate::line::Lines;
use crate::media::{Geometry, Region};
use crate::platform::MachineId;
use std::time::Duration;

crate::named::named_enum! {
    /// What becomes of a damaged line.
    Healing {
        /// It was damaged at the first look and verified at the second.
        Healed = "healed",
        /// Its owner runs and writes it again by itself.
        ByOwner = "by-owner",
        /// Hosts do without it: its content follows from other lines.
        NotNeeded = "not-needed",
        /// Its owner does not run: it is written again once a host of that machine does.
        WhenOwnerRuns = "when-owner-runs",
        /// What it said is lost: an operator has to decide.
        ByOperator = "by-operator",
    }
}

/// A line that did not verify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedLine {
    /// Its region.
    pub region: Region,
    /// Its number in the region.
    pub index: u64,
    /// The machine that may write it, as far as the other lines tell.
    pub machine: Option<MachineId>,
    /// Whether a host of that machine beats.
    pub is_owner_alive: bool,
    /// What becomes of it.
    pub healing: Healing,
    /// What it costs until then.
    pub cost: String,
    /// What the operator does.
    pub action: &'static str,
}

const NOTHING: &str = "nothing";
const WAIT: &str = "nothing; if it is still listed after some seconds, look for a stopped process of its owner";
const START_OWNER: &str = "start a host on the owner's machine; if the machine is gone for good, have its seat given away";
const REJOIN: &str = "start a host on the owner's machine, or state its death: the next host that joins in the slot writes the line";
const OFFLINE: &str = "stop every host and run fsck --repair (with --accept-loss where it says so)";

/// Looks at the lines twice, `apart` from each other, and at who beats meanwhile. `seats` is the superblock's seat table.
///
/// # Errors
/// Those of the memory, except where only single lines fail.
pub fn damaged_online(lines: &Lines, seats: &[MachineId], apart: Duration) -> Result<(Activity, Vec<DamagedLine>)> {
    let before = damaged(&View::load(lines, seats)?);
    let activity = watch(lines, apart, true)?;
    let view = View::load(lines, seats)?;
    let after = damaged(&view);
    let found = before.into_iter().map(|(region, index, cost)| {
        let is_there = after.iter().any(|(known, at, _)| (*known, *at) == (region, index));
        let (machine, is_owner_alive) = owner(&view, &activity, region, index);
        let (healing, action) = match is_there {
            false => (Healing::Healed, NOTHING),
            true => outlook(&view, &activity, (region, index), machine, is_owner_alive),
        };
        DamagedLine { region, index, machine, is_owner_alive, healing, cost, action }
    });
    let found = found.collect();
    Ok((activity, found))
}

fn damaged(view: &View<'_>) -> Vec<(Region, u64, String)> {
    let mut report = Report::over(0);
    damage::check(view, &mut report);
    let lines = report.findings.into_iter().filter_map(|finding| match finding.place {
        FindingPlace::Lines { region, first, count } => Some((region, first, count, finding.meaning)),
        FindingPlace::Superblock(_) => None,
    });
    lines.flat_map(|(region, first, count, cost)| (first..first + count).map(move |index| (region, index, cost.clone()))).collect()
}

fn seat_of(geometry: &Geometry, region: Region, index: u64) -> Option<u64> {
    let per_seat = match region {
        Region::Seat => 1,
        Region::Grant => geometry.grant_lines(),
        Region::Binding => geometry.bindings(),
        Region::Fence | Region::Death => geometry.fence_lines(),
        _ => return None,
    };
    Some(index / per_seat)
}

fn slot_of(view: &View<'_>, region: Region, index: u64) -> Option<u64> {
    let geometry = &view.geometry;
    let per_slot = match region {
        Region::Identity | Region::Ask => 1,
        Region::Summary => geometry.summary_lines(),
        Region::Request => geometry.request_lines(),
        Region::Intent => INTENTS as u64,
        Region::Record => geometry.records(),
        Region::Claim => view.lines.layout().claim_lines(),
        Region::FreeBox | Region::FreeAck => geometry.slots.into(),
        Region::Stats => geometry.stats_lines.into(),
        _ => return None,
    };
    Some(index / per_slot.max(1))
}

fn owner(view: &View<'_>, activity: &Activity, region: Region, index: u64) -> (Option<MachineId>, bool) {
    let beats = |slot: u64| activity.slots.iter().any(|&moved| u64::from(moved) == slot);
    let machine_of = |slot: u64| view.decided_bindings.get(slot as usize).map(|register| MachineId(register.best.machine));
    if let Some(seat) = seat_of(&view.geometry, region, index) {
        let machine = view.seat_machine(seat);
        let slots = 0..u64::from(view.geometry.slots);
        return (machine, machine.is_some() && slots.into_iter().any(|slot| beats(slot) && machine_of(slot) == machine));
    }
    let Some(slot) = slot_of(view, region, index) else { return (None, false) };
    (machine_of(slot).filter(|machine| !machine.is_none()), beats(slot))
}

fn outlook(
    view: &View<'_>,
    activity: &Activity,
    (region, index): (Region, u64),
    machine: Option<MachineId>,
    is_owner_alive: bool,
) -> (Healing, &'static str) {
    match (region, seat_of(&view.geometry, region, index)) {
        (_, Some(_)) if machine.is_none() => (Healing::NotNeeded, NOTHING),
        (Region::Grant | Region::Binding, Some(seat)) => {
            let per_seat = if region == Region::Grant { view.geometry.grant_lines() } else { view.geometry.bindings() };
            let is_hidden = match region {
                Region::Grant => view.decided_grants[(index % per_seat) as usize].hidden,
                _ => view.decided_bindings[(index % per_seat) as usize].hidden,
            };
            match is_hidden {
                // The one in charge knows its copies.
                true if activity.seats.iter().any(|&moved| u64::from(moved) == seat) => (Healing::ByOwner, WAIT),
                true => (Healing::ByOperator, OFFLINE),
                false => (Healing::NotNeeded, NOTHING),
            }
        }
        (_, Some(_)) if is_owner_alive => (Healing::ByOwner, WAIT),
        (_, Some(_)) => (Healing::WhenOwnerRuns, START_OWNER),
        (Region::JoinBox, None) => (Healing::NotNeeded, NOTHING),
        (Region::Identity | Region::Summary | Region::Request | Region::Stats, None) if is_owner_alive => (Healing::ByOwner, WAIT),
        (Region::Identity | Region::Summary | Region::Request | Region::Intent | Region::Stats, None) => (Healing::WhenOwnerRuns, REJOIN),
        (Region::Ask, None) => (Healing::NotNeeded, NOTHING),
        _ => (Healing::ByOperator, OFFLINE),
    }
}
