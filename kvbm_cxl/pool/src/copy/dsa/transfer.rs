// SPDX-License-Identifier: Apache-2.0
//! One run of moves through a queue: cut to its limits, submitted, waited for.

use super::descriptor::{Answer, Completion, Descriptor, Target};
use super::queue::{Limits, WorkQueue};
use crate::error::{Error, Result};
use std::time::{Duration, Instant};

/// Looks at a completion record between two looks at the clock.
const LOOKS: u32 = 256;

#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub(super) list: usize,
    pub(super) source: usize,
    pub(super) destination: usize,
    pub(super) len_bytes: usize,
}

/// Descriptors that are submitted and complete together. The device reads and writes the vectors by address: nothing in them moves once
/// they are made.
struct Group {
    lists: Vec<usize>,
    descriptors: Vec<Descriptor>,
    completions: Vec<Completion>,
    is_submitted: bool,
}

impl Group {
    fn new(moves: &[Move], target: Target, limits: &Limits) -> Self {
        let completions: Vec<Completion> = (0..=moves.len()).map(|_| Completion::default()).collect();
        let descriptor = |(part, completion): (&Move, &Completion)| {
            Descriptor::memory_move(part.source, part.destination, part.len_bytes as u32, target, limits.block_on_fault)
                .answered_at(completion)
        };
        let descriptors = moves.iter().zip(&completions).map(descriptor).collect();
        Group { lists: moves.iter().map(|part| part.list).collect(), descriptors, completions, is_submitted: false }
    }

    /// The descriptor for the device, and the record in which it says that all is done.
    fn whole(&self) -> Option<(Descriptor, &Completion)> {
        match (&self.descriptors[..], self.completions.last()) {
            ([only], _) => self.completions.first().map(|completion| (*only, completion)),
            (list, Some(last)) => Some((Descriptor::batch(list).answered_at(last), last)),
            (_, None) => None,
        }
    }

    fn is_pending(&self) -> bool {
        self.is_submitted && self.whole().is_some_and(|(_, completion)| completion.answer() == Answer::Pending)
    }

    /// The lists of which a move was not made. Nothing is pending any more.
    fn failed_lists(&self) -> impl Iterator<Item = usize> {
        let all_done = self.is_submitted && self.whole().is_some_and(|(_, completion)| completion.answer() == Answer::Done);
        let each = self.lists.iter().zip(&self.completions);
        each.filter(move |(_, completion)| !all_done && completion.answer() != Answer::Done).map(|(list, _)| *list)
    }
}

/// Makes the moves, and does `meanwhile` while the device works. Returns the lists of which a move was not made, each at least once.
///
/// When this returns the device is done with all of it. Where it does not get done in time, the queue is closed, which waits for it.
///
/// # Errors
/// [`Error::Timeout`] when the device is not done even then: it may still write, and none of its destinations may be used again.
pub(super) fn run(
    queue: &mut Option<Box<dyn WorkQueue>>,
    moves: &[Move],
    target: Target,
    timeout: Duration,
    meanwhile: impl FnOnce(),
) -> Result<Vec<usize>> {
    let Some(open) = queue.as_mut() else {
        meanwhile();
        return Ok(moves.iter().map(|part| part.list).collect());
    };
    let limits = open.limits();
    let parts: Vec<Move> = moves.iter().flat_map(|whole| cut(*whole, limits.transfer_bytes as usize)).collect();
    let batch_len = if limits.batch_len >= 2 { limits.batch_len as usize } else { 1 };
    let mut groups: Vec<Group> = parts.chunks(batch_len).map(|moves| Group::new(moves, target, &limits)).collect();
    let deadline = Instant::now() + timeout;
    let mut meanwhile = Some(meanwhile);
    let mut oldest = 0;
    for next in 0..groups.len() {
        let Some((descriptor, _)) = groups.get(next).and_then(Group::whole) else { continue };
        if next - oldest >= limits.in_flight as usize {
            if !groups.get(oldest).is_some_and(|group| wait(group, deadline)) {
                break;
            }
            oldest += 1;
        }
        if !submit(open.as_mut(), &descriptor, deadline) {
            break;
        }
        if let Some(group) = groups.get_mut(next) {
            group.is_submitted = true;
        }
        if let Some(meanwhile) = (next + 1 == limits.in_flight as usize).then(|| meanwhile.take()).flatten() {
            meanwhile();
        }
    }
    if let Some(meanwhile) = meanwhile {
        meanwhile();
    }
    if !groups.iter().all(|group| wait(group, deadline)) {
        // Closing waits for the device; without it whatever is written next could be overwritten late.
        *queue = None;
        if groups.iter().any(Group::is_pending) {
            std::mem::forget(groups);
            let what = "the data streaming accelerator, which may still write to what it was given".into();
            return Err(Error::Timeout { what, timeout_ms: timeout.as_millis() as u64 });
        }
    }
    Ok(groups.iter().flat_map(Group::failed_lists).collect())
}

fn cut(whole: Move, most_bytes: usize) -> impl Iterator<Item = Move> {
    (0..whole.len_bytes).step_by(most_bytes.max(1)).map(move |done| Move {
        source: whole.source + done,
        destination: whole.destination + done,
        len_bytes: most_bytes.min(whole.len_bytes - done),
        ..whole
    })
}

/// Until the queue takes it; false at the deadline.
fn submit(queue: &mut dyn WorkQueue, descriptor: &Descriptor, deadline: Instant) -> bool {
    loop {
        for _ in 0..LOOKS {
            if queue.submit(descriptor) {
                return true;
            }
            std::hint::spin_loop();
        }
        if Instant::now() > deadline {
            return false;
        }
    }
}

/// Until the device has answered; false at the deadline.
fn wait(group: &Group, deadline: Instant) -> bool {
    loop {
        for _ in 0..LOOKS {
            if !group.is_pending() {
                return true;
            }
            std::hint::spin_loop();
        }
        if Instant::now() > deadline {
            return false;
        }
    }
}
