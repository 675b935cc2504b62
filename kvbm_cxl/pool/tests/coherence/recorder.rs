// SPDX-License-Identifier: Apache-2.0
//! Records which instructions reach the pool: the shipped code runs unchanged, one instruction at a time.
//!
//! The processor traps after every instruction (flag TF), which shows the fences. The watched memory may not be touched, so that every
//! flush, load and store of it faults once, which shows its address; the handler then lets that one instruction through. Any one of the
//! recorded instructions can be left out: that is a mutant of the program in which this instruction was forgotten.

use cxl_pool::limits::LINE_BYTES;
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::ptr::{null_mut, slice_from_raw_parts};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, Once, PoisonError};

/// What an instruction does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// SFENCE.
    StoreFence,
    /// MFENCE.
    FullFence,
    /// LFENCE.
    LoadFence,
    /// CLFLUSH or CLFLUSHOPT: written back and dropped.
    Flush,
    /// CLWB: written back.
    Clean,
    /// A store of this many bytes past the caches, or MOVDIR64B.
    Past(usize),
    /// Any other store.
    Store,
    /// Any load.
    Load,
}

impl Step {
    pub fn is_fence(self) -> bool {
        matches!(self, Step::StoreFence | Step::FullFence | Step::LoadFence)
    }
}

/// One instruction that was executed.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    pub step: Step,
    /// Offset of the first byte in the watched memory; 0 for fences.
    pub at: usize,
    /// Of a store: the eight bytes around its first one, afterwards.
    pub word: u64,
    /// Its number among those that [`record`] can leave out.
    pub number: Option<usize>,
}

impl Event {
    pub fn line(&self) -> usize {
        self.at / LINE_BYTES
    }
}

const MOST_EVENTS: usize = 1 << 16;
/// Longest instruction, in bytes.
const MOST_CODE_BYTES: usize = 15;
const TRAP_FLAG: i64 = 0x100;
/// Bit of the error code of a page fault that tells a store.
const WROTE: i64 = 2;

struct Recorder {
    start: *mut u8,
    len_bytes: usize,
    skipped: Option<usize>,
    numbers: usize,
    /// Whether the watched memory may be touched: until the next trap.
    is_open: bool,
    /// Whether the last event is a store whose outcome is still to be looked at.
    is_storing: bool,
    events: Vec<Event>,
}

static CURRENT: AtomicPtr<Recorder> = AtomicPtr::new(null_mut());
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
static HANDLERS: Once = Once::new();

/// Runs `work` and gives what it returned and the instructions of this thread that reached the watched memory, and all fences. The
/// instruction with the number `skipped` is not executed.
pub fn record<T>(watched: (*mut u8, usize), skipped: Option<usize>, work: impl FnOnce() -> T) -> (T, Vec<Event>) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    HANDLERS.call_once(|| {
        for (signal, handler) in [(libc::SIGTRAP, on_trap as *const ()), (libc::SIGSEGV, on_fault as *const ())] {
            // SAFETY: handlers of this signature, which only touch what `CURRENT` points to.
            unsafe {
                let mut action: libc::sigaction = zeroed();
                action.sa_sigaction = handler as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                assert_eq!(libc::sigaction(signal, &action, null_mut()), 0);
            }
        }
    });
    let mut recorder = Box::new(Recorder {
        start: watched.0,
        len_bytes: watched.1,
        skipped,
        numbers: 0,
        is_open: false,
        is_storing: false,
        events: Vec::with_capacity(MOST_EVENTS),
    });
    recorder.open(false);
    CURRENT.store(&raw mut *recorder, Ordering::SeqCst);
    let ending = Ending;
    // SAFETY: sets the trap flag of this thread, whose traps go to `on_trap`; the stack is as before.
    unsafe { std::arch::asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq") };
    let result = work();
    drop(ending);
    recorder.open(true);
    assert!(recorder.events.len() < MOST_EVENTS, "more events than a recording holds");
    (result, recorder.events)
}

/// Ends a recording, also where the work panics.
struct Ending;

impl Drop for Ending {
    fn drop(&mut self) {
        // SAFETY: clears the trap flag.
        unsafe { std::arch::asm!("pushfq", "and qword ptr [rsp], -257", "popfq") };
        CURRENT.store(null_mut(), Ordering::SeqCst);
    }
}

impl Recorder {
    fn open(&mut self, opens: bool) {
        let protection = if opens { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        // SAFETY: memory of the test, mapped for as long as the recording lasts.
        if unsafe { libc::mprotect(self.start.cast(), self.len_bytes, protection) } != 0 {
            std::process::abort();
        }
        self.is_open = opens;
    }

    /// Notes an instruction, and says whether it is to be left out.
    fn note(&mut self, step: Step, at: usize, can_be_skipped: bool) -> bool {
        let number = can_be_skipped.then_some(self.numbers);
        self.numbers += usize::from(can_be_skipped);
        let skips = number.is_some() && number == self.skipped;
        // The room was reserved: a handler must not allocate.
        if !skips && self.events.len() < MOST_EVENTS {
            self.events.push(Event { step, at, word: 0, number });
        }
        skips
    }

    /// Notes the fences that come next. Each that is left out is followed by another instruction that must be looked at.
    fn note_fences(&mut self, context: &mut libc::ucontext_t) {
        while let Some((step, len)) = decode(context).filter(|(step, _)| step.is_fence()) {
            if !self.note(step, 0, true) {
                break;
            }
            context.uc_mcontext.gregs[libc::REG_RIP as usize] += len as i64;
        }
    }
}

extern "C" fn on_trap(_signal: c_int, _info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the recorder lives until the flag is cleared, and the traps of its thread are the only use of it; the kernel gives a context.
    let (recorder, context) = unsafe { (CURRENT.load(Ordering::Relaxed).as_mut(), &mut *context.cast::<libc::ucontext_t>()) };
    let Some(recorder) = recorder else {
        context.uc_mcontext.gregs[libc::REG_EFL as usize] &= !TRAP_FLAG;
        return;
    };
    if recorder.is_open {
        if recorder.is_storing
            && let Some(last) = recorder.events.last_mut()
        {
            // SAFETY: eight bytes of the watched memory, which may be read now.
            last.word = unsafe { recorder.start.add(last.at & !7).cast::<u64>().read_volatile() };
        }
        recorder.is_storing = false;
        recorder.open(false);
    }
    recorder.note_fences(context);
}

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: as in `on_trap`.
    let (recorder, context) = unsafe { (CURRENT.load(Ordering::Relaxed).as_mut(), &mut *context.cast::<libc::ucontext_t>()) };
    // SAFETY: the kernel gives the information of a fault.
    let address = unsafe { (*info).si_addr() } as usize;
    let found = recorder.and_then(|recorder| {
        let at = address.checked_sub(recorder.start.addr()).filter(|&at| at < recorder.len_bytes && !recorder.is_open)?;
        Some((recorder, at))
    });
    let Some((recorder, at)) = found else {
        // A fault of the program itself: it happens again and ends the process.
        // SAFETY: the default action.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    };
    let decoded = decode(context);
    let wrote = context.uc_mcontext.gregs[libc::REG_ERR as usize] & WROTE != 0;
    let step = decoded.map_or(if wrote { Step::Store } else { Step::Load }, |(step, _)| step);
    if let (true, Some((_, len))) = (recorder.note(step, at, decoded.is_some()), decoded) {
        context.uc_mcontext.gregs[libc::REG_RIP as usize] += len as i64;
        recorder.note_fences(context);
        return;
    }
    recorder.is_storing = matches!(step, Step::Store | Step::Past(_));
    recorder.open(true);
}

/// The instruction that comes next, if it is one that can be left out, and its length in bytes.
fn decode(context: &libc::ucontext_t) -> Option<(Step, usize)> {
    let at = context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize as *const u8;
    // SAFETY: the program's code, behind which more of it lies.
    decode_bytes(unsafe { &*slice_from_raw_parts(at, MOST_CODE_BYTES) })
}

/// Intel SDM vol. 2, chapter 2: prefixes, opcode, ModR/M.
fn decode_bytes(code: &[u8]) -> Option<(Step, usize)> {
    let mut next = 0;
    let is_66 = *code.first()? == 0x66;
    next += usize::from(is_66);
    let rex = code.get(next).copied().filter(|byte| byte & 0xf0 == 0x40);
    next += usize::from(rex.is_some());
    // How a vector instruction is encoded: where its opcode is, and the bytes that it moves.
    let vector = match *code.get(next)? {
        0xc5 => Some((next + 2, 16 << (code.get(next + 1)? >> 2 & 1))),
        0xc4 => Some((next + 3, 16 << (code.get(next + 2)? >> 2 & 1))),
        0x62 => Some((next + 4, 16 << (code.get(next + 3)? >> 5 & 3))),
        _ => None,
    };
    let (step, modrm_at) = match (vector, *code.get(next)?) {
        (Some((at, len)), _) if matches!(code.get(at)?, 0xe7 | 0x2b) => (Step::Past(len), at + 1),
        (None, 0x89) => (Step::Store, next + 1),
        (None, 0x0f) => {
            let modrm = *code.get(next + 2)?;
            let (mode, extension) = (modrm >> 6, modrm >> 3 & 7);
            match (*code.get(next + 1)?, mode, extension) {
                (0xae, 3, 5) if !is_66 => return Some((Step::LoadFence, next + 3)),
                (0xae, 3, 6) if !is_66 => return Some((Step::FullFence, next + 3)),
                (0xae, 3, 7) if !is_66 => return Some((Step::StoreFence, next + 3)),
                (0xae, 0..=2, 7) => (Step::Flush, next + 2),
                (0xae, 0..=2, 6) if is_66 => (Step::Clean, next + 2),
                (0xe7, 0..=2, _) if is_66 => (Step::Past(16), next + 2),
                (0xc3, 0..=2, _) if !is_66 => (Step::Past(if rex? & 8 != 0 { 8 } else { 4 }), next + 2),
                (0x38, ..) if is_66 && *code.get(next + 2)? == 0xf8 => (Step::Past(LINE_BYTES), next + 3),
                _ => return None,
            }
        }
        _ => return None,
    };
    let modrm = *code.get(modrm_at)?;
    let (mode, register) = (modrm >> 6, modrm & 7);
    let has_sib = mode != 3 && register == 4;
    let base = if has_sib { *code.get(modrm_at + 1)? & 7 } else { register };
    let displacement = match mode {
        0 if base == 5 => 4,
        1 => 1,
        2 => 4,
        _ => 0,
    };
    (mode != 3).then_some((step, modrm_at + 1 + usize::from(has_sib) + displacement))
}

#[test]
fn instructions_are_told_apart_and_measured() {
    for (code, expected) in [
        (&[0x0f, 0xae, 0xf8][..], Some((Step::StoreFence, 3))),
        (&[0x0f, 0xae, 0xf0], Some((Step::FullFence, 3))),
        (&[0x0f, 0xae, 0xe8], Some((Step::LoadFence, 3))),
        (&[0x0f, 0xae, 0x3f], Some((Step::Flush, 3))),
        (&[0x41, 0x0f, 0xae, 0x3c, 0x24], Some((Step::Flush, 5))),
        (&[0x66, 0x0f, 0xae, 0x7f, 0x40], Some((Step::Flush, 5))),
        (&[0x66, 0x41, 0x0f, 0xae, 0xb5, 0, 1, 0, 0], Some((Step::Clean, 9))),
        (&[0x66, 0x0f, 0xe7, 0x04, 0x37], Some((Step::Past(16), 5))),
        (&[0xc5, 0xfd, 0xe7, 0x07], Some((Step::Past(32), 4))),
        (&[0x62, 0xf1, 0x7d, 0x48, 0xe7, 0x07], Some((Step::Past(64), 6))),
        (&[0x66, 0x0f, 0x38, 0xf8, 0x06], Some((Step::Past(64), 5))),
        (&[0x48, 0x89, 0x47, 0x08], Some((Step::Store, 4))),
        (&[0x48, 0x89, 0xc7], None),
        (&[0x0f, 0xae, 0x07], None),
        (&[0x48, 0x8b, 0x07], None),
    ] {
        let padded: Vec<u8> = code.iter().copied().chain([0x90; MOST_CODE_BYTES]).collect();
        assert_eq!(decode_bytes(&padded), expected, "{code:02x?}");
    }
}
