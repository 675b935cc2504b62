// SPDX-License-Identifier: Apache-2.0
//! Threads that help with a copy, and the job that they share with the thread that asked.

use super::Outcome;
use super::spread::Task;
use crate::background::held;
use crate::error::Error;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Looks at a job that is nearly done before its caller goes to sleep: about as long as a wake-up takes.
const LOOKS: u32 = 5_000;

type Work<'w> = dyn Fn(&Task) -> Vec<(usize, Outcome)> + Sync + 'w;

/// A list of tasks that several threads take from.
pub(super) struct Job {
    /// The tasks of each device, and how many of them were taken.
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
pub(super) struct Desk {
    asked: Mutex<(VecDeque<Arc<Job>>, bool)>,
    bell: Condvar,
}

impl Desk {
    /// A desk with as many workers as can be started. With none, every caller does its own work.
    pub(super) fn with_workers(workers: usize) -> Arc<Self> {
        let desk = Arc::new(Desk::default());
        for number in 1..=workers {
            let at = desk.clone();
            // Without this thread the others have more to do.
            let _ = std::thread::Builder::new().name(format!("cxl-copy-{number}")).spawn(move || at.serve(number));
        }
        desk
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

    /// Asks so many workers to help with a job.
    pub(super) fn ask(&self, job: &Arc<Job>, helpers: usize) {
        held(&self.asked).0.extend(std::iter::repeat_n(job, helpers).cloned());
        (0..helpers).for_each(|_| self.bell.notify_one());
    }

    /// Sends the workers home.
    pub(super) fn close(&self) {
        held(&self.asked).1 = true;
        self.bell.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn tasks(count: usize) -> Vec<Task> {
        (0..count).map(|list| Task { list, pieces: Vec::new(), device: list % 3 }).collect()
    }

    #[test]
    fn every_task_is_done_once_whoever_does_it() {
        let desk = Desk::with_workers(3);
        for round in 0..200 {
            let count = 1 + round % 17;
            let work = |task: &Task| vec![(task.list, Ok(Some(task.list as u64 * 7)))];
            let job = Arc::new(Job::new(tasks(count), &work));
            desk.ask(&job, 3);
            job.help(0);
            let mut lists: Vec<(usize, u64)> = job.wait().into_iter().map(|(list, sum)| (list, sum.unwrap().unwrap())).collect();
            lists.sort_unstable();
            assert_eq!(lists, (0..count).map(|list| (list, list as u64 * 7)).collect::<Vec<_>>());
        }
        desk.close();
    }

    #[test]
    fn workers_take_part_and_one_that_panics_fails_its_list_alone() {
        let desk = Desk::with_workers(2);
        let seen: Mutex<BTreeSet<String>> = Mutex::default();
        let work = |task: &Task| {
            // The caller's first task takes until a worker has come.
            for _ in 0..10_000 {
                held(&seen).insert(std::thread::current().name().unwrap_or_default().to_owned());
                if held(&seen).len() > 1 {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            assert!(task.list != 4, "planned");
            vec![(task.list, Ok(None))]
        };
        let job = Arc::new(Job::new(tasks(9), &work));
        desk.ask(&job, 2);
        job.help(0);
        let outcomes = job.wait();
        desk.close();
        assert!(held(&seen).iter().any(|name| name.starts_with("cxl-copy-")), "no worker took part");
        let failed: Vec<usize> = outcomes.iter().filter(|(_, outcome)| outcome.is_err()).map(|(list, _)| *list).collect();
        assert_eq!((outcomes.len(), failed), (9, vec![4]));
    }
}
