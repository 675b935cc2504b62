// SPDX-License-Identifier: Apache-2.0
//! A look at a pool as text for Prometheus. The names are in docs/operating/metrics.md and stay what they are.

use crate::hosts::{is_fenced, standing};
use crate::pool_view::{HostView, PoolView};
use cxl_pool::cache::survey::{CacheSummary, CellState};
use cxl_pool::fsck::SlotState;
use cxl_pool::media::uuid_text;
use cxl_pool::metrics::stats::Stat;
use cxl_pool::metrics::{Exposition, Kind, Seconds};
use cxl_pool::pool::Pool;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

const STATES: [SlotState; 5] = [SlotState::Free, SlotState::Joining, SlotState::Live, SlotState::Left, SlotState::Unreadable];

/// A metric of each host that is none of its own counters.
type OfHost = (&'static str, Kind, &'static str, fn(&HostView) -> Option<u64>);

const OF_HOSTS: [OfHost; 4] = [
    ("cxl_pool_host_incarnation", Kind::Gauge, "Incarnation bound to the slot; left out where that cannot be read.", |host| {
        (!host.slot.is_binding_hidden).then_some(host.slot.incarnation.into())
    }),
    ("cxl_pool_host_heartbeats_total", Kind::Counter, "Heartbeats; that of a live host moves.", |host| Some(host.slot.heartbeat)),
    (
        "cxl_pool_host_fenced",
        Kind::Gauge,
        "1 while the incarnation bound to the slot is fenced; left out where that cannot be read.",
        |host| is_fenced(&host.slot).map(u64::from),
    ),
    ("cxl_pool_host_damaged_stats_lines", Kind::Gauge, "Lines with counters of the host that cannot be read.", |host| {
        Some(host.stats.as_ref().map_or(0, |stats| stats.damaged_lines as u64))
    }),
];

/// The name under which a host's counter is exported: a time in seconds, a total where it only rises.
fn name_of(stat: Stat) -> String {
    let name = stat.name().replace("_ns", "_seconds");
    let total = if stat.kind() == Kind::Counter { "_total" } else { "" };
    format!("cxl_pool_host_{name}{total}")
}

/// Its meaning, without the unit that the lines in the pool have.
fn help_of(stat: Stat) -> String {
    stat.help().replace(", in nanoseconds", "")
}

/// Everything that is exported, as text; `cells` where the pool has any.
pub fn render(pool: &Pool, view: &PoolView, cells: Option<&CacheSummary>, out: &mut String) {
    let superblock = pool.superblock();
    let (uuid, incarnation) = (uuid_text(superblock.uuid()), format!("{:#x}", superblock.incarnation()));
    // A Prometheus may see several pools: nothing of one adds to another.
    let mut out = Exposition::with_label(out, "pool", &uuid);
    let mut single = |name: &str, kind: Kind, help: &str, labels: &[(&str, &str)], value: u64| {
        out.family(name, kind, help);
        out.sample(name, "", labels, value);
    };
    let labels = [("uuid", uuid.as_str()), ("incarnation", incarnation.as_str())];
    single("cxl_pool_info", Kind::Gauge, "Always 1; the labels identify the pool.", &labels, 1);
    single("cxl_pool_size_bytes", Kind::Gauge, "Size of the pool.", &[], pool.layout().geometry().len_bytes);
    single("cxl_pool_chunks", Kind::Gauge, "Chunks of the allocator.", &[], pool.layout().chunks());

    out.family("cxl_pool_slots", Kind::Gauge, "Slots by the state of their host.");
    for state in STATES {
        out.sample("cxl_pool_slots", "", &[("state", state.name())], view.count(state));
    }
    out.family("cxl_pool_seat_epoch", Kind::Gauge, "Epoch that a manager seat claimed last; the highest one serves.");
    for seat in &view.seats {
        seat.epoch.iter().for_each(|epoch| out.sample("cxl_pool_seat_epoch", "", &[("seat", &seat.seat.to_string())], epoch));
    }
    out.family("cxl_pool_seat_beats_total", Kind::Counter, "Heartbeats of a manager seat; that of the serving seat moves.");
    for seat in &view.seats {
        seat.beat.iter().for_each(|beat| out.sample("cxl_pool_seat_beats_total", "", &[("seat", &seat.seat.to_string())], beat));
    }
    let help = "Live machines with a manager seat; each can take over as manager.";
    out.family("cxl_pool_living_seats", Kind::Gauge, help);
    let living: BTreeSet<_> = view.seats.iter().filter(|seat| seat.is_living).filter_map(|seat| Some(seat.machine?.0)).collect();
    out.sample("cxl_pool_living_seats", "", &[], living.len());
    out.family(
        "cxl_pool_host_info",
        Kind::Gauge,
        "Always 1; the labels give the slot's machine, its name (without one, its id) and the standing of its host.",
    );
    for host in &view.hosts {
        let (slot, machine) = (host.slot.slot.to_string(), host.slot.machine.to_string());
        let name = host.slot.name.as_deref().unwrap_or(&machine);
        let (state, standing) = (host.slot.state.name(), standing(&host.slot));
        let labels = [("slot", slot.as_str()), ("machine", &machine), ("name", name), ("state", state), ("standing", standing)];
        out.sample("cxl_pool_host_info", "", &labels, 1);
    }
    let mut of_hosts = |name: &str, kind: Kind, help: &str, value: &dyn Fn(&HostView) -> Option<Box<dyn Display>>| {
        out.family(name, kind, help);
        for host in &view.hosts {
            value(host).iter().for_each(|value| out.sample(name, "", &[("slot", &host.slot.slot.to_string())], value));
        }
    };
    for (name, kind, help, value) in OF_HOSTS {
        of_hosts(name, kind, help, &|host| value(host).map(|value| -> Box<dyn Display> { Box::new(value) }));
    }
    for stat in Stat::ALL {
        let shown =
            |value: u64| -> Box<dyn Display> { if *stat == Stat::LockWaitNs { Box::new(Seconds { ns: value }) } else { Box::new(value) } };
        of_hosts(&name_of(*stat), stat.kind(), &help_of(*stat), &|host| host.stat(*stat).map(shown));
    }
    of_cells(&cells.cloned().unwrap_or_default(), &mut out);
}

fn of_cells(cells: &CacheSummary, out: &mut Exposition<'_>) {
    out.family("cxl_pool_cells", Kind::Gauge, "Cells of the prefix cache by state.");
    for state in CellState::ALL.into_iter().filter(|_| cells.cells.total() > 0) {
        out.sample("cxl_pool_cells", "", &[("state", state.name())], cells.cells.of(state));
    }
    out.family("cxl_pool_owned_cells", Kind::Gauge, "Cells by the slot that wrote their descriptors, the standing of its host, and state.");
    let mut owned = BTreeMap::new();
    for owner in &cells.owners {
        for state in CellState::ALL.into_iter().filter(|state| owner.cells.of(*state) > 0) {
            *owned.entry((owner.owner.slot, owner.standing.name(), state.name())).or_insert(0) += owner.cells.of(state);
        }
    }
    for ((slot, standing, state), count) in owned {
        let slot = slot.to_string();
        out.sample("cxl_pool_owned_cells", "", &[("slot", &slot), ("standing", standing), ("state", state)], count);
    }
    out.family("cxl_pool_cell_chunks", Kind::Gauge, "Chunks of cells by the state of their claims.");
    let chunks = &cells.chunks;
    let counts = [
        ("claimed", chunks.claimed),
        ("unclaimed", chunks.unclaimed),
        ("abandoned", chunks.abandoned),
        ("waiting", chunks.waiting),
        ("contested", chunks.contested),
    ];
    for (state, count) in counts.into_iter().filter(|_| cells.cells.total() > 0) {
        out.sample("cxl_pool_cell_chunks", "", &[("state", state)], count);
    }
    out.family("cxl_pool_blocks", Kind::Gauge, "Blocks of the prefix cache that a pull may get.");
    out.sample("cxl_pool_blocks", "", &[], cells.served);
    out.family("cxl_pool_pinned_cells", Kind::Gauge, "Cells that any host has pinned.");
    out.sample("cxl_pool_pinned_cells", "", &[], cells.pinned);
    out.family("cxl_pool_awaited_bytes", Kind::Gauge, "Bytes of cells that wait for proof that the slot's host is dead.");
    let mut awaited = BTreeMap::new();
    cells.waits.iter().for_each(|wait| *awaited.entry(wait.awaited.slot).or_insert(0) += wait.cell_bytes);
    for (slot, cell_bytes) in awaited {
        out.sample("cxl_pool_awaited_bytes", "", &[("slot", &slot.to_string())], cell_bytes);
    }
}

#[cfg(test)]
mod tests;
