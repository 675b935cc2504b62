// SPDX-License-Identifier: Apache-2.0
//! Timings of hosts that are killed and stopped.

use cxl_pool::host::HostConfig;

/// Short leases, so that a stop of a second is far beyond one.
pub fn host_config() -> HostConfig {
    HostConfig {
        join_timeout_ms: Some(30_000),
        heartbeat_ms: 10,
        suspect_ms: 200,
        poll_us: 500,
        idle_release_ms: 2_000,
        ..HostConfig::default()
    }
}
