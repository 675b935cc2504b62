// SPDX-License-Identifier: Apache-2.0
//! The trial of kernels: before they move anything of a caller's, they move bytes of the engine's own.

use super::driver::{Address, SUCCESS};
use super::gpu::{Entered, Gpu};
use super::kernel::Kernels;
use super::lane::{Ended, Lane, Move};
use crate::copy::checksum_of;
use crate::error::{Error, Result};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the buffer on the host: the bytes that move to the GPU, and room for them on their way back.
const HOST_BYTES: usize = 32 << 10;
const GPU_BYTES: usize = HOST_BYTES / 2;
/// The list of each piece, where it begins in each half of the buffer, and how long it is: whole units and none, at several alignments.
/// Each list fills more than one chunk of a kernel, so that a checksum has all of its parts.
const PIECES: [(usize, usize, usize); 9] = [
    (0, 0, 1),
    (0, 64, 1024),
    (0, 1091, 333),
    (0, 1430, 17),
    (0, 1456, 2048),
    (1, 3600, 160),
    (1, 3777, 160),
    (1, 4000, 4096),
    (1, 8103, 1001),
];
/// How far the pieces lie from the same places on the GPU, so that loads and stores differ in alignment.
const SHIFTS: [usize; 2] = [0, 5];

fn pattern(index: usize) -> u8 {
    (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[1]
}

/// Has kernels move bytes of a buffer of the host to the GPU, and from there to the other half of the buffer. Every byte, and every byte
/// around them, has to be as a CPU would have left it, and every checksum that of the bytes.
///
/// # Errors
/// [`Error::Gpu`] that names the fault. Memory that a kernel may still use is never given back then.
pub(super) fn try_out(gpu: &Arc<Gpu>, kernels: &Arc<Kernels>, entered: &Entered<'_>, timeout_ms: u64) -> Result<()> {
    let mut lane = Lane::new(gpu, entered)?;
    let scratch = entered.allocate(GPU_BYTES)?;
    let tried = run(gpu, kernels, entered, &mut lane, scratch, timeout_ms);
    // Whatever was wrong, nothing is given back before the stream is known to be idle.
    if lane.drain(entered, Instant::now() + Duration::from_millis(timeout_ms)) == Ended::Late {
        std::mem::forget(lane);
        return Err(Error::Gpu { device: gpu.number(), what: format!("a trial of the kernels is not done within {timeout_ms} ms") });
    }
    // SAFETY: allocated above, and the stream has ended with it.
    unsafe { entered.free(scratch) };
    tried
}

fn run(gpu: &Gpu, kernels: &Arc<Kernels>, entered: &Entered<'_>, lane: &mut Lane, scratch: Address, timeout_ms: u64) -> Result<()> {
    let wrong = |what: String| Error::Gpu { device: gpu.number(), what: format!("trial of the kernels: {what}") };
    let buffer = lane.buffer(entered, 0, HOST_BYTES)?;
    let host = buffer.as_ptr().expose_provenance() as Address;
    let back = (HOST_BYTES / 2) as Address;
    for (shift, sums) in SHIFTS.into_iter().flat_map(|shift| [(shift, false), (shift, true)]) {
        // SAFETY: the buffer is as long, and no stream is at it: the lane has been waited for.
        let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr(), HOST_BYTES) };
        bytes.iter_mut().enumerate().for_each(|(index, byte)| *byte = if index < HOST_BYTES / 2 { pattern(index + shift) } else { 0xa5 });
        let mut checksums = Vec::new();
        for is_back in [false, true] {
            let to_move = |&(list, at, len_bytes): &(usize, usize, usize)| {
                let (on_host, on_gpu) = (host + at as Address, scratch + (at + shift) as Address);
                match is_back {
                    false => Move { list, destination: on_gpu, source: on_host, mapped: on_host, offset: 0, len_bytes },
                    true => Move { list, destination: on_host + back, source: on_gpu, mapped: on_host + back, offset: 0, len_bytes },
                }
            };
            let moves: Vec<Move> = PIECES.iter().map(to_move).collect();
            let slot = usize::from(is_back);
            // SAFETY: buffer and scratch are the trial's, which waits for the end.
            let code = unsafe { lane.launch(entered, slot, kernels, &moves, is_back, sums) }?;
            if code != SUCCESS {
                return Err(gpu.failed("launching a kernel", code));
            }
            lane.mark(entered, slot).map_err(|code| gpu.failed("recording an event", code))?;
            match lane.wait(entered, slot, Instant::now() + Duration::from_millis(timeout_ms)) {
                Ended::Done if sums => checksums.extend(lane.checksums(slot)),
                Ended::Done => {}
                Ended::Failed(code) => return Err(gpu.failed("running a kernel", code)),
                Ended::Late => return Err(wrong(format!("not done within {timeout_ms} ms"))),
            }
        }
        check(buffer, &checksums, sums).map_err(wrong)?;
    }
    Ok(())
}

/// Finds the first fault in the results.
fn check(buffer: NonNull<u8>, checksums: &[Option<u64>], sums: bool) -> std::result::Result<(), String> {
    // SAFETY: the buffer is as long, and its stream has ended.
    let bytes = unsafe { std::slice::from_raw_parts(buffer.as_ptr(), HOST_BYTES) };
    let (source, found) = bytes.split_at(HOST_BYTES / 2);
    let mut expected = [0xa5; HOST_BYTES / 2];
    let mut lists = [Vec::new(), Vec::new()];
    for (list, at, len_bytes) in PIECES {
        let piece = source.get(at..at + len_bytes).unwrap_or_default();
        if let (Some(place), Some(list)) = (expected.get_mut(at..at + len_bytes), lists.get_mut(list)) {
            place.copy_from_slice(piece);
            list.extend_from_slice(piece);
        }
    }
    if let Some(at) = (0..expected.len()).find(|&at| found.get(at) != expected.get(at)) {
        return Err(format!("byte {at} is {:?} instead of {:?}", found.get(at), expected.get(at)));
    }
    let right: Vec<Option<u64>> = lists.iter().chain(&lists).map(|list| Some(checksum_of(list))).collect();
    if sums && checksums != right {
        return Err(format!("the checksums are {checksums:x?} instead of {right:x?}"));
    }
    Ok(())
}
