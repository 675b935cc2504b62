// SPDX-License-Identifier: Apache-2.0
//! `cxlctl doctor --gpu`: which driver and GPUs there are, whether a small part of the scratch memory can be registered, and how fast
//! pieces of each size are copied. Every copy that is timed is compared byte by byte.

use crate::scratch::Scratch;
use crate::stats::columns;
use crate::text::bytes;
use cxl_pool::coherence::{Coherence, CoherenceOptions};
use cxl_pool::copy::cuda::{self, CudaConfig, CudaEngine, DriverInfo, GpuMemory, Reach};
use cxl_pool::copy::{Checksum, CopyEngine, ReadList, WriteList};
use cxl_pool::{Error, Result};
use serde::Serialize;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Instant;

/// Lengths of pieces that are measured, in bytes.
const PIECES: [usize; 3] = [160, 32 << 10, 1 << 20];
/// Bytes of one copy, as far as the scratch memory goes, and most pieces of it.
const COPY_BYTES: usize = 4 << 20;
const MOST_PIECES: usize = 2048;
/// Bytes between two pieces in the memory of the GPU: neighbours would become one piece.
const GAP_BYTES: usize = 32;
/// Times that each copy is made; the best one counts.
const ROUNDS: usize = 5;

/// How fast pieces of one length are copied: GB/s, from the GPU to the pool and back.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Speed {
    pub piece_bytes: usize,
    pub pieces: usize,
    pub to_pool_gb_per_s: f64,
    pub from_pool_gb_per_s: f64,
}

/// The GPUs and their measurements.
#[derive(Debug, Serialize)]
pub struct GpuReport {
    /// The driver's library.
    pub library: String,
    /// The version of CUDA that it is of.
    pub version: Option<String>,
    pub gpus: Vec<(Option<String>, Option<String>, Option<u64>)>,
    pub device: u32,
    /// Bytes of the scratch memory that were registered, and how long that took, in milliseconds.
    pub registered: Option<(u64, f64)>,
    /// Why not, with what to change.
    pub refusal: Option<String>,
    /// Why no kernel moves bytes.
    pub no_kernels: Option<String>,
    pub dma: &'static str,
    pub speeds: Vec<Speed>,
}

impl GpuReport {
    /// Asks the driver, and measures on the scratch memory, if there is one.
    ///
    /// # Errors
    /// [`Error::NotFound`] without a driver or such a GPU, [`Error::Gpu`] when it cannot be used or moved bytes wrongly.
    pub fn of(device: u32, scratch: Option<(&Scratch, &CoherenceOptions)>) -> Result<GpuReport> {
        let config = CudaConfig::from_env()?;
        let DriverInfo { version, gpus, .. } = cuda::describe(&config.library)?;
        if device as usize >= gpus.len() {
            return Err(Error::NotFound(format!("GPU {device} (this process sees {})", gpus.len())));
        }
        let dotted = |version: (u32, u32)| format!("{}.{}", version.0, version.1);
        let mut report = GpuReport {
            library: config.library.clone(),
            version: version.map(dotted),
            gpus: gpus.into_iter().map(|gpu| (gpu.name, gpu.capability.map(dotted), gpu.memory_bytes)).collect(),
            device,
            registered: None,
            refusal: None,
            no_kernels: None,
            dma: config.dma.text(),
            speeds: Vec::new(),
        };
        if let Some((scratch, options)) = scratch {
            report.measure(&config, scratch.memory(options)?.memory)?;
        }
        Ok(report)
    }

    fn measure(&mut self, config: &CudaConfig, memory: Arc<dyn Coherence>) -> Result<()> {
        let start = Instant::now();
        let config = CudaConfig { register_bytes: u64::MAX, ..config.clone() };
        let engine = Arc::new(CudaEngine::open(&config, self.device, memory.clone())?);
        engine.register_ahead();
        let Reach { registered_bytes, refusal, no_kernels, .. } = engine.reach();
        self.registered = Some((registered_bytes, start.elapsed().as_secs_f64() * 1e3)).filter(|_| registered_bytes > 0);
        (self.refusal, self.no_kernels) = (refusal, no_kernels);
        if self.refusal.is_some() {
            return Ok(());
        }
        for piece_bytes in PIECES {
            self.speeds.extend(speed(piece_bytes, &engine, &*memory)?);
        }
        Ok(())
    }

    pub fn write_text(&self, text: &mut String) -> std::fmt::Result {
        let version = self.version.as_ref().map_or("of unknown version".into(), |version| format!("CUDA {version}"));
        writeln!(text, "\nGPUs     {}, {version}; DMA is taken for {}", self.library, self.dma)?;
        for (number, (name, capability, memory_bytes)) in self.gpus.iter().enumerate() {
            let capability = capability.as_ref().map_or(String::new(), |capability| format!(", compute capability {capability}"));
            let memory = memory_bytes.map_or(String::new(), |len_bytes| format!(", {}", bytes(len_bytes)));
            writeln!(text, "  {number}: {}{capability}{memory}", name.as_deref().unwrap_or("unnamed"))?;
        }
        if let Some((len_bytes, ms)) = self.registered {
            writeln!(text, "  GPU {}: {} registered in {ms:.1} ms", self.device, bytes(len_bytes))?;
        }
        if !self.speeds.is_empty() {
            let mut rows = vec![["pieces of", "count", "to pool GB/s", "from pool GB/s"].map(String::from).to_vec()];
            rows.extend(self.speeds.iter().map(|speed| {
                let gb_per_s = [speed.to_pool_gb_per_s, speed.from_pool_gb_per_s].map(|speed| format!("{speed:.2}"));
                [vec![bytes(speed.piece_bytes as u64), speed.pieces.to_string()], gb_per_s.to_vec()].concat()
            }));
            text.push_str(&columns(&rows));
        }
        Ok(())
    }
}

/// Times copies of pieces of one length; `None` where the memory is too small for two.
fn speed(piece_bytes: usize, engine: &Arc<CudaEngine>, memory: &dyn Coherence) -> Result<Option<Speed>> {
    let room = usize::try_from(memory.len_bytes() / 2).unwrap_or(usize::MAX).min(COPY_BYTES);
    let pieces = (room / piece_bytes).min(MOST_PIECES);
    if pieces < 2 {
        return Ok(None);
    }
    let (offset, step) = (memory.len_bytes() / 2, piece_bytes + GAP_BYTES);
    let on_gpu = engine.allocate(pieces * step)?;
    let mut content: Vec<u8> =
        (0..pieces * step).map(|at| ((at as u64 + piece_bytes as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    on_gpu.write(&content)?;
    let (mut best, mut found) = ([f64::INFINITY; 2], vec![0; pieces * piece_bytes]);
    let wrong = |what: &str| Error::Gpu { device: engine.device(), what: format!("pieces of {piece_bytes} bytes: wrong bytes {what}") };
    for round in 0..ROUNDS {
        let place = on_gpu.place();
        // SAFETY: memory of this function's own, which no other thread uses, and lives until the calls have ended.
        let (mut written, mut read) = unsafe { (WriteList::lying_on(place), ReadList::lying_on(place)) };
        for index in 0..pieces {
            let (at, range) = (offset + (index * piece_bytes) as u64, on_gpu.range(index * step, piece_bytes)?);
            // SAFETY: as above.
            unsafe {
                written.push_raw(at, range);
                read.push_raw(at, range);
            }
        }
        let start = Instant::now();
        engine.publish(memory, &written, Checksum::Off)?;
        best[0] = best[0].min(start.elapsed().as_secs_f64());
        memory.flush_range(offset, found.len() as u64)?;
        memory.fence_all();
        memory.copy_out(offset, &mut found)?;
        if !found.chunks(piece_bytes).zip(content.chunks(step)).all(|(found, content)| content.starts_with(found)) {
            return Err(wrong("in the pool"));
        }
        // Other bytes than the GPU has.
        found.iter_mut().for_each(|byte| *byte ^= 0x5a ^ round as u8);
        memory.copy_in(offset, &found)?;
        memory.fence_stores();
        let start = Instant::now();
        engine.pull(memory, &mut read, Checksum::Off)?;
        best[1] = best[1].min(start.elapsed().as_secs_f64());
        let piece_of = content.chunks_mut(step).zip(found.chunks(piece_bytes));
        piece_of.for_each(|(content, found)| content[..piece_bytes].copy_from_slice(found));
        if !holds(&on_gpu, &content)? {
            return Err(wrong("on the GPU"));
        }
    }
    let gb_per_s = |seconds: f64| found.len() as f64 / seconds / 1e9;
    let [to_pool_gb_per_s, from_pool_gb_per_s] = best.map(gb_per_s);
    Ok(Some(Speed { piece_bytes, pieces, to_pool_gb_per_s, from_pool_gb_per_s }))
}

fn holds(on_gpu: &GpuMemory, content: &[u8]) -> Result<bool> {
    let mut found = vec![0; content.len()];
    on_gpu.read(&mut found)?;
    Ok(found == content)
}
