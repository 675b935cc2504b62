// SPDX-License-Identifier: Apache-2.0
//! The kernels of one GPU: loaded by the driver from PTX that this library has, without CUDA's toolkit, and tried on bytes whose copy and
//! checksum are known before they are used for any other. Where they are not loaded, or their trial fails, copies go as they do
//! without them, and [`Kernels::open`] says why.

use super::config::CudaConfig;
use super::driver::Handle;
use super::gpu::{Entered, Gpu};
use super::table::Tables;
use super::trial;
use crate::background::held;
use crate::error::{Error, Result};
use std::ffi::{CStr, c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// What `scripts/gpu-kernels` makes of `kernels/move.cu`, for GPUs from compute capability 8.0 on.
const PTX: &str = concat!(include_str!("kernels/move.ptx"), "\0");
const PLAIN: &CStr = c"cxl_move";
const SUMMING: &CStr = c"cxl_move_sum";
/// Threads of a block, as the kernels are compiled for.
const THREADS: c_uint = 256;
/// Longest time for the trial.
const TRIAL_TIMEOUT_MS: u64 = 2_000;

/// The kernels of a GPU.
pub(super) struct Kernels {
    gpu: Arc<Gpu>,
    module: Handle,
    plain: Handle,
    summing: Handle,
    blocks: u32,
    marks: AtomicU64,
    /// Why they are not used any more.
    failure: Mutex<Option<String>>,
}

// SAFETY: module and kernels are names for what the driver has; it may be called from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads the kernels and tries them; why there are none otherwise.
    pub(super) fn open(gpu: &Arc<Gpu>, config: &CudaConfig) -> std::result::Result<Arc<Kernels>, String> {
        let opened = gpu.enter().and_then(|entered| {
            let kernels = Arc::new(Self::load(gpu, &entered, config)?);
            trial::try_out(gpu, &kernels, &entered, config.timeout_ms.min(TRIAL_TIMEOUT_MS))?;
            Ok(kernels)
        });
        opened.map_err(|error| error.to_string())
    }

    fn load(gpu: &Arc<Gpu>, entered: &Entered<'_>, config: &CudaConfig) -> Result<Kernels> {
        let module = entered.load_module(PTX.as_bytes())?;
        let none = std::ptr::null_mut();
        let marks = AtomicU64::new(1);
        // Made first, so that the module is unloaded when a kernel is not in it.
        let mut kernels = Kernels {
            gpu: gpu.clone(),
            module,
            plain: none,
            summing: none,
            blocks: config.kernel_blocks,
            marks,
            failure: Mutex::default(),
        };
        // SAFETY: the module is loaded; the same below.
        kernels.plain = unsafe { entered.kernel(module, PLAIN) }?;
        // SAFETY: as above.
        kernels.summing = unsafe { entered.kernel(module, SUMMING) }?;
        Ok(kernels)
    }

    /// Why the kernels are not used any more, if so.
    pub(super) fn failure(&self) -> Option<String> {
        held(&self.failure).clone()
    }

    pub(super) fn is_usable(&self) -> bool {
        held(&self.failure).is_none()
    }

    /// Ends the use of the kernels.
    pub(super) fn give_up(&self, reason: String) {
        log::warn!("GPU {}: kernels are not used any more: {reason}", self.gpu.number());
        held(&self.failure).get_or_insert(reason);
    }

    /// What it means that a kernel has ended and left a list without its mark. It is not used any more.
    pub(super) fn unfinished(&self) -> Error {
        let what = "a kernel has ended before a list was moved and summed: kernels are not used any more".to_owned();
        self.give_up(what.clone());
        Error::Gpu { device: self.gpu.number(), what }
    }

    /// The first of so many marks that no other list has.
    pub(super) fn marks(&self, count: usize) -> u64 {
        self.marks.fetch_add(count as u64, Relaxed)
    }

    /// Launches a kernel; the driver's answer.
    ///
    /// # Safety
    /// As [`Entered::launch`]; the tables are whole.
    pub(super) unsafe fn launch(&self, entered: &Entered<'_>, sums: bool, tables: &Tables, chunks: u32, stream: Handle) -> Result<c_int> {
        let kernel = if sums { self.summing } else { self.plain };
        let blocks = chunks.div_ceil(THREADS / 32).clamp(1, self.blocks);
        // SAFETY: as this function demands; both kernels take a `Tables`.
        unsafe { entered.launch(kernel, blocks, THREADS, tables, stream) }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if let Ok(entered) = self.gpu.enter() {
            // SAFETY: loaded by `load`, and lanes, which launch kernels of it, hold it as long as one is under way.
            unsafe { entered.unload_module(self.module) };
        }
    }
}
