// SPDX-License-Identifier: Apache-2.0
//! The division of large copies among threads.
//!
//! Work is cut into tasks by device, because one device's bandwidth is less than that of several (Beluga section 5.3, O9): there is a queue
//! for each device, and each thread begins with another one.

use super::Outcome;
use super::cpu::Share;
use super::crew::{Desk, Job};
use super::list::Piece;
use crate::limits::LINE_BYTES;
use crate::media::Stripes;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, OnceLock};

/// Smallest and largest task, in bytes: long enough to be worth a fence of its own, short enough that all threads end together.
const TASK_BYTES: std::ops::RangeInclusive<u64> = 256 << 10..=2 << 20;

/// A part of the work that one thread does in one go.
pub(super) struct Task {
    pub(super) list: usize,
    pub(super) pieces: Vec<Piece>,
    pub(super) device: usize,
}

/// The worker threads of an engine.
pub(super) struct Crew {
    workers: usize,
    stripes: Option<Stripes>,
    /// The desk at which they wait, and the process that started them: a forked process has none of them.
    desk: OnceLock<(Arc<Desk>, u32)>,
}

impl Drop for Crew {
    fn drop(&mut self) {
        if let Some(desk) = self.desk() {
            desk.close();
        }
    }
}

impl Crew {
    pub(super) fn new(workers: usize, stripes: Option<Stripes>) -> Self {
        Crew { workers, stripes, desk: OnceLock::new() }
    }

    /// The desk with its workers, unless they have not started or are another process's.
    fn desk(&self) -> Option<&Arc<Desk>> {
        self.desk.get().filter(|(_, process)| *process == std::process::id()).map(|(desk, _)| desk)
    }

    /// The device of an offset, and the end of the stretch that lies on it.
    fn device_at(&self, offset: u64) -> (usize, u64) {
        match self.stripes.and_then(|stripes| stripes.piece_at(offset)) {
            Some(piece) => (piece.device, piece.start + piece.len_bytes),
            None => (0, u64::MAX),
        }
    }

    /// Cuts shares into tasks; a list that is `whole` stays one.
    pub(super) fn divide(&self, shares: &[Share<'_>], total_bytes: u64, whole: bool) -> Vec<Task> {
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

    fn cut(&self, share: &Share<'_>, most_bytes: u64, tasks: &mut Vec<Task>) {
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
    /// waited for: the caller does what nobody has begun.
    pub(super) fn run<'w>(&self, tasks: Vec<Task>, work: impl Fn(&Task) -> Vec<(usize, Outcome)> + Sync + 'w) -> Vec<(usize, Outcome)> {
        let helpers = self.workers.min(tasks.len().saturating_sub(1));
        let job = Arc::new(Job::new(tasks, &work));
        let start = || (Desk::with_workers(self.workers), std::process::id());
        self.desk.get_or_init(start);
        if let Some(desk) = self.desk() {
            desk.ask(&job, helpers);
        }
        job.help(0);
        let done = job.wait();
        // No flush or store that the caller makes from here on comes before what the workers did.
        fence(Ordering::SeqCst);
        done
    }
}
