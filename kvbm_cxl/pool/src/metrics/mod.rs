// SPDX-License-Identifier: Apache-2.0
//! What a process counts, in the form in which Prometheus collects it, and what a host tells the whole pool of it.
//!
//! [`Metrics`] is the table: every metric is a field with a name that stays what it is. An update costs a relaxed add or two. The names,
//! labels and meanings are in docs/operating/metrics.md, which a test holds against this table.
//!
//! Existing client libraries keep labelled counters in maps under locks. Here the set of labels is known when the program is built,
//! so that a counter is an atomic at a fixed place.

mod labels;
pub mod stats;
mod text;
mod values;

pub use labels::{AheadFate, Direction, Engine, EvictionReason, FailureReason, Label, MissReason, RefusalReason};
pub use text::{CONTENT_TYPE, Exposition, Kind, Seconds};
pub use values::{BUCKETS, Bytes, Counter, Gauge, Histogram, Labelled, Metric, Scale, Time};

/// Counters, one for each value of a label. `N` is the number of its values.
pub type Counters<L, const N: usize> = Labelled<L, Counter, N>;

/// The description of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Its name.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Name and values of its label, if it has one.
    pub label: Option<(&'static str, &'static [&'static str])>,
    /// What it means.
    pub help: &'static str,
}

/// Makes the structure, its text and its list from one table.
macro_rules! metrics {
    ($($field:ident: $kind:ty = $name:literal, $help:literal;)*) => {
        /// Everything that a process counts.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $(#[doc = concat!("`", $name, "`: ", $help)] pub $field: $kind,)*
            /// What layers above this crate count. It goes to the host's lines in the pool ([`stats`]), and is not rendered here: those
            /// layers have names of their own for it.
            pub given: stats::Given,
        }

        impl Metrics {
            /// Every metric, in the order in which it is rendered.
            pub const ALL: &'static [Descriptor] = &[
                $(Descriptor { name: $name, kind: <$kind as Metric>::KIND, label: <$kind as Metric>::LABEL, help: $help },)*
            ];

            /// Appends the text for Prometheus to `out`.
            pub fn render(&self, out: &mut String) {
                let mut out = Exposition::new(out);
                $(
                    out.family($name, <$kind as Metric>::KIND, $help);
                    self.$field.write($name, &[], &mut out);
                )*
            }
        }
    };
}

metrics! {
    publish_total: Counter = "cxl_cache_publish_total", "Blocks published.";
    publish_bytes_total: Counter = "cxl_cache_publish_bytes_total", "Payload of the blocks published.";
    publish_seconds: Histogram<Time> = "cxl_cache_publish_seconds", "Time from the reservation of a block until hosts can pull it.";
    publish_refused_total: Counters<RefusalReason, 8> = "cxl_cache_publish_refused_total", "Blocks that were not published.";
    publish_aborted_total: Counter = "cxl_cache_publish_aborted_total", "Reserved blocks that were never published.";
    block_bytes: Histogram<Bytes> = "cxl_cache_block_bytes", "Sizes of the blocks published.";
    pull_total: Counter = "cxl_cache_pull_total", "Blocks pulled: copied, and verified afterwards.";
    pull_bytes_total: Counter = "cxl_cache_pull_bytes_total", "Payload of the blocks pulled.";
    pull_seconds: Histogram<Time> = "cxl_cache_pull_seconds", "Time of a pull, or of a batch of pulls, misses included.";
    hits_total: Counter = "cxl_cache_hits_total", "Blocks that a lookup or pull found.";
    misses_total: Counters<MissReason, 16> = "cxl_cache_misses_total", "Blocks requested and not served.";
    lookup_seconds: Histogram<Time> = "cxl_cache_lookup_seconds", "Time of a lookup of one key or of a chain of keys.";
    pins_total: Counter = "cxl_cache_pins_total", "Pins taken.";
    pins: Gauge = "cxl_cache_pins", "Pins held now.";
    evictions_total: Counters<EvictionReason, 4> = "cxl_cache_evictions_total", "Blocks evicted.";
    evictions_pinned_total: Counter = "cxl_cache_evictions_pinned_total", "Evictions abandoned since a host had pinned the block.";
    adopted_total: Counter = "cxl_cache_adopted_total", "Blocks of fenced hosts that this process took over.";
    quarantined_cells: Gauge = "cxl_cache_quarantined_cells", "Cells in quarantine until proof that no host writes to them.";
    lock_wait_seconds: Histogram<Time> = "cxl_lock_wait_seconds", "Time to acquire a lock of the pool.";
    lock_timeouts_total: Counter = "cxl_lock_timeouts_total", "Lock acquisitions that timed out.";
    lock_damaged_total: Counter = "cxl_lock_damaged_total", "Calls that failed because a lock, fence or membership line stays damaged.";
    healed_lines_total: Counter = "cxl_host_healed_lines_total", "Damaged lines of its own that this process wrote again.";
    rejoins_total: Counter = "cxl_host_rejoins_total", "Times that this host was fenced and joined again.";
    failed_rounds_total: Counters<FailureReason, 8> = "cxl_host_failed_rounds_total", "Failed rounds of this process's background threads.";
    moved_files: Gauge = "cxl_host_moved_files", "Files of the pool that were removed or replaced since this process opened them.";
    copy_bytes_total: Counters<Engine, 3> = "cxl_copy_bytes_total", "Bytes copied to and from the pool.";
    copy_seconds: Labelled<Engine, Histogram<Time>, 3> = "cxl_copy_seconds", "Time of a copy, of however many pieces.";
    ahead_pages_total: Counters<AheadFate, 3> = "cxl_copy_ahead_pages_total", "Pages prefetched from the device before a pull.";
    gpu_unflushed_bytes_total: Counter = "cxl_gpu_unflushed_bytes_total",
        "Bytes that GPUs copied to and from the pool without a flush (DMA is uncached).";
    gpu_registered_bytes: Gauge = "cxl_gpu_registered_bytes", "Bytes of the pool that are registered for GPUs.";
    gpu_queued_bytes: Gauge = "cxl_gpu_queued_bytes", "Bytes of stream-ordered GPU copies that have not completed.";
    ring_messages_total: Counters<Direction, 2> = "cxl_ring_messages_total", "Messages through rings.";
    ring_bytes_total: Counters<Direction, 2> = "cxl_ring_bytes_total", "Payload of these messages.";
}

impl Metrics {
    /// All zero.
    pub fn new() -> Self {
        Metrics::default()
    }
}

#[cfg(test)]
mod tests;
