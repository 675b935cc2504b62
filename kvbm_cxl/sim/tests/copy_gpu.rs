// SPDX-License-Identifier: Apache-2.0
//! Steps of order around the copies of a GPU, on emulated hosts with a driver that is faked: what it wrote lies in this host's caches, and
//! what it reads may be there from before.

#[path = "../../pool/tests/cuda/device.rs"]
#[allow(dead_code)] // The tests of the engine use the rest; the same below.
mod device;
#[path = "../../pool/tests/cuda/fake.rs"]
#[allow(dead_code)]
mod fake;
#[path = "../../pool/tests/cuda/scenes.rs"]
#[allow(dead_code)]
mod scenes;

use cxl_pool::coherence::Coherence;
use cxl_pool::copy::{Checksum, Copied, CopyEngine, CudaEngine, Outcome, ReadList, WriteList};
use cxl_pool::fault::drop_rule;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// An engine that makes its copies without a rule.
struct Without {
    engine: CudaEngine,
    rule: Option<&'static str>,
}

impl CopyEngine for Without {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn publish_each(&self, memory: &dyn Coherence, lists: &[WriteList<'_>], checksum: Checksum) -> Vec<Outcome> {
        drop_rule(self.rule);
        let outcomes = self.engine.publish_each(memory, lists, checksum);
        drop_rule(None);
        outcomes
    }

    fn pull_each(&self, memory: &dyn Coherence, lists: &mut [ReadList<'_>], checksum: Checksum) -> Vec<Outcome> {
        drop_rule(self.rule);
        let outcomes = self.engine.pull_each(memory, lists, checksum);
        drop_rule(None);
        outcomes
    }

    fn is_settled(&self, timeout_ms: u64) -> bool {
        self.engine.is_settled(timeout_ms)
    }

    fn counters(&self) -> Vec<Copied> {
        self.engine.counters()
    }
}

/// Whether a byte is wrong when a rule is dropped.
fn is_noticed(rule: Option<&'static str>, checksum: Checksum) -> bool {
    let fake = fake::Fake::new(fake::Kind::New);
    let gpu = device::Gpu::open(fake.path(), 0);
    let hosts = scenes::hosts("emulated:seed=3,noise=0");
    let engine = Without { engine: CudaEngine::open(&fake.config(), 0, hosts[0].clone()).unwrap(), rule };
    let tried = catch_unwind(AssertUnwindSafe(|| scenes::there_and_back(&gpu, 0, &engine, &hosts, checksum, 1)));
    if let Ok(outcomes) = &tried {
        assert!(scenes::all_well(outcomes), "{outcomes:?}");
    }
    tried.is_err()
}

#[test]
fn the_loss_of_a_step_around_a_copy_is_noticed() {
    for checksum in [Checksum::Off, Checksum::Xxh3] {
        assert!(!is_noticed(None, checksum));
        for rule in ["copy.publish_no_fence", "copy.pull_no_flush", "copy.pull_no_full_fence"] {
            assert!(is_noticed(Some(rule), checksum), "{rule}, {checksum:?}: nothing noticed its loss");
        }
    }
    for rule in ["copy.dma_no_flush", "copy.dma_no_edge_flush"] {
        assert!(is_noticed(Some(rule), Checksum::Off), "{rule}: nothing noticed its loss");
    }
}
