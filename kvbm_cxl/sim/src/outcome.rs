// SPDX-License-Identifier: Apache-2.0
//! The result of a run: numbers when it passed, the reason and the trace when it failed.

use crate::engine::Engine;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Once;

/// Numbers of a run that passed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Its seed.
    pub seed: u64,
    /// Steps taken.
    pub steps: u64,
    /// Switches between threads.
    pub switches: u64,
    /// Virtual time at the end.
    pub time_ns: u64,
    /// Crashes of machines and processes.
    pub crashes: u64,
    /// Pauses.
    pub pauses: u64,
    /// Digest of everything that happened: equal for equal runs.
    pub digest: u64,
    /// How often each named point was visited.
    pub points: BTreeMap<&'static str, u64>,
}

impl Stats {
    pub(crate) fn new(engine: &Engine) -> Self {
        Stats {
            seed: engine.seed,
            steps: engine.step,
            switches: engine.switches,
            time_ns: engine.now_ns,
            crashes: engine.crashes,
            pauses: engine.pauses,
            digest: engine.trace.digest(),
            points: engine.points.clone(),
        }
    }
}

/// A run that failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("seed {seed}, step {step}: {reason}")]
pub struct Failure {
    /// Its seed: the same scenario with the same seed fails in the same way.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The fault that was found.
    pub reason: String,
    /// The last events, oldest first.
    pub trace: Vec<String>,
    /// Digest of everything that happened.
    pub digest: u64,
}

impl Failure {
    pub(crate) fn new(engine: &Engine, reason: String) -> Self {
        let trace = engine.trace.lines(&engine.layout, |thread| engine.thread_name(thread));
        Failure { seed: engine.seed, step: engine.step, reason, trace, digest: engine.trace.digest() }
    }
}

thread_local! {
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The message of the panic that a simulated thread just ended with.
pub(crate) fn take_panic() -> String {
    PANIC.take()
}

/// Keeps the message of a simulated thread's panic for its [`Failure`] instead of printing it; other panics print as before.
pub(crate) fn install_panic_hook() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| match crate::engine::is_simulated() {
            true => {
                let payload = info.payload();
                let text = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
                let place = info.location().map(ToString::to_string).unwrap_or_default();
                PANIC.set(format!("{} ({place})", text.unwrap_or("of unknown reason")));
            }
            false => before(info),
        }));
    });
}

/// Ends this OS process where nothing else can end a hang. Writes past the test harness, which would take the message with it.
pub(crate) fn abort(message: &str) -> ! {
    // If even this fails there is no way left to report it.
    let _ = writeln!(std::io::stderr(), "{message}");
    std::process::abort()
}
