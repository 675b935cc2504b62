// SPDX-License-Identifier: Apache-2.0
//! Typed errors: what failed, where, and what to do about it.

use crate::machine_id::MachineId;
use std::path::Path;

/// Classes of errors, for counters. The order is that of their counts.
pub const ERROR_CLASSES: [&str; 8] = ["device", "damaged", "fenced", "timeout", "full", "in_use", "replaced", "other"];

impl Error {
    /// The class of this error, one of [`ERROR_CLASSES`].
    pub fn class(&self) -> &'static str {
        match self {
            Error::DeviceLost { .. } | Error::Poisoned { .. } | Error::Gpu { .. } => "device",
            Error::BadLine { .. } | Error::NotAPool { .. } | Error::HasContent { .. } => "damaged",
            Error::Fenced { .. } => "fenced",
            Error::Timeout { .. } => "timeout",
            Error::Full { .. } => "full",
            Error::SlotInUse { .. } | Error::Twin { .. } | Error::InUse { .. } | Error::HostsUnseen { .. } => "in_use",
            Error::Replaced { .. } => "replaced",
            Error::OutOfRange { .. } | Error::Invalid(_) | Error::Partition { .. } | Error::TooLarge { .. } | Error::Os { .. } => "other",
            Error::PeerGone { .. } | Error::PeerClosed { .. } | Error::Protocol { .. } => "other",
            Error::NotFound(_) | Error::Exists(_) | Error::Closed | Error::Cancelled(_) => "other",
        }
    }
}

/// Result of every fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong. No variant ever means "the data may be wrong": doubt is an error or a miss.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the text of an error says what its fields are")]
pub enum Error {
    /// A device stopped answering (SIGBUS BUS_ADRERR: unplugged, unbound, truncated file, full file system under a sparse one), or the
    /// memory that this machine's processes share did.
    #[error("device {} lost at pool offset {offset:#x} (+{len_bytes} bytes): {}", escaped(.device), escaped(.cause))]
    DeviceLost { device: String, offset: u64, len_bytes: u64, cause: String },
    /// The memory itself is damaged (SIGBUS BUS_MCEERR_AR), or the range was marked bad before.
    #[error("poisoned memory at pool offset {offset:#x} (+{len_bytes} bytes): the 2 MiB range around it is marked bad")]
    Poisoned { offset: u64, len_bytes: u64 },
    /// An offset or length does not lie inside the pool or region.
    #[error("{what}: offset {offset:#x} (+{len_bytes} bytes) lies outside the {limit_bytes} bytes there are")]
    OutOfRange { what: &'static str, offset: u64, len_bytes: u64, limit_bytes: u64 },
    /// A metadata line does not verify. It is never read as empty.
    #[error("line {index} of region {region} is not valid ({reason}): run `cxlctl fsck`")]
    BadLine { region: &'static str, index: u64, reason: &'static str },
    /// The pool or a device cannot be opened as it is.
    #[error("{}: {}", escaped(.device), escaped(.reason))]
    NotAPool { device: String, reason: String },
    /// The part of a device that was asked for cannot be a pool's.
    #[error("{}: {problem}", escaped(.device))]
    Partition { device: String, problem: PartitionProblem },
    /// A request that cannot be satisfied whatever the state of the pool.
    #[error("{}", escaped(.0))]
    Invalid(String),
    /// A GPU or its driver did not do what it was asked to.
    #[error("GPU {device}: {what}")]
    Gpu { device: u32, what: String },
    /// Ended early, as a caller asked for; what of it was done is not known.
    #[error("{}: cancelled", escaped(.0))]
    Cancelled(String),
    /// The operating system refused.
    #[error("{}: {source}", escaped(.what))]
    Os { what: String, source: std::io::Error },
    /// This host was fenced: its locks are gone and the outcome of a running commit is unknown. The service joins again by itself.
    #[error("host slot {slot} incarnation {incarnation} is fenced: the outcome of a running commit is unknown; retry after the re-join")]
    Fenced { slot: u16, incarnation: u32 },
    /// A deadline passed.
    #[error("{}: no answer within {timeout_ms} ms", escaped(.what))]
    Timeout { what: String, timeout_ms: u64 },
    /// No slot was available.
    #[error(
        "slot {slot} is in use by another machine: leave the choice to the pool; `cxlctl hosts` tells which machine that is and whether \
         it lives, and two machines must not have one identity (CXL_MACHINE_ID)"
    )]
    SlotInUse { slot: u16 },
    /// Two machines, or two containers, use one identity.
    #[error(
        "another holder of this machine's identity ({machine}) is alive{}: give every machine, and every container with a state directory \
         of its own, another CXL_MACHINE_ID (node and role, say), or let both use one CXL_STATE_DIR in one PID namespace",
        .slot.map(|slot| format!(" and has taken slot {slot} from this one")).unwrap_or_default()
    )]
    Twin { slot: Option<u16>, machine: MachineId },
    /// Nothing is left of a bounded resource.
    #[error("{what} is full ({limit}): {advice}")]
    Full { what: &'static str, limit: u64, advice: &'static str },
    /// The name, lock or block is not there.
    #[error("{} not found", escaped(.0))]
    NotFound(String),
    /// The name exists already.
    #[error("{} exists already", escaped(.0))]
    Exists(String),
    /// A format would destroy what a device holds.
    #[error(
        "{}: it holds {found} (at byte {offset:#x}): a format overwrites it only when that is forced (cxlctl format --force), and then it \
         is lost", escaped(.device)
    )]
    HasContent {
        /// The device or file.
        device: String,
        /// Where on its part that is seen, in bytes.
        offset: u64,
        /// What it is, as far as it is known.
        found: String,
    },
    /// Hosts use the pool that a format would overwrite.
    #[error(
        "hosts use this pool (the heartbeats of slots {slots:?} move): end their processes first, or evict them (cxlctl format --force \
         --evict-hosts)"
    )]
    InUse { slots: Vec<u16> },
    /// A format would overwrite a part of a pool whose other devices were not found, or a pool that this program does not know, so that its
    /// hosts cannot be seen.
    #[error(
        "{device}: it is a part of pool {pool}, whose hosts cannot be seen ({reason}): erase that pool first, by a name of all its devices \
         and with the program that formatted it (cxlctl erase), or evict its hosts unseen (cxlctl format --force --evict-hosts)"
    )]
    HostsUnseen { device: String, pool: String, reason: String },
    /// The pool was formatted again, or its device swapped, under this handle.
    #[error("the pool was replaced under this handle (incarnation {was:#x}, now {now:#x}): close it and open it again")]
    Replaced { was: u64, now: u64 },
    /// The other end of a connection, or of a call, is gone: its pending messages are lost.
    #[error("{peer} is gone ({reason}): what was not answered may or may not have arrived; connect again")]
    PeerGone { peer: String, reason: &'static str },
    /// The other end closed the connection in good order, and everything that it had sent before was received.
    #[error("{peer} has closed the connection")]
    PeerClosed { peer: String },
    /// A message that no ring of this size can take.
    #[error("a message of {len_bytes} bytes: at most {max_bytes} go through this connection")]
    TooLarge { len_bytes: u64, max_bytes: u64 },
    /// A line that its writer sealed for this connection says what cannot be: a fault of the program at the other end.
    #[error("{peer} broke the protocol ({reason}): close this connection")]
    Protocol { peer: String, reason: &'static str },
    /// The handle was closed, or the host has left the pool.
    #[error("this handle is closed")]
    Closed,
}

/// Why a part of a device cannot be a pool's ([`Error::Partition`]). All numbers are bytes, offsets those on the device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the text of an error says what its fields are")]
pub enum PartitionProblem {
    /// Pools begin at multiples of a unit, which this offset is not.
    #[error("offset={offset} is not a multiple of {unit_bytes}, where pools begin on it: the next that is one is offset={next}")]
    Unaligned { offset: u64, unit_bytes: u64, next: u64 },
    /// The device ends before the part begins.
    #[error("offset={offset} lies behind its end, it has {device_bytes} bytes: take a smaller offset, or make a file longer (fallocate)")]
    BehindEnd { offset: u64, device_bytes: u64 },
    /// The device ends before the part does.
    #[error(
        "size={size_bytes} were asked for at offset={offset}, where it has {left_bytes} bytes: give at most that, or leave the size out"
    )]
    TooLong { offset: u64, size_bytes: u64, left_bytes: u64 },
    /// Another pool lies on the same bytes.
    #[error(
        "{len_bytes} bytes at offset={offset} overlap the pool {uuid}, which has {pool_bytes} bytes at offset={pool_offset}: take others \
         (offset=, size=), or erase that pool first (cxlctl erase, its offset in --pool)"
    )]
    Overlaps { offset: u64, len_bytes: u64, pool_offset: u64, pool_bytes: u64, uuid: String },
}

/// Text that came from a user, a file name or the pool, made safe to print: control characters, and those that are not seen or that turn
/// the direction of what follows (U+202E), as escapes.
pub fn escaped(text: &str) -> std::borrow::Cow<'_, str> {
    if !text.chars().any(is_unsafe_to_print) {
        return text.into();
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unsafe_to_print(c) { safe.extend(c.escape_default()) } else { safe.push(c) }
    }
    safe.into()
}

/// A path, [escaped].
pub fn display_path(path: &Path) -> String {
    escaped(&path.to_string_lossy()).into_owned()
}

fn is_unsafe_to_print(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || matches!(c, '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

impl Error {
    /// Wraps the last operating system error.
    pub fn last_os(what: impl Into<String>) -> Self {
        Error::Os { what: what.into(), source: std::io::Error::last_os_error() }
    }

    /// True when the host was fenced.
    pub fn is_fenced(&self) -> bool {
        matches!(self, Error::Fenced { .. })
    }
}

#[cfg(test)]
mod tests;
