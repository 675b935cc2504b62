// SPDX-License-Identifier: Apache-2.0
//! [`Coherence`] of a simulated host, and of the inspector who looks at the memory itself.

use crate::engine::{gone, step, suspend, unwinding, with};
use crate::memory::Bytes;
use crate::queue::What;
use crate::trace::Op;
use cxl_pool::coherence::Coherence;
use cxl_pool::line::Line;
use cxl_pool::{Error, Result};
use std::ptr::NonNull;

/// Pool memory as one process of one simulated host sees it.
pub(crate) struct SimMemory {
    pub(crate) process: usize,
    pub(crate) len_bytes: u64,
}

/// Pool memory itself, without caches and without time passing: for formatting and for inspection after a run.
pub(crate) struct RawMemory {
    pub(crate) len_bytes: u64,
}

fn check(len_bytes: u64, offset: u64, count: u64) -> Result<()> {
    match offset.checked_add(count) {
        Some(end) if end <= len_bytes => Ok(()),
        _ => Err(Error::OutOfRange { what: "simulated pool", offset, len_bytes: count, limit_bytes: len_bytes }),
    }
}

fn check_line(len_bytes: u64, offset: u64) -> Result<u32> {
    check(len_bytes, offset, 64)?;
    if !offset.is_multiple_of(64) {
        return Err(Error::Invalid(format!("offset {offset:#x} is not that of a line")));
    }
    Ok((offset / 64) as u32)
}

/// The pieces of a range that lie in one line each: (line, first byte in the line, bytes, first byte in the range).
fn pieces(offset: u64, len_bytes: usize) -> impl Iterator<Item = (u32, usize, usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        (done < len_bytes).then(|| {
            let at = offset + done as u64;
            let from = (at % 64) as usize;
            let len = (64 - from).min(len_bytes - done);
            let piece = ((at / 64) as u32, from, len, done);
            done += len;
            piece
        })
    })
}

fn value(bytes: &Bytes) -> u64 {
    bytes[4..12].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

impl SimMemory {
    fn load(&self, line: u32, op: Op) -> Bytes {
        with(|engine| {
            let thread = engine.running();
            let keep = !engine.random.one_in(engine.mood.unkept_one_in);
            let bytes = engine.memory.load(thread, line, keep);
            engine.memory.touch(line);
            engine.record(op, u64::from(line) * 64, value(&bytes), None);
            bytes
        })
    }

    /// A load of a line that other things may come between: two halves, which need not be of one version.
    fn load_split(&self, line: u32, op: Op) -> Result<Bytes> {
        let mut bytes = self.load(line, op);
        if with(|engine| engine.random.one_in(engine.mood.split_one_in)) {
            step(self.process)?;
            bytes[32..].copy_from_slice(&self.load(line, op)[32..]);
        }
        Ok(bytes)
    }

    fn issue(&self, line: u32, from: usize, len: usize, bytes: Bytes, op: Op) {
        with(|engine| {
            let thread = engine.running();
            engine.memory.touch(line);
            engine.record(op, u64::from(line) * 64, value(&bytes), None);
            let queue = engine.memory.queue_mut(thread);
            if engine.mood.stores_and_flush {
                // The word with the CRC comes last, and wrong ahead of all others, as in the production code.
                if op == Op::Write {
                    let mut wrong = bytes;
                    wrong[..4].iter_mut().for_each(|byte| *byte ^= 0xff);
                    queue.push(line, What::Store { from: 0, len: 8, bytes: wrong });
                }
                for start in (from..from + len).step_by(8).rev() {
                    let count = (from + len - start).min(8);
                    queue.push(line, What::Store { from: start as u8, len: count as u8, bytes });
                }
                queue.push_flush(line);
            } else {
                queue.push(line, What::Write { from: from as u8, len: len as u8, bytes });
            }
            // A CPU has few write-combining buffers and a short store buffer.
            while engine.memory.queue(thread).len() > engine.mood.queue_entries {
                engine.memory.drain(thread, &mut engine.random);
            }
        });
    }

    /// Ordinary stores of up to 8 bytes each, in order, into this host's cache.
    pub(crate) fn store(&self, offset: u64, source: &[u8]) -> Result<()> {
        check(self.len_bytes, offset, source.len() as u64)?;
        for (line, from, len, done) in pieces(offset, source.len()) {
            step(self.process)?;
            let mut bytes = [0; 64];
            bytes[from..from + len].copy_from_slice(&source[done..done + len]);
            with(|engine| {
                let thread = engine.running();
                engine.memory.touch(line);
                engine.record(Op::Store, u64::from(line) * 64, value(&bytes), None);
                let (mut at, end) = (from, from + len);
                while at < end {
                    let count = (8 - at % 8).min(end - at);
                    engine.memory.queue_mut(thread).push(line, What::Store { from: at as u8, len: count as u8, bytes });
                    at += count;
                }
                while engine.memory.queue(thread).len() > engine.mood.queue_entries {
                    engine.memory.drain(thread, &mut engine.random);
                }
            });
        }
        Ok(())
    }

    fn flush(&self, line: u32) {
        with(|engine| {
            let thread = engine.running();
            engine.memory.queue_mut(thread).push_flush(line);
            engine.memory.touch(line);
            engine.record(Op::Flush, u64::from(line) * 64, 0, None);
        });
    }
}

impl Coherence for SimMemory {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn load_line(&self, offset: u64) -> Result<Line> {
        let line = check_line(self.len_bytes, offset)?;
        step(self.process)?;
        Ok(Line(self.load_split(line, Op::Load)?))
    }

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        let at = check_line(self.len_bytes, offset)?;
        step(self.process)?;
        self.issue(at, 0, 64, line.0, Op::Write);
        Ok(())
    }

    fn flush_line(&self, offset: u64) -> Result<()> {
        let line = check_line(self.len_bytes, offset)?;
        step(self.process)?;
        self.flush(line);
        Ok(())
    }

    fn fence_stores(&self) {
        if step(self.process).is_ok() {
            with(|engine| {
                let thread = engine.running();
                engine.memory.queue_mut(thread).push_fence();
                engine.record(Op::FenceStores, 0, 0, None);
            });
        }
    }

    fn fence_all(&self) {
        if step(self.process).is_err() {
            return;
        }
        // The fence waits until everything has taken effect, one by one, and others continue meanwhile.
        loop {
            let (more, switch) = with(|engine| {
                let thread = engine.running();
                let more = engine.memory.drain(thread, &mut engine.random);
                (more, more && engine.random.one_in(4))
            });
            if !more {
                break;
            }
            if switch {
                suspend();
            }
        }
        with(|engine| {
            let thread = engine.running();
            let moment = engine.memory.moment();
            engine.memory.queue_mut(thread).fence_loads(moment);
            engine.record(Op::FenceAll, 0, 0, None);
        });
    }

    fn fence_loads(&self) {
        if step(self.process).is_ok() {
            with(|engine| {
                let thread = engine.running();
                let moment = engine.memory.moment();
                engine.memory.queue_mut(thread).fence_loads(moment);
                engine.record(Op::FenceLoads, 0, 0, None);
            });
        }
    }

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        check(self.len_bytes, offset, len_bytes)?;
        for (line, ..) in pieces(offset, len_bytes as usize) {
            step(self.process)?;
            self.flush(line);
        }
        Ok(())
    }

    fn prefetch_lines(&self, offsets: &[u64]) -> Result<()> {
        for &offset in offsets {
            let line = check_line(self.len_bytes, offset)?;
            step(self.process)?;
            with(|engine| {
                let thread = engine.running();
                engine.memory.prefetch(thread, line);
                engine.memory.touch(line);
                engine.record(Op::Prefetch, u64::from(line) * 64, 0, None);
            });
        }
        Ok(())
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        check(self.len_bytes, offset, source.len() as u64)?;
        for (line, from, len, done) in pieces(offset, source.len()) {
            step(self.process)?;
            let mut bytes = [0; 64];
            bytes[from..from + len].copy_from_slice(&source[done..done + len]);
            self.issue(line, from, len, bytes, Op::CopyIn);
        }
        Ok(())
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        check(self.len_bytes, offset, destination.len() as u64)?;
        for (line, from, len, done) in pieces(offset, destination.len()) {
            step(self.process)?;
            let bytes = self.load_split(line, Op::CopyOut)?;
            destination[done..done + len].copy_from_slice(&bytes[from..from + len]);
        }
        Ok(())
    }

    fn address(&self, _offset: u64, _len_bytes: u64) -> Option<NonNull<u8>> {
        None
    }
}

impl Coherence for RawMemory {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn load_line(&self, offset: u64) -> Result<Line> {
        let line = check_line(self.len_bytes, offset)?;
        Ok(Line(with(|engine| *engine.memory.raw(line))))
    }

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        let at = check_line(self.len_bytes, offset)?;
        if unwinding() {
            return Err(gone());
        }
        with(|engine| engine.memory.set_raw(at, &line.0));
        Ok(())
    }

    fn flush_line(&self, offset: u64) -> Result<()> {
        check_line(self.len_bytes, offset).map(drop)
    }

    fn fence_stores(&self) {}

    fn fence_all(&self) {}

    fn fence_loads(&self) {}

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        check(self.len_bytes, offset, len_bytes)
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        check(self.len_bytes, offset, source.len() as u64)?;
        for (line, from, len, done) in pieces(offset, source.len()) {
            with(|engine| {
                let mut bytes = *engine.memory.raw(line);
                bytes[from..from + len].copy_from_slice(&source[done..done + len]);
                engine.memory.set_raw(line, &bytes);
            });
        }
        Ok(())
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        check(self.len_bytes, offset, destination.len() as u64)?;
        for (line, from, len, done) in pieces(offset, destination.len()) {
            with(|engine| destination[done..done + len].copy_from_slice(&engine.memory.raw(line)[from..from + len]));
        }
        Ok(())
    }

    fn address(&self, _offset: u64, _len_bytes: u64) -> Option<NonNull<u8>> {
        None
    }
}
