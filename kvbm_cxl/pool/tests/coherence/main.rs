// SPDX-License-Identifier: Apache-2.0
//! The coherence layer on real mappings, with real signals and real processes.

mod emulated;
mod native;
#[cfg(target_arch = "x86_64")]
mod order;
#[cfg(target_arch = "x86_64")]
mod recorder;
mod sigbus;
#[cfg(target_arch = "x86_64")]
mod steps;
mod support;

/// Not a test of its own: where a process started by another test begins.
#[test]
fn child() {
    if let Ok(role) = std::env::var(support::ROLE) {
        let code = match role.split_once(' ') {
            Some(("emulated", scenario)) => emulated::host(scenario),
            Some(("sigbus", scenario)) => sigbus::victim(scenario),
            _ => support::BAD_ROLE,
        };
        std::process::exit(code);
    }
}
