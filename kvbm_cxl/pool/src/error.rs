// SPDX-License-Identifier: Apache-2.0
//! Typed errors: what failed, where, and what to do about it.

use crate::media::Region;

/// Result of every fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong. No variant ever means "the data may be wrong": doubt is an error or a miss.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device stopped answering (SIGBUS BUS_ADRERR: unplugged, unbound, truncated file).
    #[error("device {device} lost at pool offset {offset:#x} (+{len_bytes} bytes): reattach it and open the pool again")]
    DeviceLost {
        /// Name of the device.
        device: String,
        /// Pool offset of the access.
        offset: u64,
        /// Length of the access.
        len_bytes: u64,
    },
    /// The memory itself is damaged (SIGBUS BUS_MCEERR_AR), or the range was marked bad before.
    #[error("poisoned memory at pool offset {offset:#x} (+{len_bytes} bytes): the 2 MiB range around it is marked bad")]
    Poisoned {
        /// Pool offset of the access.
        offset: u64,
        /// Length of the access.
        len_bytes: u64,
    },
    /// An offset or length does not lie inside the pool or region.
    #[error("{what}: offset {offset:#x} (+{len_bytes} bytes) lies outside the {limit_bytes} bytes there are")]
    OutOfRange {
        /// What was addressed.
        what: &'static str,
        /// The offset asked for.
        offset: u64,
        /// The length asked for.
        len_bytes: u64,
        /// The size of what was addressed.
        limit_bytes: u64,
    },
    /// A metadata line does not verify. It is never read as empty.
    #[error("line {index} of region {region:?} is not valid ({reason}): run `cxlctl fsck`")]
    BadLine {
        /// The region.
        region: Region,
        /// Line number in the region.
        index: u64,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The pool or a device cannot be opened as it is.
    #[error("{device}: {reason}")]
    NotAPool {
        /// The device or file.
        device: String,
        /// Why, and what to do.
        reason: String,
    },
    /// A request that cannot be satisfied whatever the state of the pool.
    #[error("{0}")]
    Invalid(String),
    /// A GPU or its driver did not do what it was asked to.
    #[error("GPU {device}: {what}")]
    Gpu {
        /// Number of the GPU in CUDA.
        device: u32,
        /// What was attempted, and the driver's name for what became of it.
        what: String,
    },
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was attempted, on what.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// This host was fenced: its locks are gone and the outcome of a running commit is unknown. The service joins again by itself.
    #[error("host slot {slot} incarnation {incarnation} is fenced: the outcome of a running commit is unknown; retry after the re-join")]
    Fenced {
        /// The slot.
        slot: u16,
        /// The fenced incarnation.
        incarnation: u32,
    },
    /// A deadline passed.
    #[error("{what}: no answer within {timeout_ms} ms")]
    Timeout {
        /// What was waited for.
        what: String,
        /// The deadline that passed.
        timeout_ms: u64,
    },
    /// No slot could be had.
    #[error("slot {slot} is in use by another machine: leave the choice to the pool, or state that machine's death")]
    SlotInUse {
        /// The slot asked for.
        slot: u16,
    },
    /// Nothing is left of a bounded resource.
    #[error("{what} is full ({limit}): {advice}")]
    Full {
        /// What is full.
        what: &'static str,
        /// Its size.
        limit: u64,
        /// What to do.
        advice: &'static str,
    },
    /// The name, lock or block is not there.
    #[error("{0} not found")]
    NotFound(String),
    /// The name exists already.
    #[error("{0} exists already")]
    Exists(String),
    /// The pool was formatted anew, or its device swapped, under this handle.
    #[error("the pool was replaced under this handle (incarnation {was:#x}, now {now:#x}): close it and open it again")]
    Replaced {
        /// Incarnation at open.
        was: u64,
        /// Incarnation found now.
        now: u64,
    },
    /// The other end of a connection, or of a call, is there no more: what was under way is lost.
    #[error("{peer} is gone ({reason}): what was not answered may or may not have arrived; connect again")]
    PeerGone {
        /// Who.
        peer: String,
        /// How this was noticed.
        reason: &'static str,
    },
    /// The other end closed the connection in good order, and everything that it had sent before was received.
    #[error("{peer} has closed the connection")]
    PeerClosed {
        /// Who.
        peer: String,
    },
    /// A message that no ring of this size can take.
    #[error("a message of {len_bytes} bytes: at most {max_bytes} go through this connection")]
    TooLarge {
        /// What was to be sent.
        len_bytes: u64,
        /// What can be.
        max_bytes: u64,
    },
    /// A line that its writer sealed for this connection says what cannot be: a fault of the program at the other end.
    #[error("{peer} broke the protocol ({reason}): close this connection")]
    Protocol {
        /// Who wrote it.
        peer: String,
        /// What cannot be.
        reason: &'static str,
    },
    /// The handle was closed, or the host has left the pool.
    #[error("this handle is closed")]
    Closed,
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
