// SPDX-License-Identifier: Apache-2.0
//! Registration ahead of the first copy: the pool, or the part of it that the configuration names, by several threads.

use super::CudaEngine;
use super::registered::Registered;
use crate::background::held;
use crate::error::{Error, Result};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Between two lines in the log about how far it is.
const LOG_PERIOD: Duration = Duration::from_secs(5);

/// How far the threads are.
struct Round<'r> {
    registered: &'r Registered,
    granules: u64,
    next: AtomicU64,
    /// Bytes of the granules that are registered.
    done_bytes: AtomicU64,
    /// A granule was refused, or a thread cannot use the GPU: the others begin nothing more.
    is_over: AtomicBool,
    start: Instant,
    logged: Mutex<Instant>,
    device: u32,
}

impl CudaEngine {
    /// Registers the pool with the driver before a copy needs it, as far as [`super::CudaConfig::register_bytes`] says: a copy registers
    /// the rest when it first needs it. Returns when that has ended; [`CudaEngine::reach`] and the counters say how far it is, the log
    /// every five seconds. Copies may be made at the same time.
    ///
    /// The first part that the driver refuses ends it, with a warning in the log: copies to and from unregistered parts go through pinned
    /// buffers. A GPU that cannot be used is a warning, too; its first copy is an error.
    pub fn register_ahead(&self) {
        if self.config.register_bytes == 0 {
            return;
        }
        let refused = match &self.registered {
            None => Some("this process does not map the pool".to_owned()),
            Some(registered) => self.register_first(registered).map_or_else(|error| Some(error.to_string()), |()| registered.refusal()),
        };
        if let Some(what) = refused {
            log::warn!("GPU {}: the pool is not registered, so blocks go through pinned buffers and a CPU: {what}", self.device());
        }
    }

    fn register_first(&self, registered: &Registered) -> Result<()> {
        let start = Instant::now();
        let round = Round {
            registered,
            granules: registered.granules_of(self.config.register_bytes),
            next: AtomicU64::new(0),
            done_bytes: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            start,
            logged: Mutex::new(start),
            device: self.device(),
        };
        let threads = u64::from(self.config.threads).min(round.granules).max(1);
        let all_bytes: u64 = (0..round.granules).map(|index| registered.bytes_of(index)).sum();
        log::info!("GPU {}: registering {} bytes of the pool, on {threads} threads", round.device, all_bytes);
        let ended = std::thread::scope(|scope| {
            let work = || self.work_at(&round, all_bytes);
            let start = |number| std::thread::Builder::new().name(format!("cxl-register-{number}")).spawn_scoped(scope, work);
            // A thread that cannot be started leaves its share to the others.
            let others: Vec<_> = (1..threads).filter_map(|number| start(number).ok()).collect();
            let own = work();
            let gone = |_| Err(Error::Gpu { device: round.device, what: "a thread that registers the pool has ended".into() });
            others.into_iter().fold(own, |ended, other| ended.and(other.join().unwrap_or_else(gone)))
        });
        let (done, seconds) = (round.done_bytes.load(Relaxed), start.elapsed().as_secs_f64());
        log::info!("GPU {}: registered {done} of {all_bytes} bytes of the pool in {seconds:.1} s", round.device);
        ended
    }

    /// What each of the threads does.
    fn work_at(&self, round: &Round<'_>, all_bytes: u64) -> Result<()> {
        let entered = self.gpu.enter().inspect_err(|_| round.is_over.store(true, Relaxed))?;
        while !round.is_over.load(Relaxed) {
            let index = round.next.fetch_add(1, Relaxed);
            if index >= round.granules {
                break;
            }
            if !round.registered.reach_granule(&entered, index) {
                round.is_over.store(true, Relaxed);
                break;
            }
            let done = round.done_bytes.fetch_add(round.registered.bytes_of(index), Relaxed) + round.registered.bytes_of(index);
            let mut logged = held(&round.logged);
            if logged.elapsed() >= LOG_PERIOD {
                *logged = Instant::now();
                let seconds = round.start.elapsed().as_secs();
                log::info!("GPU {}: registered {done} of {all_bytes} bytes of the pool after {seconds} s", round.device);
            }
        }
        Ok(())
    }
}
