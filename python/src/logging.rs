// SPDX-License-Identifier: Apache-2.0
//! What the pool logs, in Python's logging under `kvbm_cxl`.
//!
//! The pool logs from threads that keep the host alive, and those must never wait for the interpreter's lock. They put a record into a
//! bounded queue, and a thread of its own hands it to Python. A record is dropped where the queue is full.

use crate::handle::{Birth, held};
use log::{Level, LevelFilter, Log, Metadata, Record};
use pyo3::prelude::*;
use std::mem::forget;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Records that wait for the interpreter's lock.
const QUEUED: usize = 256;
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Name of the Python logger.
const LOGGER: &str = "kvbm_cxl";

struct Entry {
    level: Level,
    text: String,
}

struct Queue {
    birth: Birth,
    sender: SyncSender<Entry>,
    thread: JoinHandle<()>,
}

static QUEUE: Mutex<Option<Queue>> = Mutex::new(None);
/// The interpreter is about to end: nothing is handed over any more.
static ENDED: AtomicBool = AtomicBool::new(false);

struct Bridge;

impl Log for Bridge {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        !ENDED.load(Ordering::Relaxed)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        // In a child of a fork a thread that is not there may hold it: that record is dropped.
        let mut queue: MutexGuard<'_, Option<Queue>> = match QUEUE.try_lock() {
            Ok(queue) => queue,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if queue.as_ref().is_none_or(|queue| !queue.birth.is_here()) {
            // The rest of the parent's queue is not touched: its locks may be held.
            forget(queue.take());
            *queue = start();
        }
        if let Some(queue) = &*queue {
            // Full: the interpreter's lock was unavailable for long. The counters have every error.
            let _ = queue.sender.try_send(Entry { level: record.level(), text: record.args().to_string() });
        }
    }

    fn flush(&self) {}
}

fn start() -> Option<Queue> {
    let (sender, entries) = sync_channel(QUEUED);
    // Without a thread the record is dropped, and the next one tries again.
    let thread = std::thread::Builder::new().name("cxl-log".into()).spawn(move || hand_over(&entries)).ok()?;
    Some(Queue { birth: Birth::now(), sender, thread })
}

fn hand_over(entries: &Receiver<Entry>) {
    while let Ok(entry) = entries.recv() {
        if ENDED.load(Ordering::Relaxed) {
            return;
        }
        Python::try_attach(|py| {
            if let Err(error) = tell(py, &entry) {
                // A handler that raises: as Python shows errors of destructors.
                error.write_unraisable(py, None);
            }
        });
    }
}

fn tell(py: Python<'_>, entry: &Entry) -> PyResult<()> {
    let level = match entry.level {
        Level::Error => 40,
        Level::Warn => 30,
        Level::Info => 20,
        Level::Debug | Level::Trace => 10,
    };
    let logger = py.import("logging")?.call_method1("getLogger", (LOGGER,))?;
    logger.call_method1("log", (level, "%s", entry.text.as_str())).map(drop)
}

/// Ends the hand-over to Python, before the interpreter ends: that would end a thread that is in Python code by unwinding it, which aborts
/// the process in the frames of Rust below.
#[pyfunction]
pub fn end_logging(py: Python<'_>) {
    ENDED.store(true, Ordering::Relaxed);
    let Some(Queue { birth, sender, thread }) = held(&QUEUE).take() else { return };
    if !birth.is_here() {
        // The parent's, as above.
        forget((sender, thread));
        return;
    }
    drop(sender);
    py.detach(|| {
        let end = Instant::now() + END_TIMEOUT;
        while !thread.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

pub fn install(py: Python<'_>) -> PyResult<()> {
    // Fails only where this was done before.
    if log::set_logger(&Bridge).is_ok() {
        log::set_max_level(LevelFilter::Warn);
        py.import("atexit")?.call_method1("register", (wrap_pyfunction!(end_logging, py)?,))?;
    }
    Ok(())
}
