// SPDX-License-Identifier: Apache-2.0
//! The threads of an engine: the division of large copies among them, and the jobs that they share with the thread that asked.
//!
//! Work is cut into tasks by device, because one device's bandwidth is less than that of several (Beluga section 5.3, O9): there is a queue
//! for each device, and each thread begins with another one.

use super::Outcome;
use super::list::{ListPieces, Piece};
use crate::background::held;
use crate::cpus::CpuSet;
use crate::error::Error;
use crate::limits::LINE_BYTES;
use crate::media::Stripes;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

/// Smallest and largest task, in bytes: long enough to be worth a fence of its own, short enough that all threads end together.
const TASK_BYTES: std::ops::RangeInclusive<u64> = 256 << 10..=2 << 20;

pub(super) struct Task {
    pub(super) list: usize,
    pub(super) pieces: Vec<Piece>,
    pub(super) device: usize,
}

pub(super) struct CopyThreads {
    workers: usize,
    stripes: Option<Stripes>,
    /// Where they run, unless where the process does.
    cpus: Option<CpuSet>,
    /// The queue at which they wait, and the process that started them: a forked process has none of them.
    queue: OnceLock<(Arc<JobQueue>, u32)>,
}

impl Drop for CopyThreads {
    fn drop(&mut self) {
        if let Some(queue) = self.queue() {
            queue.close();
        }
    }
}

impl CopyThreads {
    pub(super) fn new(workers: usize, stripes: Option<Stripes>) -> Self {
        CopyThreads { workers, stripes, cpus: None, queue: OnceLock::new() }
    }

    /// The same, none of which has started, on these CPUs.
    pub(super) fn on(self, cpus: Option<CpuSet>) -> Self {
        CopyThreads { workers: self.workers, stripes: self.stripes, cpus, queue: OnceLock::new() }
    }

    /// The queue with its workers, unless they have not started or are another process's.
    fn queue(&self) -> Option<&Arc<JobQueue>> {
        self.queue.get().filter(|(_, process)| *process == std::process::id()).map(|(queue, _)| queue)
    }

    fn device_at(&self, offset: u64) -> (usize, u64) {
        match self.stripes.and_then(|stripes| stripes.piece_at(offset)) {
            Some(piece) => (piece.device, piece.start + piece.len_bytes),
            None => (0, u64::MAX),
        }
    }

    /// Cuts shares into tasks; a list that is `whole` stays one.
    pub(super) fn divide(&self, shares: &[ListPieces<'_>], total_bytes: u64, whole: bool) -> Vec<Task> {
        let most_bytes = (total_bytes / (2 * (self.workers as u64 + 1))).clamp(*TASK_BYTES.start(), *TASK_BYTES.end());
        let most_bytes = most_bytes.next_multiple_of(LINE_BYTES as u64);
        let mut tasks = Vec::new();
        for share in shares {
            if whole {
                let device = share.pieces.first().map_or(0, |piece| self.device_at(piece.offset).0);
                tasks.push(Task { list: share.list, pieces: share.pieces.to_vec(), device });
            } else {
                self.cut(share, most_bytes, &mut tasks);
            }
        }
        tasks
    }

    fn cut(&self, share: &ListPieces<'_>, most_bytes: u64, tasks: &mut Vec<Task>) {
        // The task that grows for each device: pieces that go to and fro between devices would else make a task each.
        let mut open: Vec<(u64, Vec<Piece>)> = Vec::new();
        for piece in share.pieces {
            let mut done = 0;
            while done < piece.len_bytes {
                let offset = piece.offset + done as u64;
                let (device, end) = self.device_at(offset);
                if open.len() <= device {
                    open.resize_with(device + 1, Default::default);
                }
                let Some((filled, pieces)) = open.get_mut(device) else { break };
                // Cut where a line begins, so that no two tasks write the same one.
                let room = (most_bytes - *filled).saturating_sub(offset % LINE_BYTES as u64).max(LINE_BYTES as u64);
                let taken = (piece.len_bytes - done).min(room.min(end - offset) as usize);
                pieces.push(piece.part(done, taken));
                *filled += taken as u64;
                done += taken;
                if *filled + LINE_BYTES as u64 > most_bytes {
                    tasks.push(Task { list: share.list, pieces: std::mem::take(pieces), device });
                    *filled = 0;
                }
            }
        }
        let rest = open.into_iter().enumerate().filter(|(_, (filled, _))| *filled > 0);
        tasks.extend(rest.map(|(device, (_, pieces))| Task { list: share.list, pieces, device }));
    }

    /// Does every task, the caller with the others, and returns what became of all of them. Workers that are busy or have no CPU are not
    /// waited for: the caller does the tasks that were not begun.
    pub(super) fn run<'w>(&self, tasks: Vec<Task>, work: impl Fn(&Task) -> Vec<(usize, Outcome)> + Sync + 'w) -> Vec<(usize, Outcome)> {
        let helpers = self.workers.min(tasks.len().saturating_sub(1));
        let job = Arc::new(Job::new(tasks, &work));
        let start = || (JobQueue::with_workers(self.workers, self.cpus.as_ref()), std::process::id());
        self.queue.get_or_init(start);
        if let Some(queue) = self.queue() {
            queue.ask(&job, helpers);
        }
        job.help(0);
        let done = job.wait();
        // No flush or store that the caller makes from here on comes before what the workers did.
        fence(Ordering::SeqCst);
        done
    }
}

/// Looks at a job that is nearly done before its caller goes to sleep: about as long as a wake-up takes.
const LOOKS: u32 = 5_000;

type Work<'w> = dyn Fn(&Task) -> Vec<(usize, Outcome)> + Sync + 'w;

pub(super) struct Job {
    queues: Vec<(Vec<Task>, AtomicUsize)>,
    tasks: usize,
    /// Of the thread that asked, which waits for every task that was taken: valid for as long as any task is not done.
    work: *const Work<'static>,
    done: AtomicUsize,
    outcomes: Mutex<Vec<(usize, Outcome)>>,
    all_done: Condvar,
}

// SAFETY: the work may be called from any thread, and is called only by who has taken a task and not yet counted it as done.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    /// A job that is [`Job::wait`]ed for before `work` ends.
    pub(super) fn new(tasks: Vec<Task>, work: &Work<'_>) -> Self {
        let count = tasks.len();
        let mut queues: Vec<(Vec<Task>, AtomicUsize)> = Vec::new();
        for task in tasks {
            if queues.len() <= task.device {
                queues.resize_with(task.device + 1, Default::default);
            }
            if let Some((queue, _)) = queues.get_mut(task.device) {
                queue.push(task);
            }
        }
        // SAFETY: only the lifetime changes; `help` keeps to it as described at `work`.
        let work = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        let outcomes = Mutex::new(Vec::with_capacity(count));
        Job { queues, tasks: count, work, done: AtomicUsize::new(0), outcomes, all_done: Condvar::new() }
    }

    /// Does tasks until none is left, those of the device `first` first.
    pub(super) fn help(&self, first: usize) {
        // What the caller fetched before it asked is older than every flush made here, which plain loads would not see to.
        fence(Ordering::SeqCst);
        for turn in 0..self.queues.len() {
            let Some((queue, next)) = self.queues.get((first + turn) % self.queues.len()) else { continue };
            while let Some(task) = queue.get(next.fetch_add(1, Ordering::Relaxed)) {
                // SAFETY: this task is taken and not done, so the caller waits.
                let work = unsafe { &*self.work };
                let outcomes = catch_unwind(AssertUnwindSafe(|| work(task)))
                    .unwrap_or_else(|_| vec![(task.list, Err(Error::Invalid("a thread that copied came to an end".into())))]);
                let mut all = held(&self.outcomes);
                all.extend(outcomes);
                // Counted under the lock, so that a caller about to sleep is woken.
                let is_last = self.done.fetch_add(1, Ordering::Release) + 1 == self.tasks;
                drop(all);
                if is_last {
                    self.all_done.notify_all();
                }
            }
        }
    }

    /// Waits for the tasks that others have taken, which takes no longer than copying them.
    pub(super) fn wait(&self) -> Vec<(usize, Outcome)> {
        let is_done = || self.done.load(Ordering::Acquire) == self.tasks;
        for _ in 0..LOOKS {
            if is_done() {
                break;
            }
            std::hint::spin_loop();
        }
        let mut outcomes = held(&self.outcomes);
        while !is_done() {
            outcomes = self.all_done.wait(outcomes).unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::take(&mut *outcomes)
    }
}

/// Where workers wait for jobs.
#[derive(Default)]
pub(super) struct JobQueue {
    asked: Mutex<(VecDeque<Arc<Job>>, bool)>,
    bell: Condvar,
}

impl JobQueue {
    /// A queue with as many workers as can be started. With none, every caller does its own work.
    pub(super) fn with_workers(workers: usize, cpus: Option<&CpuSet>) -> Arc<Self> {
        let queue = Arc::new(JobQueue::default());
        for number in 1..=workers {
            let (at, cpus) = (queue.clone(), cpus.cloned());
            let run = move || {
                // They were tried when the pool was joined; a thread elsewhere copies the same bytes.
                if let Some(Err(error)) = cpus.map(|cpus| cpus.bind_current_thread()) {
                    log::warn!("a thread that copies: {error}");
                }
                at.serve(number);
            };
            // Without this thread the others have more to do.
            let _ = std::thread::Builder::new().name(format!("cxl-copy-{number}")).spawn(run);
        }
        queue
    }

    fn serve(&self, number: usize) {
        let mut asked = held(&self.asked);
        loop {
            match asked.0.pop_front() {
                Some(job) => {
                    drop(asked);
                    job.help(number);
                    drop(job);
                    asked = held(&self.asked);
                }
                None if asked.1 => return,
                None => asked = self.bell.wait(asked).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    pub(super) fn ask(&self, job: &Arc<Job>, helpers: usize) {
        held(&self.asked).0.extend(std::iter::repeat_n(job, helpers).cloned());
        (0..helpers).for_each(|_| self.bell.notify_one());
    }

    pub(super) fn close(&self) {
        held(&self.asked).1 = true;
        self.bell.notify_all();
    }
}

#[cfg(test)]
mod tests;
