// SPDX-License-Identifier: Apache-2.0
//! The litmus tests notice every step that is left out of the memory under test.

use super::plan::Test;
use super::{Litmus, Party, Role, Trial};
use crate::scratch::{MIN_SCRATCH_BYTES, Scratch};
use cxl_pool::Result;
use cxl_pool::coherence::{Coherence, CoherenceOptions, Instructions};
use cxl_pool::device::{DevicePart, Sysfs};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A step that can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The flush of a fetched line.
    Flush,
    /// The fence after published lines and copied payload.
    StoreFence,
    /// The fence between a flush and its load.
    FullFence,
    /// The flush of a payload before it is copied out.
    PayloadFlush,
}

/// Memory without one of its steps.
struct LeftOut {
    /// The whole.
    inner: Arc<dyn Coherence>,
    /// What does nothing.
    step: Step,
}

impl Coherence for LeftOut {
    cxl_pool::forward_coherence!(inner: len_bytes load_line write_line fence_loads copy_in copy_out address device_address);

    fn flush_line(&self, offset: u64) -> Result<()> {
        if self.step == Step::Flush { Ok(()) } else { self.inner.flush_line(offset) }
    }

    fn fence_stores(&self) {
        if self.step != Step::StoreFence {
            self.inner.fence_stores();
        }
    }

    fn fence_all(&self) {
        if self.step != Step::FullFence {
            self.inner.fence_all();
        }
    }

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        if self.step == Step::PayloadFlush { Ok(()) } else { self.inner.flush_range(offset, len_bytes) }
    }
}

/// Both sides as threads, as two emulated hosts; what the leader saw.
fn run(path: &Path, seed: u64, step: Option<Step>) -> Litmus {
    let options: CoherenceOptions = format!("emulated:seed={seed}").parse().unwrap();
    let chosen = Instructions::best().unwrap();
    let side = |role| {
        let scratch = Scratch::region(&DevicePart::whole(path), 0, MIN_SCRATCH_BYTES, &Sysfs::default()).unwrap();
        let mut party = Party::meet(scratch, role, options, Duration::from_secs(60)).unwrap();
        party.wrap = step.map(|step| -> super::party::Wrap { Box::new(move |inner| Arc::new(LeftOut { inner, step })) });
        party
    };
    std::thread::scope(|scope| {
        scope.spawn(|| Litmus::follow(&mut side(Role::B), chosen));
        Litmus::lead(&mut side(Role::A), &Trial::plan(chosen, false, false), 256, chosen)
    })
}

#[test]
fn emulated_hosts_pass_and_every_step_left_out_is_noticed() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("memory");
    std::fs::write(&path, vec![0; MIN_SCRATCH_BYTES as usize]).unwrap();
    for seed in 1..=3 {
        let litmus = run(&path, seed, None);
        assert_eq!(litmus.error, None, "seed {seed}");
        assert!(litmus.trials.len() == 4 && litmus.trials.iter().all(|trial| trial.outcome.violations == 0), "seed {seed}: {litmus:?}");
    }
    // What each step is for must be among what fails without it.
    for (step, tests) in [
        (Step::Flush, &[Test::Order, Test::Payload, Test::Buffering, Test::BufferingReadBack][..]),
        (Step::StoreFence, &[Test::Order, Test::Payload]),
        (Step::FullFence, &[Test::Order, Test::Payload, Test::Buffering]),
        (Step::PayloadFlush, &[Test::Payload]),
    ] {
        let litmus = run(&path, 1, Some(step));
        for test in tests {
            let failed = litmus.trials.iter().any(|trial| trial.test == *test && trial.outcome.violations > 0);
            assert!(failed, "{step:?} left out, and {test:?} passed: {litmus:?}");
        }
    }
}
