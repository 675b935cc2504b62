// SPDX-License-Identifier: Apache-2.0
//! What docs/internals/design.md section 3 demands of the instructions of one operation (I2 to I5), and who checks it.

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges of bytes, some of one")]

use crate::recorder::{Event, Step};
use cxl_pool::limits::LINE_BYTES;
use std::collections::BTreeMap;
use std::ops::Range;

/// What one operation must do, and may.
#[derive(Clone, Debug, Default)]
pub struct Demands {
    /// How often each line is flushed; no other is.
    pub flushes: BTreeMap<usize, usize>,
    /// Bytes of the pool that are stored to; no others are.
    pub stores: Vec<Range<usize>>,
    /// Bytes that are loaded in place of what a cache held: their lines behind a flush and a full fence.
    pub loads: Vec<Range<usize>>,
    /// A full fence comes last.
    pub is_completed: bool,
    /// The memory is coherent by itself: nothing needs a flush.
    pub is_coherent: bool,
}

impl Demands {
    pub fn flush(mut self, lines: impl IntoIterator<Item = usize>) -> Self {
        if !self.is_coherent {
            lines.into_iter().for_each(|line| *self.flushes.entry(line).or_default() += 1);
        }
        self
    }

    /// Bytes are stored: lines in part are fetched before and flushed afterwards.
    pub fn store(mut self, bytes: Range<usize>) -> Self {
        if bytes.is_empty() {
            return self;
        }
        let partial: Vec<usize> = lines_of(&bytes).filter(|line| !holds_line(&bytes, *line)).collect();
        self.stores.push(bytes);
        self.flush(partial.iter().copied()).flush(partial)
    }

    pub fn complete(self) -> Self {
        Demands { is_completed: true, ..self }
    }

    pub fn load(mut self, bytes: Range<usize>) -> Self {
        if !bytes.is_empty() {
            self.loads.push(bytes);
        }
        self
    }
}

pub fn lines_of(bytes: &Range<usize>) -> Range<usize> {
    if bytes.is_empty() { 0..0 } else { bytes.start / LINE_BYTES..bytes.end.div_ceil(LINE_BYTES) }
}

fn holds_line(bytes: &Range<usize>, line: usize) -> bool {
    bytes.start <= line * LINE_BYTES && (line + 1) * LINE_BYTES <= bytes.end
}

/// A line as far as one host's instructions have brought it.
#[derive(Default)]
struct LineState {
    is_flushed: bool,
    /// A load sees what the memory held at some time after the operation began.
    is_fresh: bool,
    /// A store waits in a cache until something flushes it.
    is_dirty: bool,
    /// Something under way to the memory that no fence has ordered.
    is_under_way: bool,
    /// A load that no fence has completed.
    is_loading: bool,
    /// Bytes that were stored past the caches.
    passed: u64,
    /// Eight-byte words that were stored through the caches, in order, and what they were then.
    words: Vec<(usize, u64)>,
}

/// Whether the instructions of an operation, the fence at its end included, do what is demanded; else what is wrong.
pub fn check(events: &[Event], demands: &Demands) -> Result<(), String> {
    let mut lines: BTreeMap<usize, LineState> = BTreeMap::new();
    let mut flushes: BTreeMap<usize, usize> = BTreeMap::new();
    // Whether a full fence has been, and whether nothing came behind it.
    let (mut is_fenced, mut is_complete) = (false, false);
    for (place, event) in events.iter().enumerate() {
        (is_fenced, is_complete) = match event.step {
            Step::FullFence => (true, true),
            Step::StoreFence | Step::LoadFence => (is_fenced, is_complete),
            _ => (is_fenced, false),
        };
        let line = lines.entry(event.line()).or_default();
        let wrong = |what: &str| Err(format!("event {place}, {:?} at {:#x}: {what}", event.step, event.at));
        let may_store = || demands.stores.iter().any(|bytes| bytes.contains(&event.at));
        match event.step {
            Step::Load => {
                line.is_loading = true;
                if let Some(bytes) = demands.loads.iter().find(|bytes| bytes.contains(&event.at)) {
                    if !is_fenced {
                        return wrong("I3: a load that may run ahead of what this host published before");
                    }
                    // How much is loaded is not known: a word, if the range goes on.
                    let touched = lines_of(&(event.at..(event.at + 8).min(bytes.end)));
                    if !demands.is_coherent && touched.into_iter().any(|line| !lines.get(&line).is_some_and(|line| line.is_fresh)) {
                        return wrong("I3: a load of what a cache held before");
                    }
                }
            }
            Step::Flush | Step::Clean => {
                *flushes.entry(event.line()).or_default() += 1;
                if line.is_loading {
                    return wrong("I3: a flush that may run ahead of an earlier load of its line");
                }
                (line.is_under_way, line.is_dirty) = (true, false);
                line.is_flushed |= event.step == Step::Flush;
            }
            Step::Past(len) => {
                if !may_store() || !event.at.is_multiple_of(len) {
                    return wrong("a store beside its bytes");
                }
                let bits = (u64::MAX >> (LINE_BYTES - len)) << (event.at % LINE_BYTES);
                line.passed |= bits;
                line.is_under_way = true;
            }
            Step::Store => {
                if !may_store() {
                    return wrong("a store beside its bytes");
                }
                let is_whole = demands.stores.iter().any(|bytes| holds_line(bytes, event.line()));
                if !is_whole && !demands.is_coherent && !line.is_fresh {
                    return wrong("I1: a write-back of this line would carry along what a cache held before");
                }
                line.words.push((event.at % LINE_BYTES, event.word));
                line.is_dirty = true;
            }
            Step::StoreFence => lines.values_mut().for_each(|line| line.is_under_way = false),
            Step::FullFence => lines.values_mut().for_each(|line| {
                (line.is_under_way, line.is_loading) = (false, false);
                line.is_fresh |= line.is_flushed;
            }),
            Step::LoadFence => lines.values_mut().for_each(|line| line.is_loading = false),
        }
    }
    if demands.is_completed && !is_complete {
        return Err("no full fence behind the last step".into());
    }
    at_end(&lines, demands)?;
    if flushes != demands.flushes {
        return Err(format!("lines flushed, and how often: {flushes:?}, demanded {:?}", demands.flushes));
    }
    Ok(())
}

/// What holds behind the last instruction.
fn at_end(lines: &BTreeMap<usize, LineState>, demands: &Demands) -> Result<(), String> {
    for (number, line) in lines {
        if line.is_dirty && !demands.is_coherent {
            return Err(format!("I2: what was stored to line {number} stays in a cache"));
        }
        if line.is_under_way {
            return Err(format!("I2, I4: no fence behind what is on its way to line {number}"));
        }
        if line.is_loading {
            return Err(format!("I3: no fence behind a load of line {number}"));
        }
        if line.passed != 0 && line.passed != u64::MAX {
            return Err(format!("line {number} is written past the caches in part"));
        }
    }
    let untouched = |line: &usize, what: fn(&LineState) -> bool| !lines.get(line).is_some_and(what);
    let stored = |line: &LineState| line.passed != 0 || !line.words.is_empty();
    if let Some(line) = demands.stores.iter().flat_map(lines_of).find(|line| untouched(line, stored)) {
        return Err(format!("nothing was stored to line {line}"));
    }
    Ok(())
}

/// Whether a metadata line was written so that no part of it verifies: past the caches at once, or by words, of which the first makes the
/// checksum wrong and the last right.
pub fn check_line_write(events: &[Event], line: usize, content: &[u8]) -> Result<(), String> {
    let of_line: Vec<&Event> = events.iter().filter(|event| event.line() == line).collect();
    let past: Vec<&&Event> = of_line.iter().filter(|event| matches!(event.step, Step::Past(_))).collect();
    let words: Vec<&&Event> = of_line.iter().filter(|event| event.step == Step::Store).collect();
    match (&past[..], &words[..]) {
        ([one], []) if one.step == Step::Past(LINE_BYTES) => Ok(()),
        ([], [first, .., last]) => {
            let right = u64::from_ne_bytes(content[..8].try_into().unwrap());
            let places: Vec<usize> = words.iter().map(|event| event.at % LINE_BYTES).collect();
            if places != [0, 56, 48, 40, 32, 24, 16, 8, 0] {
                Err(format!("words are stored in the order {places:?}"))
            } else if first.word as u32 == right as u32 || last.word != right {
                Err("the checksum is right before the line is".into())
            } else {
                Ok(())
            }
        }
        other => Err(format!("a line is no unit: {other:?}")),
    }
}
