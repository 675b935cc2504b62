// SPDX-License-Identifier: Apache-2.0
//! Copies between the pool and the memory of a GPU (docs/internals/design.md section 9; TraCT section 4.2, Beluga section 6.1).
//!
//! It has run on an H200 with a pool in ordinary memory (docs/internals/gpu.md), never with CXL memory. Tests have a driver of our own that
//! copies late, fails on demand, and complains of what a real one would not put up with.
//!
//! A [`CudaEngine`] takes lists whose local ranges are addresses of one GPU ([`LocalPlace::Gpu`](super::LocalPlace)) and works with
//! addresses alone: no slice is ever made of them. The CUDA driver is loaded when the engine is opened; nothing needs CUDA before.
//!
//! **One call is one launch.** A kernel gets all pieces of all lists together, on a stream of the engine's own; of more bytes than
//! [`CudaConfig::part_bytes`] in steps. The GPU makes one step while several threads flush another (`flush.rs`). Where no kernel can be
//! used, the copy engine gets them one by one. They come after what the lists name ([`After`](super::After)), and the call returns when
//! they have ended: whatever the caller does afterwards comes after the copy, on any stream. Threads that call at the same time have a
//! stream each. Waiting sleeps. For a caller that has no thread to wait with, [`CudaEngine::start`] returns at once, and [`GpuCopy::poll`]
//! makes the next of the same steps: so the NIXL plugin copies, over the C interface.
//!
//! **Two ways.** The GPU reaches the pool itself, which is registered with the driver for that:
//! - publish: the lines that the pieces touch only in part are dropped from this host's caches, so that the GPU does not complete them with
//!   old bytes; copy; the written lines are flushed, because I/O may leave them in this host's caches (DDIO); store fence (I4);
//! - pull: flush, full fence, copy, load fence (I5): what the GPU reads may come from this host's caches, so they have to hold nothing old.
//!
//! Where the platform keeps I/O out of this host's caches, and the pool's memory in them is none ([`Dma::Uncached`]), the flushes are left
//! out, and all fences stay. Copies through buffers are flushed as ever.
//!
//! A sum has to be of the very bytes that are delivered. To sum the pool's bytes after the GPU wrote them would vouch for whatever is
//! there, a write of a host that was thought dead included; to sum them before the GPU reads them would say nothing of what it reads. So
//! a kernel takes it, of the words that it has loaded and stores. Kernels are loaded when the engine is opened and are used once they
//! have moved and summed bytes of the engine's own as a CPU would have (`trial.rs`); [`Reach::no_kernels`] says why they are not.
//!
//! Where the pool cannot be registered, and with checksums where no kernel can take them (240 bytes and less included), everything goes
//! through two pinned buffers of the host in turn: the GPU copies one while the CPU sums the other and moves it to or from the pool, with
//! the same steps as [`CpuEngine`](super::CpuEngine). The price is a pass of one CPU over the bytes, and their way through the host's
//! memory.
//!
//! **Late copies keep their resources.** Copies that were given to a GPU cannot be called back. A call that is not done in time is an
//! [`Error::Timeout`], and its destinations may be written at any later moment: the pool's cell stays reserved
//! ([`Reservation`](crate::cache::Reservation)), stream and buffers are not used again, and the caller's memory must not be until
//! [`CopyEngine::is_settled`] says so. When the GPU has ended after all, what it may have left in caches is flushed, and stream and buffers
//! are used again. The drop of an engine waits for late copies once more; if they have not ended then, nothing of them is ever given back.
//!
//! An emulated host ([`Emulated`](crate::coherence::Emulated)) is such a host whose I/O always goes through its caches: the view is
//! registered, and no host sees what a copy wrote there before the flush.

mod ahead;
mod config;
mod described;
mod driver;
mod flush;
mod gpu;
mod kernel;
mod lane;
mod lists;
mod memory;
mod plan;
mod queued;
mod refusal;
mod registered;
mod started;
mod table;
mod transfer;
mod trial;
mod windows;

pub use config::{CudaConfig, DMA_ENVIRONMENT, Dma, LIBRARY_ENVIRONMENT, REGISTER_BYTES_ENVIRONMENT, THREADS_ENVIRONMENT};
pub use described::{DriverInfo, GpuInfo, describe};
pub use memory::GpuMemory;
pub use queued::QueueRoom;
pub use started::{Ending, GpuCopy, GpuPiece, HostPlace};

use super::counters::Counters;
use super::cpu::count;
use super::order::Order;
use super::{Checksum, Copied, CopyEngine, Outcome, ReadList, WriteList};
use crate::background::held;
use crate::coherence::Coherence;
use crate::error::{Error, Result};
use driver::Driver;
use flush::Flusher;
use gpu::{Entered, Gpu, Progress};
use kernel::Kernels;
use lane::{Ended, Lane};
use plan::{Means, Plan};
use registered::Registered;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use transfer::Transfer;

/// Streams that are kept for later calls.
const MAX_IDLE_LANES: usize = 4;
/// Calls that ran out of time and may still be under way; with so many of them no further one is begun.
const MAX_LATE_LANES: usize = 4;
/// Between two looks at whether late copies have ended.
const PAUSE: Duration = Duration::from_micros(500);

/// Which way bytes go between a GPU and the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the GPU to the pool, or other memory of the host.
    ToHost,
    /// From there to the GPU.
    FromHost,
}

/// GPUs that the driver in `library` lets this process see.
///
/// # Errors
/// [`Error::NotFound`] when there is no driver, it is too old, or it has no GPU.
pub fn devices(library: &str) -> Result<u32> {
    Ok(Driver::load(library)?.devices())
}

/// Copies between the pool and the memory of one GPU.
pub struct CudaEngine {
    // Lanes before what their copies use.
    idle: Mutex<Vec<Lane>>,
    late: Mutex<Vec<Late>>,
    /// `None` only while it is dropped.
    registered: Option<Registered>,
    /// Why there are none otherwise.
    kernels: std::result::Result<Arc<Kernels>, String>,
    memory: Arc<dyn Coherence>,
    gpu: Arc<Gpu>,
    flusher: Arc<Flusher>,
    config: CudaConfig,
    counters: Counters,
    /// Bytes of copies that a stream orders and that have not ended.
    queued_bytes: AtomicU64,
}

/// A lane whose copies were not done in time.
struct Late {
    lane: Lane,
    /// What it may write of the pool: offsets and lengths.
    written: Vec<(u64, u64)>,
}

/// How an engine reaches the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Bytes of the pool that are registered with the driver so far.
    pub registered_bytes: u64,
    /// Why a part of it could not be, the first time that happened: copies that need it go through pinned buffers.
    pub refusal: Option<String>,
    /// Why no kernel moves bytes, if so: with checksums they go through pinned buffers, without by the copy engine.
    pub no_kernels: Option<String>,
    /// The path that DMA is taken to use on this host.
    pub dma: Dma,
}

impl CudaEngine {
    /// Loads the driver and opens a GPU for copies to and from the pool that `memory` is; for other memory it uses pinned buffers.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no driver, it is too old, or it has no such GPU; [`Error::Gpu`] when that cannot be used;
    /// [`Error::Invalid`] for numbers that cannot be meant.
    pub fn open(config: &CudaConfig, device: u32, memory: Arc<dyn Coherence>) -> Result<Self> {
        config.check()?;
        let gpu = Gpu::open(Driver::load(&config.library)?, device)?;
        let kernels = Kernels::open(&gpu, config);
        if let Err(reason) = &kernels {
            log::warn!("GPU {device}: no kernels, so blocks with checksums go through pinned buffers: {reason}");
        }
        Ok(CudaEngine {
            idle: Mutex::default(),
            late: Mutex::default(),
            registered: Registered::new(gpu.clone(), memory.clone(), config.granule_bytes),
            kernels,
            memory,
            gpu,
            flusher: Arc::new(Flusher::new(config.threads)),
            config: config.clone(),
            counters: Counters::default(),
            queued_bytes: AtomicU64::new(0),
        })
    }

    /// Number of the GPU.
    pub fn device(&self) -> u32 {
        self.gpu.number()
    }

    /// How it reaches the pool, so far.
    pub fn reach(&self) -> Reach {
        let no_kernels = match &self.kernels {
            Ok(kernels) => kernels.failure(),
            Err(reason) => Some(reason.clone()),
        };
        let dma = self.config.dma;
        match &self.registered {
            Some(registered) => Reach { registered_bytes: registered.len_bytes(), refusal: registered.refusal(), no_kernels, dma },
            None => Reach { registered_bytes: 0, refusal: Some("this process does not map the pool".into()), no_kernels, dma },
        }
    }

    fn means(&self) -> Means<'_> {
        Means { config: &self.config, registered: self.registered.as_ref(), kernels: self.kernels.as_ref().ok() }
    }

    /// Takes back lanes whose copies have ended meanwhile, and says whether all have.
    fn settle(&self, entered: &Entered<'_>) -> bool {
        let mut late = held(&self.late);
        for one in std::mem::take(&mut *late) {
            if one.lane.drain(entered, Instant::now()) == Ended::Late {
                late.push(one);
                continue;
            }
            // No other host may find the lines that the copy left in this host's caches after the next use of the memory.
            let order = Order::around(self.config.dma);
            one.written.iter().for_each(|&(offset, len_bytes)| drop(order.flush_moved(&*self.memory, offset, len_bytes)));
            self.memory.fence_stores();
            self.give_back(one.lane);
        }
        late.is_empty()
    }

    fn take_lane(&self, entered: &Entered<'_>) -> Result<Lane> {
        if !self.settle(entered) && held(&self.late).len() >= MAX_LATE_LANES {
            let what = format!("{MAX_LATE_LANES} copies that were given up are still under way: restart this process");
            return Err(Error::Gpu { device: self.gpu.number(), what });
        }
        let idle = held(&self.idle).pop();
        idle.map_or_else(|| Lane::new(&self.gpu, entered), Ok)
    }

    /// Keeps a lane whose copies continue although no caller waits for them any more.
    fn keep_late(&self, lane: Lane, transfer: &Transfer<'_>) {
        held(&self.late).push(Late { lane, written: transfer.written() });
    }

    /// Keeps a lane that has nothing under way.
    fn give_back(&self, lane: Lane) {
        let mut idle = held(&self.idle);
        if idle.len() < MAX_IDLE_LANES {
            idle.push(lane);
        }
    }

    /// Copies lists, and says what became of each.
    fn run(&self, memory: &dyn Coherence, mut transfer: Transfer<'_>) -> Vec<Outcome> {
        if transfer.has_work()
            && let Err(error) = self.try_run(memory, &mut transfer)
        {
            transfer.fail_all(|| self.gpu.failed_again(&error));
        }
        self.counters.unflushed(transfer.unflushed_bytes());
        transfer.finish()
    }

    /// # Errors
    /// What keeps every list from being copied, before the GPU was given any of them or after it has ended.
    fn try_run(&self, memory: &dyn Coherence, transfer: &mut Transfer<'_>) -> Result<()> {
        let timeout_ms = self.config.timeout_ms;
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        let entered = self.gpu.enter()?;
        let mut lane = self.take_lane(&entered)?;
        let plan = Plan::of(transfer, memory, self.means(), &entered);
        // SAFETY: the lists, which the caller holds, name events and streams that are there.
        let mut ended = unsafe { transfer.come_after(&lane, &entered) }
            .and_then(|()| transfer.begin(memory, &mut lane, &entered, &plan, self.config.part_bytes))
            .map(|()| {
                // SAFETY: the lists name memory of this GPU that may be used.
                unsafe { self.finish(memory, transfer, &mut lane, &entered, deadline) }
            });
        let is_well = matches!(ended, Ok(Ended::Done));
        // Whatever went wrong, nothing is used again before the stream is known to be idle.
        if !is_well && lane.drain(&entered, deadline) == Ended::Late {
            ended = Ok(Ended::Late);
        }
        if matches!(ended, Ok(Ended::Late)) {
            self.keep_late(lane, transfer);
            let what = format!("GPU {}: a copy, or the work that it comes after,", self.gpu.number());
            match plan.is_direct() || transfer.is_from_host() {
                true => transfer.fail_given(|| Error::Timeout { what: what.clone(), timeout_ms }),
                // Buffers of ours are all that the GPU may still write.
                false => return Err(Error::Gpu { device: self.gpu.number(), what: format!("not done within {timeout_ms} ms") }),
            }
            return Ok(());
        }
        transfer.leave(memory, &self.flusher);
        match ended {
            Ok(Ended::Failed(code)) => Err(self.gpu.failed("copying", code)),
            Ok(_) => {
                self.give_back(lane);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Has the GPU make all steps of a transfer, and waits for them.
    ///
    /// # Safety
    /// As [`Transfer::advance`].
    unsafe fn finish(
        &self,
        memory: &dyn Coherence,
        transfer: &mut Transfer<'_>,
        lane: &mut Lane,
        entered: &Entered<'_>,
        deadline: Instant,
    ) -> Ended {
        loop {
            // SAFETY: as this function demands.
            match unsafe { transfer.advance(memory, &self.flusher, lane, entered) } {
                Progress::Done => return Ended::Done,
                Progress::Failed(code) => return Ended::Failed(code),
                Progress::UnderWay => match lane.wait(entered, transfer.awaited(), deadline) {
                    Ended::Done => {}
                    ended => return ended,
                },
            }
        }
    }
}

impl CopyEngine for CudaEngine {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn publish_each(&self, memory: &dyn Coherence, lists: &[WriteList<'_>], checksum: Checksum) -> Vec<Outcome> {
        let order = Order::around(self.config.dma);
        let gpu = Some(self.gpu.number());
        let checked = lists.iter().map(|list| (list.check_on(gpu, memory.len_bytes(), checksum.is_on()), list.place().after()));
        let outcomes = self.run(memory, Transfer::new(Direction::ToHost, order, checksum, checked));
        order.published(memory);
        count(&outcomes, lists.iter().map(WriteList::len_bytes), |bytes| self.counters.published(bytes), &self.counters);
        outcomes
    }

    fn pull_each(&self, memory: &dyn Coherence, lists: &mut [ReadList<'_>], checksum: Checksum) -> Vec<Outcome> {
        let order = Order::around(self.config.dma);
        let gpu = Some(self.gpu.number());
        let checked = lists.iter().map(|list| (list.check_on(gpu, memory.len_bytes(), checksum.is_on()), list.place().after()));
        let outcomes = self.run(memory, Transfer::new(Direction::FromHost, order, checksum, checked));
        order.pulled(memory, false);
        count(&outcomes, lists.iter().map(ReadList::len_bytes), |bytes| self.counters.pulled(bytes), &self.counters);
        outcomes
    }

    fn is_settled(&self, timeout_ms: u64) -> bool {
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        loop {
            let settled = match self.gpu.enter() {
                Ok(entered) => self.settle(&entered),
                Err(_) => held(&self.late).is_empty(),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if settled || left.is_zero() {
                return settled;
            }
            std::thread::sleep(PAUSE.min(left));
        }
    }

    fn counters(&self) -> Vec<Copied> {
        let registered_bytes = self.registered.as_ref().map_or(0, Registered::len_bytes);
        vec![Copied { registered_bytes, queued_bytes: self.queued_bytes(), ..self.counters.look(self.name()) }]
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        if !self.is_settled(self.config.timeout_ms) {
            // What the GPU may still use is never given back: its buffers, and the pool's memory with its registration.
            std::mem::take(&mut *held(&self.late)).into_iter().for_each(|late| std::mem::forget(late.lane));
            std::mem::forget(self.registered.take());
        }
    }
}
