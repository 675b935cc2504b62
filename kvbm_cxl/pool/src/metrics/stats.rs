// SPDX-License-Identifier: Apache-2.0
//! What each host tells the whole pool of what it counted: lines that only that host writes, and all read.
//!
//! Every process of a host counts for itself. Its counts lie in a row of its own in memory that the host's processes share
//! ([`StatsBoard`]); one of them adds the rows up from time to time and publishes the sums. A row whose process is gone is added to a
//! base first, so that no sum goes back for as long as the machine runs. After a restart of the machine counters start at zero, under
//! another incarnation.
//!
//! Nothing in the pool depends on these lines. Their counters are of one moment within a line; between lines no order holds.

mod board;
mod given;

pub(crate) use board::HOOKS;
pub use board::StatsBoard;
pub use given::Given;

use super::{Direction, Engine, Kind, Metrics, MissReason};
use crate::error::{Error, Result};
use crate::line::Lines;
use crate::media::{COUNTERS_PER_STATS, Region, STATS_LINES, StatsLine};

/// Counters that the lines of a slot have room for.
pub const STATS: usize = STATS_LINES * COUNTERS_PER_STATS;

/// Makes the list of counters, each with its place in the lines of a slot, which is part of the format. Those without a value are counted
/// by layers above.
macro_rules! stats {
    (@value $place:literal, $value:expr) => { $value };
    (@value $place:literal,) => { |metrics| metrics.given.get($place) };
    (@is_given $value:expr) => { false };
    (@is_given) => { true };
    ($($variant:ident = $place:literal, $name:literal, $kind:ident, $help:literal $(, $value:expr)?;)*) => {
        /// A counter that a host publishes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Stat {
            $(#[doc = $help] $variant = $place,)*
        }

        impl Stat {
            /// All of them, in the order of their places.
            pub const ALL: &'static [Stat] = &[$(Stat::$variant),*];

            /// Its name in reports.
            pub const fn name(self) -> &'static str {
                match self { $(Stat::$variant => $name,)* }
            }

            /// Whether it only rises.
            pub const fn kind(self) -> Kind {
                match self { $(Stat::$variant => Kind::$kind,)* }
            }

            /// What it means.
            pub const fn help(self) -> &'static str {
                match self { $(Stat::$variant => $help,)* }
            }

            /// Whether a layer above this crate counts it, with [`Given`].
            pub const fn is_given(self) -> bool {
                match self { $(Stat::$variant => stats!(@is_given $($value)?),)* }
            }

            /// What a process has counted of it.
            pub fn of(self, metrics: &Metrics) -> u64 {
                match self {
                    $(Stat::$variant => {
                        let value: fn(&Metrics) -> u64 = stats!(@value $place, $($value)?);
                        value(metrics)
                    })*
                }
            }
        }
    };
}

stats! {
    PublishedBlocks = 0, "published_blocks", Counter, "Blocks published.", |m| m.publish_total.get();
    PublishedBytes = 1, "published_bytes", Counter, "Payload of the blocks published.", |m| m.publish_bytes_total.get();
    PulledBlocks = 2, "pulled_blocks", Counter, "Blocks pulled.", |m| m.pull_total.get();
    PulledBytes = 3, "pulled_bytes", Counter, "Payload of the blocks pulled.", |m| m.pull_bytes_total.get();
    Hits = 4, "hits", Counter, "Blocks requested and found.", |m| m.hits_total.get();
    Misses = 5, "misses", Counter, "Blocks requested and not served, for any reason.", |m| m.misses_total.total();
    Refusals = 6, "refusals", Counter, "Blocks that were not published.", |m| m.publish_refused_total.total();
    Evictions = 7, "evictions", Counter, "Blocks evicted.", |m| m.evictions_total.total();
    PinsTaken = 8, "pins_taken", Counter, "Pins taken.", |m| m.pins_total.get();
    Pins = 9, "pins", Gauge, "Pins held now.", |m| positive(m.pins.get());
    Aborts = 10, "aborts", Counter, "Reserved blocks that were never published.", |m| m.publish_aborted_total.get();
    Adopted = 11, "adopted", Counter, "Blocks of fenced hosts that this host took over.", |m| m.adopted_total.get();
    QuarantinedCells = 12, "quarantined_cells", Gauge, "Cells in quarantine until proof that no host writes to them.",
        |m| positive(m.quarantined_cells.get());
    Rejoins = 13, "rejoins", Counter, "Times that this host was fenced and joined again.", |m| m.rejoins_total.get();
    LockWaits = 14, "lock_waits", Counter, "Locks of the pool that were acquired.", |m| m.lock_wait_seconds.count();
    LockWaitNs = 15, "lock_wait_ns", Counter, "Time to acquire these locks, in nanoseconds.",
        |m| m.lock_wait_seconds.sum();
    RingSent = 16, "ring_sent", Counter, "Messages sent through rings.", |m| m.ring_messages_total.of(Direction::Sent).get();
    RingReceived = 17, "ring_received", Counter, "Messages received through rings.",
        |m| m.ring_messages_total.of(Direction::Received).get();
    CopiedByCpu = 18, "copied_by_cpu_bytes", Counter, "Bytes copied by loads and non-temporal stores.",
        |m| m.copy_bytes_total.of(Engine::Cpu).get();
    CopiedByDsa = 19, "copied_by_dsa_bytes", Counter, "Bytes copied by the data streaming accelerator.",
        |m| m.copy_bytes_total.of(Engine::Dsa).get();
    CopiedByCuda = 20, "copied_by_cuda_bytes", Counter, "Bytes copied by the GPU.", |m| m.copy_bytes_total.of(Engine::Cuda).get();
    MissesAbsent = 21, "misses_absent", Counter, "Misses because nothing names the key.", |m| count_misses(m, &[MissReason::Absent]);
    MissesFenced = 22, "misses_fenced", Counter, "Misses because a host is fenced.",
        |m| count_misses(m, &[MissReason::FencedOwner, MissReason::FencedDuring, MissReason::HostFenced]);
    MissesDamaged = 23, "misses_damaged", Counter, "Misses because a line, a checksum or the memory is bad: look at the devices.",
        |m| count_misses(m, &[MissReason::BadLine, MissReason::Checksum, MissReason::Device]);
    NixlPosted = 24, "nixl_posted", Counter, "Transfers that NIXL agents posted.";
    NixlReads = 25, "nixl_reads", Counter, "READ transfers that completed.";
    NixlWrites = 26, "nixl_writes", Counter, "WRITE transfers that completed.";
    NixlFailed = 27, "nixl_failed", Counter, "Transfers that failed.";
    NixlCancelled = 28, "nixl_cancelled", Counter, "Transfers that were released while they were active.";
    NixlDisconnected = 29, "nixl_disconnected", Counter, "Transfers that failed because the peer was gone.";
    NixlPoolReadBytes = 30, "nixl_pool_read_bytes", Counter, "Bytes copied out of the pool, directly.";
    NixlPoolWrittenBytes = 31, "nixl_pool_written_bytes", Counter, "Bytes copied into the pool or within it, directly.";
    NixlLocalBytes = 32, "nixl_local_bytes", Counter, "Bytes copied between memory of one process.";
    NixlStagedReadBytes = 33, "nixl_staged_read_bytes", Counter, "Bytes read from other processes over staging.";
    NixlStagedWrittenBytes = 34, "nixl_staged_written_bytes", Counter, "Bytes written to other processes over staging.";
    NixlServedReadBytes = 35, "nixl_served_read_bytes", Counter, "Bytes gathered for the staged READs of other processes.";
    NixlServedWrittenBytes = 36, "nixl_served_written_bytes", Counter, "Bytes scattered for the staged WRITEs of other processes.";
    NixlVramBytes = 37, "nixl_vram_bytes", Counter, "Bytes copied by GPUs, between their memory and the pool or this process.";
    NixlObjectsWritten = 38, "nixl_objects_written", Counter, "Objects published by WRITE.";
    NixlObjectsExisted = 39, "nixl_objects_existed", Counter, "Objects that existed when a WRITE came.";
    NixlObjectsRead = 40, "nixl_objects_read", Counter, "Objects read.";
    NixlObjectsMissed = 41, "nixl_objects_missed", Counter, "Objects that a READ did not find.";
    NixlObjectWrittenBytes = 42, "nixl_object_written_bytes", Counter, "Bytes of the objects published.";
    NixlObjectReadBytes = 43, "nixl_object_read_bytes", Counter, "Bytes read from objects.";
    NixlFileWrittenBytes = 44, "nixl_file_written_bytes", Counter, "Bytes written to files.";
    NixlFileReadBytes = 45, "nixl_file_read_bytes", Counter, "Bytes read from files.";
    NixlNotifsSent = 46, "nixl_notifs_sent", Counter, "Notifications sent.";
    NixlNotifsReceived = 47, "nixl_notifs_received", Counter, "Notifications received.";
    NixlNotifsResent = 48, "nixl_notifs_resent", Counter, "Notifications sent again after a link ended.";
    NixlLinksMade = 49, "nixl_links_made", Counter, "Links to peers that were made, from either end.";
    NixlLinksLost = 50, "nixl_links_lost", Counter, "Links that ended without a close by the other end.";
    NixlPeersGone = 51, "nixl_peers_gone", Counter, "Peers that ended, or could not be reached.";
    NixlRefused = 52, "nixl_refused", Counter, "Requests of peers for memory that is not, or no longer, registered.";
    NixlLinks = 53, "nixl_links", Gauge, "Links to peers now.";
    NixlStagingUsedBytes = 54, "nixl_staging_used_bytes", Gauge, "Pool memory that staged transfers use now.";
    NixlStagingBytes = 55, "nixl_staging_bytes", Gauge, "Pool memory that engines hold for staged transfers now.";
    NixlEngines = 56, "nixl_engines", Gauge, "Engines now.";
}

/// A gauge is shared by threads that add to it in any order, and may be below zero for a moment.
fn positive(value: i64) -> u64 {
    value.max(0) as u64
}

fn count_misses(metrics: &Metrics, reasons: &[MissReason]) -> u64 {
    reasons.iter().map(|reason| metrics.misses_total.of(*reason).get()).sum()
}

impl Stat {
    /// The counter at a place, if that is in use.
    pub fn at(place: usize) -> Option<Stat> {
        Stat::ALL.get(place).copied()
    }

    /// Its place in the lines of a slot: counter `place % 7` of line `place / 7`.
    pub const fn place(self) -> usize {
        self as usize
    }
}

/// What a host published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostStats {
    /// Its slot.
    pub slot: u16,
    /// The incarnation that counted; 0 = nothing was ever published.
    pub incarnation: u32,
    /// Lines of this slot that do not verify or cannot be read; their counters are zero here.
    pub damaged_lines: usize,
    places: usize,
    values: [u64; STATS],
}

impl HostStats {
    /// Whether the pool has room for a counter: those formatted by older programs have fewer lines.
    pub fn has(&self, stat: Stat) -> bool {
        stat.place() < self.places
    }

    /// A counter; zero where the pool has no room for it.
    pub fn get(&self, stat: Stat) -> u64 {
        self.values.get(stat.place()).copied().unwrap_or(0)
    }
}

/// Reads what every host published, one result for each slot.
///
/// # Errors
/// Those of the memory, except where only single lines fail.
pub fn read_all(lines: &Lines) -> Result<Vec<HostStats>> {
    let slots = lines.layout().geometry().slots as u16;
    (0..slots).map(|slot| read(lines, slot)).collect()
}

/// Reads what the host in `slot` published.
///
/// # Errors
/// [`Error::OutOfRange`] when there is no such slot; as [`read_all`].
pub fn read(lines: &Lines, slot: u16) -> Result<HostStats> {
    let line_count = u64::from(lines.layout().geometry().stats_lines);
    let first = u64::from(slot) * line_count;
    lines.layout().line_offset(Region::Stats, first)?;
    let indexes: Vec<u64> = (first..first + line_count).collect();
    let mut fetched: Vec<Result<StatsLine>> = Vec::with_capacity(indexes.len());
    if lines.fetch_many(&indexes, &mut fetched).is_err() {
        // Poison ends a whole batch; line by line it is only the line itself.
        fetched = indexes.iter().map(|&index| lines.fetch(index)).collect();
    }
    let mut stats =
        HostStats { slot, incarnation: 0, damaged_lines: 0, places: line_count as usize * COUNTERS_PER_STATS, values: [0; STATS] };
    let newest = fetched.iter().flatten().map(|line| line.incarnation).max().unwrap_or(0);
    stats.incarnation = newest;
    for (line, counters) in fetched.into_iter().zip(stats.values.as_chunks_mut().0) {
        match line {
            // Lines of the incarnation before are those that this one has not come to yet.
            Ok(line) if line.incarnation == newest => *counters = line.counters,
            Ok(_) => {}
            Err(Error::BadLine { .. } | Error::Poisoned { .. } | Error::DeviceLost { .. }) => stats.damaged_lines += 1,
            Err(other) => return Err(other),
        }
    }
    Ok(stats)
}

#[cfg(test)]
mod tests;
