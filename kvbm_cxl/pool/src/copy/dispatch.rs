// SPDX-License-Identifier: Apache-2.0
//! The engine that hands each list to one that reaches its local memory.
//!
//! An address of a GPU's memory is a number like any other: code that made a slice of it would crash, or read other bytes. So a list says
//! where its ranges lie, and every engine looks before it takes one: [`CpuEngine`](super::CpuEngine) and [`DsaEngine`](super::DsaEngine)
//! refuse lists that do not lie in the host's memory, a [`CudaEngine`] those that do not lie on its GPU.

use super::cuda::{CudaConfig, CudaEngine, QueueRoom, Reach};
use super::{Checksum, Copied, CopyEngine, Outcome, ReadList, WriteList};
use crate::background::held;
use crate::coherence::Coherence;
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

/// Hands lists of host memory to one engine and those of a GPU to an engine for that GPU, which is opened with its first list.
///
/// Lists that follow one another and lie in the same place stay together in one call.
pub struct ByPlace {
    host: Arc<dyn CopyEngine>,
    memory: Arc<dyn Coherence>,
    config: CudaConfig,
    gpus: Mutex<BTreeMap<u32, Arc<Opening>>>,
}

#[derive(Default)]
struct Opening {
    /// Held while it opens, so that it opens once, and no other GPU waits for that.
    opens: Mutex<()>,
    engine: OnceLock<Arc<CudaEngine>>,
}

impl ByPlace {
    /// Over an engine for host memory, for copies to and from the pool that `memory` is.
    pub fn new(host: Arc<dyn CopyEngine>, memory: Arc<dyn Coherence>, config: CudaConfig) -> Self {
        ByPlace { host, memory, config, gpus: Mutex::default() }
    }

    /// The engine of a GPU.
    ///
    /// # Errors
    /// Those of [`CudaEngine::open`].
    pub fn gpu(&self, device: u32) -> Result<Arc<CudaEngine>> {
        let opening = held(&self.gpus).entry(device).or_default().clone();
        let _opens = held(&opening.opens);
        if let Some(engine) = opening.engine.get() {
            return Ok(engine.clone());
        }
        let engine = Arc::new(CudaEngine::open(&self.config, device, self.memory.clone())?);
        Ok(opening.engine.get_or_init(|| engine).clone())
    }

    /// What `work` makes of the engine that reaches a place. The host's is used without a handle of its own, whose end would wait until all
    /// that was copied has arrived.
    fn at<T>(&self, gpu: Option<u32>, work: impl FnOnce(&dyn CopyEngine) -> T) -> Result<T> {
        match gpu {
            None => Ok(work(&*self.host)),
            Some(device) => Ok(work(&*self.gpu(device)?)),
        }
    }

    fn opened(&self) -> Vec<Arc<CudaEngine>> {
        held(&self.gpus).values().filter_map(|opening| opening.engine.get().cloned()).collect()
    }
}

/// The answer for each of `count` lists of a GPU that cannot be used.
fn refused(error: Error, count: usize) -> impl Iterator<Item = Outcome> {
    let text = error.to_string();
    let rest = (1..count).map(move |_| Err(Error::NotFound(format!("the GPU of this list, as of the first one ({text}),"))));
    std::iter::once(Err(error)).chain(rest)
}

impl CopyEngine for ByPlace {
    fn name(&self) -> &'static str {
        self.host.name()
    }

    fn publish_each(&self, memory: &dyn Coherence, lists: &[WriteList<'_>], checksum: Checksum) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(lists.len());
        for run in lists.chunk_by(|one, other| one.place().gpu() == other.place().gpu()) {
            let gpu = run.first().and_then(|list| list.place().gpu());
            match self.at(gpu, |engine| engine.publish_each(memory, run, checksum)) {
                Ok(done) => outcomes.extend(done),
                Err(error) => outcomes.extend(refused(error, run.len())),
            }
        }
        outcomes
    }

    fn pull_each(&self, memory: &dyn Coherence, lists: &mut [ReadList<'_>], checksum: Checksum) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(lists.len());
        for run in lists.chunk_by_mut(|one, other| one.place().gpu() == other.place().gpu()) {
            let gpu = run.first().and_then(|list| list.place().gpu());
            match self.at(gpu, |engine| engine.pull_each(memory, run, checksum)) {
                Ok(done) => outcomes.extend(done),
                Err(error) => outcomes.extend(refused(error, run.len())),
            }
        }
        outcomes
    }

    fn publish(&self, memory: &dyn Coherence, list: &WriteList<'_>, checksum: Checksum) -> Outcome {
        self.at(list.place().gpu(), |engine| engine.publish(memory, list, checksum))?
    }

    fn pull(&self, memory: &dyn Coherence, list: &mut ReadList<'_>, checksum: Checksum) -> Outcome {
        self.at(list.place().gpu(), |engine| engine.pull(memory, list, checksum))?
    }

    fn is_settled(&self, timeout_ms: u64) -> bool {
        // Each with the whole time: what one of them waits the others use as well.
        self.opened().iter().fold(self.host.is_settled(timeout_ms), |settled, engine| engine.is_settled(timeout_ms) && settled)
    }

    fn open_gpu(&self, device: u32) -> Result<Reach> {
        let engine = self.gpu(device)?;
        engine.register_ahead();
        Ok(engine.reach())
    }

    fn queue_room(&self, device: u32, len_bytes: u64) -> Result<QueueRoom> {
        self.gpu(device)?.queue_room(len_bytes)
    }

    fn counters(&self) -> Vec<Copied> {
        let mut all = self.host.counters();
        let gpus: Vec<Copied> = self.opened().iter().flat_map(|engine| engine.counters()).collect();
        if let Some(first) = gpus.first() {
            all.push(gpus.iter().fold(Copied { engine: first.engine, ..Copied::default() }, |sum, one| Copied {
                published_bytes: sum.published_bytes + one.published_bytes,
                pulled_bytes: sum.pulled_bytes + one.pulled_bytes,
                failed_lists: sum.failed_lists + one.failed_lists,
                unflushed_bytes: sum.unflushed_bytes + one.unflushed_bytes,
                // The GPUs of a process share the registered memory.
                registered_bytes: sum.registered_bytes.max(one.registered_bytes),
                queued_bytes: sum.queued_bytes + one.queued_bytes,
                ..sum
            }));
        }
        all
    }
}
