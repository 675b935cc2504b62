// SPDX-License-Identifier: Apache-2.0
//! What can go wrong between a host, its pool and etcd.

/// Result of every fallible call of this program.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a host could not be kept.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// etcd does not answer, or refuses.
    #[error("{what}: {}", told(source))]
    Etcd {
        what: String,
        /// Its answer.
        source: etcd_client::Error,
    },
    /// etcd gave no answer in time.
    #[error("{what}: no answer within {timeout_ms} ms")]
    Timeout {
        /// The call, and its endpoint.
        what: String,
        /// The deadline that passed.
        timeout_ms: u64,
    },
    /// Options of the connection that cannot be used.
    #[error("{0}")]
    Security(String),
    /// Something else than this program wrote to one of its keys.
    #[error("etcd key {key} holds no host ({reason}): delete it, or choose another --prefix")]
    Value {
        key: String,
        /// Why its value is invalid.
        reason: String,
    },
    /// Every slot is another machine's.
    #[error("all {slots} slots of the pool are leased: wait for a host to leave, or format the pool with more")]
    NoSlot { slots: u32 },
    /// The pool and etcd do not agree on who has a slot.
    #[error("the pool has bound slot {slot} to this machine, but etcd has leased it to machine {machine}: end the host there first")]
    Foreign {
        slot: u16,
        /// Who has it in etcd.
        machine: String,
    },
    /// A second keeper on one machine.
    #[error("process {pid} keeps slot {slot} for this machine already: one keeper a machine is enough")]
    KeptAlready { slot: u16, pid: u32 },
    /// The pool's own error.
    #[error(transparent)]
    Pool(#[from] cxl_pool::Error),
    #[error("{what}: {source}")]
    Os {
        /// The call that failed.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
}

/// An error of the client with its sources: only these say that a certificate was refused.
fn told(error: &etcd_client::Error) -> String {
    let mut text = error.to_string();
    let mut below = std::error::Error::source(error);
    while let Some(cause) = below {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        below = cause.source();
    }
    text
}
