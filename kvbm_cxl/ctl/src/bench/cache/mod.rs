// SPDX-License-Identifier: Apache-2.0
//! The prefix cache: publish, pull and lookup, each compared with bare instructions on the same memory. Every copy is verified.

mod accesses;
pub mod lookup;
pub mod publish;
pub mod pull;
pub mod ucx_reads;

use crate::report::Bench;
use cxl_pool::Result;

/// Speeds compared with baselines, for a publish or a pull of one size.
#[derive(Clone, Copy)]
struct Names {
    /// With a bare copy.
    vs_bare: &'static str,
    /// With the same copy and the accesses around it that the protocol demands.
    vs_accesses: &'static str,
    /// The goal of the first.
    least: f64,
}

/// Sizes of blocks, in bytes, and the ratios of a publish and of a pull.
const SIZES: [(usize, [Names; 2]); 3] = [
    (
        64 << 10,
        [
            Names { vs_bare: "publish_64k_vs_bare", vs_accesses: "publish_64k_vs_accesses", least: 1.0 / 1.3 },
            Names { vs_bare: "pull_64k_vs_bare", vs_accesses: "pull_64k_vs_accesses", least: 1.0 / 1.5 },
        ],
    ),
    (
        1 << 20,
        [
            Names { vs_bare: "publish_1m_vs_bare", vs_accesses: "publish_1m_vs_accesses", least: 0.95 },
            Names { vs_bare: "pull_1m_vs_bare", vs_accesses: "pull_1m_vs_accesses", least: 0.95 },
        ],
    ),
    (
        4 << 20,
        [
            Names { vs_bare: "publish_4m_vs_bare", vs_accesses: "publish_4m_vs_accesses", least: 0.95 },
            Names { vs_bare: "pull_4m_vs_bare", vs_accesses: "pull_4m_vs_accesses", least: 0.95 },
        ],
    ),
];

/// Publish, pull and lookup, and reads of NIXL UCX where `ucx` is the command of a peer (perf/ucx_peer.py).
pub fn run(batches: u64, ucx: Option<&str>) -> Result<Bench> {
    let mut all = Bench::new("the prefix cache, pool in /dev/shm, one thread");
    all.append(publish::run(batches)?);
    all.append(pull::run(batches)?);
    all.append(lookup::run(batches)?);
    if let Some(command) = ucx {
        all.append(ucx_reads::run(command, batches)?);
    }
    Ok(all)
}
