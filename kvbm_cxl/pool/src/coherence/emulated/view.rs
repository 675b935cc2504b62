// SPDX-License-Identifier: Apache-2.0
//! The private view of one emulated host: what its cache holds of each line, and what of that is dirty.
//!
//! Three copies of every line: the *view*, which the host's plain loads and stores touch; the *twin*, the view's content when it last
//! agreed with the memory as far as this host knows; and the shared memory itself. A line is dirty where view and twin differ.

use crate::coherence::faultmap::FaultMap;
use crate::coherence::instructions::LineLoad;
use crate::coherence::{Line, arch};
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Looks at a line that other hosts write word by word before its last look counts. Only without 64-byte loads.
const STABLE_LOOKS: usize = 16;

struct Pages {
    start: NonNull<u8>,
    len_bytes: usize,
}

impl Pages {
    fn new(len_bytes: u64) -> Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let at = unsafe { libc::mmap(null_mut(), len_bytes as usize, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        match NonNull::new(at.cast::<u8>()) {
            Some(start) if at != libc::MAP_FAILED => Ok(Pages { start, len_bytes: len_bytes as usize }),
            _ => Err(Error::last_os("mapping an emulated host's view of the pool")),
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and no one else unmaps it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}

/// The three copies. The methods that take a line number are called with that line's lock held; the number lies in the pool.
pub(super) struct View {
    shared: Arc<FaultMap>,
    view: Pages,
    twin: Pages,
    load: LineLoad,
}

// SAFETY: the twin is touched under the line's lock only, the view through atomics or as the host's plain memory, and the shared memory
// by value.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    pub(super) fn keeps_lines_whole(&self) -> bool {
        self.load == LineLoad::Avx512
    }

    /// A view that holds the first `copy_bytes` of the memory as they are now, and zeros after them.
    pub(super) fn new(shared: Arc<FaultMap>, load: LineLoad, copy_bytes: u64) -> Result<Self> {
        let len_bytes = shared.len_bytes();
        let view = View { view: Pages::new(len_bytes)?, twin: Pages::new(len_bytes)?, shared, load };
        let copy_bytes = copy_bytes.min(len_bytes);
        view.shared.check(0, copy_bytes)?;
        for line in 0..copy_bytes / LINE_BYTES as u64 {
            let content = view.memory(line);
            // Lines of zeros stay unbacked.
            if content != Line::ZERO {
                view.set(line, &content);
            }
        }
        view.shared.leave(0, copy_bytes)?;
        Ok(view)
    }

    /// Where the host sees `offset`, which lies in the pool.
    pub(super) fn address(&self, offset: u64) -> *mut u8 {
        // SAFETY: the view is as long as the pool.
        unsafe { self.view.start.as_ptr().add(offset as usize) }
    }

    fn at(&self, line: u64) -> *mut u8 {
        self.address(line * LINE_BYTES as u64)
    }

    fn twin_at(&self, line: u64) -> *mut u8 {
        // SAFETY: the twin is as long as the pool.
        unsafe { self.twin.start.as_ptr().add(line as usize * LINE_BYTES) }
    }

    /// Where the memory itself has `offset`, which lies in the pool.
    pub(super) fn memory_address(&self, offset: u64) -> *mut u8 {
        // SAFETY: the mapping is as long as the pool.
        unsafe { self.shared.mapping().base.as_ptr().add(offset as usize) }
    }

    fn memory_at(&self, line: u64) -> *mut u8 {
        self.memory_address(line * LINE_BYTES as u64)
    }

    pub(super) fn get(&self, line: u64) -> Line {
        // SAFETY: a whole line of the view; `load` is available on this CPU.
        unsafe { arch::load_line(self.load, self.at(line)) }
    }

    pub(super) fn set(&self, line: u64, content: &Line) {
        // SAFETY: whole lines of view and twin.
        unsafe {
            arch::store_line(self.load, self.twin_at(line), content);
            arch::store_line(self.load, self.at(line), content);
        }
    }

    /// Writes the memory, whole line at once where the CPU can.
    pub(super) fn set_memory(&self, line: u64, content: &Line) {
        // SAFETY: a whole line of the shared mapping.
        unsafe { arch::store_line(self.load, self.memory_at(line), content) };
    }

    fn memory(&self, line: u64) -> Line {
        // SAFETY: a whole line of the shared mapping; the same below.
        let mut content = unsafe { arch::load_line(self.load, self.memory_at(line)) };
        if self.load == LineLoad::Words {
            // Without a 64-byte load a line that is just being written would be seen torn; two equal looks rarely are.
            for _ in 0..STABLE_LOOKS {
                // SAFETY: as above.
                let again = unsafe { arch::load_line(self.load, self.memory_at(line)) };
                if again == content {
                    break;
                }
                content = again;
            }
        }
        content
    }

    /// Writes the whole line to the memory if it is dirty, as a cache does.
    pub(super) fn write_back(&self, line: u64) {
        let content = self.get(line);
        // SAFETY: a whole line of the twin.
        if content != unsafe { arch::load_line(self.load, self.twin_at(line)) } {
            self.set_memory(line, &content);
            // SAFETY: as above.
            unsafe { arch::store_line(self.load, self.twin_at(line), &content) };
        }
    }

    /// Loads the line from the memory again. Words that this host stores to meanwhile keep its value and stay dirty.
    pub(super) fn refill(&self, line: u64) {
        let memory: [u64; 8] = bytemuck::cast(self.memory(line));
        // SAFETY: a whole line of the twin.
        let twin: [u64; 8] = bytemuck::cast(unsafe { arch::load_line(self.load, self.twin_at(line)) });
        for (index, (new, old)) in memory.into_iter().zip(twin).enumerate().filter(|(_, (new, old))| new != old) {
            // SAFETY: an aligned word of the twin, which only the holder of the line's lock touches; an aligned word of the view, which is
            // this process's private memory and lives as long as `self`.
            unsafe {
                self.twin_at(line).cast::<u64>().add(index).write(new);
                let word = AtomicU64::from_ptr(self.at(line).cast::<u64>().add(index));
                let _ = word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}
