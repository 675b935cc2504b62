// SPDX-License-Identifier: Apache-2.0
//! What happened last, and a digest of all that happened.

use cxl_pool::media::Layout;
use std::collections::VecDeque;
use std::fmt::Write as _;

/// Kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Load,
    Write,
    Flush,
    FenceStores,
    FenceAll,
    FenceLoads,
    Prefetch,
    CopyIn,
    CopyOut,
    Store,
    Sleep,
    Relax,
    Park,
    Wake,
    Lock,
    Point,
    Yield,
    Exit,
    CrashMachine,
    CrashProcess,
    Pause,
    Jump,
    Lose,
    Restart,
}

impl Op {
    fn has_line(self) -> bool {
        matches!(self, Op::Load | Op::Write | Op::Flush | Op::Prefetch | Op::CopyIn | Op::CopyOut | Op::Store | Op::Lose)
    }
}

/// One event.
pub(crate) struct Event {
    pub(crate) step: u64,
    pub(crate) now_ns: u64,
    pub(crate) thread: usize,
    pub(crate) op: Op,
    /// Pool offset, duration, host: what `op` is about.
    pub(crate) what: u64,
    /// Bytes 4 to 12 of the line that was read or written.
    pub(crate) value: u64,
    pub(crate) note: Option<String>,
}

/// The last events and the digest of all of them.
pub(crate) struct Trace {
    events: VecDeque<Event>,
    keep: usize,
    digest: u64,
}

impl Trace {
    pub(crate) fn new(keep: usize) -> Self {
        Trace { events: VecDeque::with_capacity(keep.min(4096)), keep, digest: 0xcbf2_9ce4_8422_2325 }
    }

    pub(crate) fn push(&mut self, event: Event) {
        for part in [event.thread as u64, event.op as u64, event.what, event.value, event.now_ns] {
            self.digest = (self.digest ^ part).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(5);
        }
        if self.keep == 0 {
            return;
        }
        if self.events.len() == self.keep {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    pub(crate) fn digest(&self) -> u64 {
        self.digest
    }

    /// The kept events, one line each; `thread_name` names a thread with its host.
    pub(crate) fn lines(&self, layout: &Layout, thread_name: impl Fn(usize) -> String) -> Vec<String> {
        self.events
            .iter()
            .map(|event| {
                let mut line = format!("{:>8} {:>12} ns {:<16} {:?}", event.step, event.now_ns, thread_name(event.thread), event.op);
                if event.op.has_line() {
                    match layout.line_at(event.what) {
                        Some((region, index)) => write!(line, " {region:?}[{index}] {:016x}", event.value),
                        None => write!(line, " {:#x} {:016x}", event.what, event.value),
                    }
                    .unwrap_or_default();
                } else if event.what != 0 {
                    write!(line, " {}", event.what).unwrap_or_default();
                }
                if let Some(note) = &event.note {
                    write!(line, " {note}").unwrap_or_default();
                }
                line
            })
            .collect()
    }
}
