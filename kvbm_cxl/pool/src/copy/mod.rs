// SPDX-License-Identifier: Apache-2.0
//! Copies of payload between this process's memory and the pool (Beluga sections 5 and 6.1), with the order that CACHE.md demands built in.
//!
//! - **publish** (I4): non-temporal stores, then a store fence: when it returns, every byte is in the memory before any line that this
//!   thread publishes later. The caller needs no fence of its own between `publish` and the line that names the bytes.
//! - **pull** (I5, step 3): flush, full fence, copy, load fence: every byte is at least as new as the start of the call, and read before
//!   any line that this thread fetches later. That the bytes are of one publication only the caller can tell, by fetching the entry again.
//!
//! [`CpuEngine`] works on any [`Coherence`], simulated hosts included. [`DsaEngine`] hands large copies to Intel's Data Streaming
//! Accelerator where there is a user work queue. [`engine`] chooses; [`CopyEngine::name`] and [`CopyEngine::counters`] say which one was
//! used. [`CudaEngine`] has a GPU copy to and from its own memory. A list says in which [`LocalPlace`] its local memory lies, and
//! [`ByPlace`] hands it to an engine for that place. [`AheadEngine`] tells a device that keeps its pages in flash which blocks come next.
//!
//! ```
//! use cxl_pool::copy::{Checksum, CopyConfig, CopyEngine, CpuEngine, ReadList, WriteList};
//! # use cxl_pool::{device::PoolSpec, pool::{FormatOptions, Pool}};
//! # fn main() -> cxl_pool::Result<()> {
//! # let directory = tempfile::tempdir().unwrap();
//! # let spec = PoolSpec::parse(&format!("{},size=16M", directory.path().join("pool").display()))?;
//! # let pool = Pool::format(&spec, &FormatOptions::default())?;
//! # let block_offset = pool.layout().data_offset();
//! let memory = pool.lines().memory();
//! let engine = CpuEngine::new(CopyConfig::default());
//! let (keys, values) = ([1u8; 5000], [2u8; 3000]);
//! let written = engine.publish(&**memory, &WriteList::gather(block_offset, [&keys[..], &values[..]]), Checksum::Xxh3)?;
//!
//! let mut block = [0; 8000];
//! let (keys_again, values_again) = block.split_at_mut(5000);
//! let mut list = ReadList::scatter(block_offset, [keys_again, values_again]);
//! let read = engine.pull(&**memory, &mut list, Checksum::Xxh3)?;
//! assert!(read == written && block[..5000] == keys && block[5000..] == values);
//! # Ok(())
//! # }
//! ```

mod ahead;
mod checksum;
mod config;
mod counters;
mod cpu;
pub mod cuda;
mod dispatch;
pub mod dsa;
mod list;
mod measure;
mod order;
mod thread_pool;

pub use ahead::{AheadEngine, AheadPages};
pub use checksum::{Checksum, checksum_of};
pub use config::{CopyConfig, ENVIRONMENT, EngineChoice, MAX_BLOCKS_AHEAD, ReadAhead};
pub use counters::Copied;
pub use cpu::CpuEngine;
pub use cuda::{CudaConfig, CudaEngine, Dma};
pub use dispatch::ByPlace;
pub use dsa::DsaEngine;
pub use list::{After, LocalPlace, LocalRange, OnGpu, ReadList, WriteList};

use crate::coherence::Coherence;
use crate::cpus::CpuSet;
use crate::error::{Error, Result};
use crate::media::Stripes;
use std::path::Path;
use std::sync::Arc;

/// What became of one list: its checksum, if one was asked for.
pub type Outcome = Result<Option<u64>>;

/// Something that moves lists of pieces into and out of the pool.
///
/// A list that names bytes outside of the pool, or one byte of its destination twice, is refused before any of its bytes move
/// ([`Error::OutOfRange`], [`Error::Invalid`]), and so is one whose local memory lies where the engine does not reach. After any other
/// error an unknown part of its destination was written; the store fence has been made nevertheless. After [`Error::Timeout`] a device may
/// still write: see [`CopyEngine::is_settled`].
pub trait CopyEngine: Send + Sync {
    /// What it is, for metrics and reports.
    fn name(&self) -> &'static str;

    /// Copies every list into the pool, with one store fence after all of them, and answers for each in order.
    ///
    /// The lists are independent of each other: the failure of one stops no other. They must not overlap in the pool; where they do, each
    /// byte is of one of them.
    fn publish_each(&self, memory: &dyn Coherence, lists: &[WriteList<'_>], checksum: Checksum) -> Vec<Outcome>;

    /// Copies every list out of the pool, with flushes and fences shared by all of them, and answers for each in order.
    fn pull_each(&self, memory: &dyn Coherence, lists: &mut [ReadList<'_>], checksum: Checksum) -> Vec<Outcome>;

    /// Whether nothing of a call that ended with [`Error::Timeout`] can still happen, so that the memory of its lists may be used again.
    /// Waits for that, at most `timeout_ms`.
    fn is_settled(&self, timeout_ms: u64) -> bool;

    /// Opens a GPU before the first list of it, and registers the pool for it as the configuration says: at the start of a program, which
    /// this may hold up for minutes. How the GPU reaches the pool then.
    ///
    /// # Errors
    /// Those of [`CudaEngine::open`]; [`Error::NotFound`] of an engine that reaches no GPU.
    fn open_gpu(&self, device: u32) -> Result<cuda::Reach> {
        Err(Error::NotFound(format!("an engine for GPU {device} ({} has none),", self.name())))
    }

    /// Room for asynchronous copies of so many bytes of a GPU; the GPU is opened if it is not.
    ///
    /// # Errors
    /// Those of [`CudaEngine::open`] and [`CudaEngine::queue_room`]; [`Error::NotFound`] of an engine that reaches no GPU.
    fn queue_room(&self, device: u32, len_bytes: u64) -> Result<cuda::QueueRoom> {
        Err(Error::NotFound(format!("an engine for {len_bytes} bytes of GPU {device} ({} has none),", self.name())))
    }

    /// Bytes copied so far by each engine that had a part in it.
    fn counters(&self) -> Vec<Copied>;

    /// Pages that the device got hints for before they were copied: none by an engine that reads nothing ahead.
    fn ahead_pages(&self) -> AheadPages {
        AheadPages::default()
    }

    /// Copies one list into the pool.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] and [`Error::Invalid`] for the list, [`Error::DeviceLost`] and [`Error::Poisoned`] for the memory.
    fn publish(&self, memory: &dyn Coherence, list: &WriteList<'_>, checksum: Checksum) -> Outcome {
        only(self.publish_each(memory, std::slice::from_ref(list), checksum))
    }

    /// Copies one list out of the pool.
    ///
    /// # Errors
    /// As [`CopyEngine::publish`].
    fn pull(&self, memory: &dyn Coherence, list: &mut ReadList<'_>, checksum: Checksum) -> Outcome {
        only(self.pull_each(memory, std::slice::from_mut(list), checksum))
    }
}

/// How long the accelerator may take for one call before it is given up: far more than any copy takes.
const DSA_TIMEOUT_MS: u64 = 2_000;

/// The engine that the configuration asks for on this machine; `stripes` of a pool over several devices let threads take different ones,
/// which run on `cpus`, where they are given.
///
/// # Errors
/// [`Error::Invalid`] for numbers that cannot be meant, [`Error::NotFound`] when there is no accelerator and none else will do.
pub fn engine(config: CopyConfig, stripes: Option<Stripes>, cpus: Option<&CpuSet>) -> Result<Arc<dyn CopyEngine>> {
    engine_below(config, stripes, cpus, Path::new("/sys"), Path::new("/dev"))
}

fn engine_below(
    config: CopyConfig,
    stripes: Option<Stripes>,
    cpus: Option<&CpuSet>,
    sys: &Path,
    dev: &Path,
) -> Result<Arc<dyn CopyEngine>> {
    config.check()?;
    let cpu = match stripes {
        Some(stripes) => CpuEngine::striped(config, stripes),
        None => CpuEngine::new(config),
    };
    let cpu = cpu.on(cpus.cloned());
    if config.engine == EngineChoice::Cpu {
        return Ok(Arc::new(cpu));
    }
    let queues = dsa::discover(sys, dev);
    match queues.iter().find_map(|found| dsa::HardwareQueue::open(found).ok()) {
        Some(queue) => Ok(Arc::new(DsaEngine::over(Box::new(queue), cpu, DSA_TIMEOUT_MS))),
        None if config.engine == EngineChoice::Auto => Ok(Arc::new(cpu)),
        None => Err(Error::NotFound(format!("an accelerator's user work queue that can be opened, of {} that are enabled,", queues.len()))),
    }
}

fn only(outcomes: Vec<Outcome>) -> Outcome {
    outcomes.into_iter().next().unwrap_or_else(|| Err(Error::Invalid("a copy engine gave no answer".into())))
}

#[cfg(test)]
mod tests;
