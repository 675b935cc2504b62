// SPDX-License-Identifier: Apache-2.0
//! Every instruction that this CPU has, on real memory: the right bytes in the right place and nowhere else.

use crate::support::{MIB, map_new, pattern};
use cxl_pool::Error;
use cxl_pool::coherence::*;
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Line;
use std::sync::Arc;

/// Every choice of every role, one at a time, in both coherence modes.
pub fn variants() -> Vec<(Instructions, bool)> {
    let best = Instructions::best().unwrap();
    let mut all = vec![best];
    all.extend(LineWrite::available().into_iter().map(|write| Instructions { write, ..best }));
    all.extend(LineFlush::available().into_iter().map(|flush| Instructions { flush, write: LineWrite::StoresFlush, ..best }));
    all.extend(LineFlush::available().into_iter().map(|range| Instructions { range, ..best }));
    all.extend(LineCopy::available().into_iter().map(|copy| Instructions { copy, ..best }));
    all.extend(LineLoad::available().into_iter().map(|load| Instructions { load, ..best }));
    all.into_iter().flat_map(|instructions| [(instructions, false), (instructions, true)]).collect()
}

pub fn native(instructions: Instructions, hardware: bool, len_bytes: u64) -> Native {
    Native::new(Arc::new(FaultMap::new(map_new(len_bytes)).unwrap()), instructions, hardware).unwrap()
}

fn contents(memory: &dyn Coherence) -> Vec<u8> {
    let mut bytes = vec![0; memory.len_bytes() as usize];
    memory.copy_out(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn every_role_has_a_choice() {
    assert!(!LineWrite::available().is_empty() && !LineFlush::available().is_empty());
    assert!(!LineCopy::available().is_empty() && !LineLoad::available().is_empty());
}

#[test]
fn lines_come_back_as_written() {
    for (instructions, hardware) in variants() {
        let memory = native(instructions, hardware, MIB);
        let mut expected = vec![0; MIB as usize];
        let last = MIB - LINE_BYTES as u64;
        for (seed, offset) in [0, 64, 4096, 4096 + 192, last].into_iter().enumerate() {
            let line = Line(pattern(seed as u64, LINE_BYTES).try_into().unwrap());
            memory.write_line(offset, &line).unwrap();
            memory.fence_stores();
            memory.flush_line(offset).unwrap();
            memory.fence_all();
            assert_eq!(memory.load_line(offset).unwrap(), line, "{instructions} {hardware}");
            memory.fence_loads();
            expected[offset as usize..offset as usize + LINE_BYTES].copy_from_slice(&line.0);
        }
        memory.flush_range(0, MIB).unwrap();
        memory.fence_all();
        assert!(contents(&memory) == expected, "{instructions} {hardware}: bytes outside the lines changed");
    }
}

#[test]
fn copies_of_every_head_and_tail_change_their_range_only() {
    for (instructions, hardware) in variants() {
        let memory = native(instructions, hardware, MIB);
        let mut expected = pattern(1000, 1024);
        memory.copy_in(0, &expected).unwrap();
        let mut seed = 0;
        for head in (0..130).step_by(3).chain([63, 64, 65]) {
            for len in (0..200).chain([256, 320, 511]) {
                seed += 1;
                // The source is unaligned as well, differently each time.
                let source = &pattern(seed, len + 64)[seed as usize % 64..][..len];
                memory.copy_in(head as u64, source).unwrap();
                memory.fence_stores();
                expected[head..head + len].copy_from_slice(source);
                let mut bytes = vec![0; 1024];
                memory.flush_range(head as u64, len as u64).unwrap();
                memory.fence_all();
                memory.copy_out(0, &mut bytes).unwrap();
                assert!(bytes == expected, "{instructions} {hardware}: {len} bytes at {head}");
                let mut part = vec![0; len];
                memory.copy_out(head as u64, &mut part).unwrap();
                assert!(part == source);
            }
        }
    }
}

#[test]
fn streams_of_every_length_deliver_all_of_their_range_and_nothing_else() {
    const AROUND: usize = 4096;
    for copy in LineCopy::available() {
        let memory = native(Instructions { copy, ..Instructions::best().unwrap() }, false, MIB);
        let source = pattern(7, MIB as usize);
        memory.copy_in(0, &source).unwrap();
        memory.fence_stores();
        let mut local = vec![0xa5; MIB as usize + 2 * AROUND];
        // Around the length from which on several stretches are copied side by side, and lengths that do not divide by their number.
        let lines = [0, 1, 63, 1023, 1024, 1025, 1027, 1039, 4099, 16_383].map(|lines| lines * LINE_BYTES);
        for len in lines.into_iter().flat_map(|len| [len, len + 1, len + 63]).filter(|&len| len + 200 <= MIB as usize) {
            for (at, offset) in [(AROUND, 0), (AROUND, 64), (AROUND + 1, 0), (AROUND + 40, 100), (AROUND + 63, 7)] {
                local.fill(0xa5);
                memory.copy_out_streaming(offset as u64, &mut local[at..at + len]).unwrap();
                memory.fence_all();
                assert!(local[at..at + len] == source[offset..offset + len], "{copy:?}: {len} bytes from {offset} to {at}");
                let rest = local[..at].iter().chain(&local[at + len..]);
                assert!(rest.into_iter().all(|&byte| byte == 0xa5), "{copy:?}: more than {len} bytes were written");
            }
        }
    }
}

#[test]
fn ranges_outside_are_refused_and_change_nothing() {
    for emulator in [None, Some(EmulatorOptions::default())] {
        let pool = over_mapping(map_new(MIB), &CoherenceOptions { emulator, ..CoherenceOptions::default() }).unwrap();
        let memory = pool.memory;
        let outside = |result: cxl_pool::Result<()>| assert!(matches!(result, Err(Error::OutOfRange { .. })), "{result:?}");
        for (offset, len) in [(MIB, 1), (MIB - 1, 2), (MIB + 64, 0), (u64::MAX, 1), (u64::MAX - 63, 64), (u64::MAX, 2), (1, MIB as usize)] {
            outside(memory.copy_in(offset, &vec![7; len]));
            outside(memory.copy_out(offset, &mut vec![7; len]));
            outside(memory.flush_range(offset, len as u64));
            assert!(memory.address(offset, len as u64).is_none());
        }
        outside(memory.flush_range(0, u64::MAX));
        for offset in [MIB, u64::MAX - 63, 1 << 63] {
            outside(memory.load_line(offset).map(drop));
            outside(memory.write_line(offset, &Line::ZERO));
            outside(memory.flush_line(offset));
            outside(memory.load_lines(&[0, offset, 64], &mut [Line::ZERO; 3]));
            outside(memory.flush_lines(&[0, offset, 64]));
            outside(memory.prefetch_lines(&[0, offset, 64]));
        }
        for offset in [1, 32, MIB - 1] {
            assert!(matches!(memory.load_line(offset), Err(Error::Invalid(_))));
            assert!(matches!(memory.write_line(offset, &Line([1; 64])), Err(Error::Invalid(_))));
            assert!(matches!(memory.flush_line(offset), Err(Error::Invalid(_))));
            assert!(matches!(memory.load_lines(&[0, offset, 64], &mut [Line::ZERO; 3]), Err(Error::Invalid(_))));
            assert!(matches!(memory.prefetch_lines(&[0, offset, 64]), Err(Error::Invalid(_))));
        }
        assert_eq!(contents(&*memory), vec![0; MIB as usize]);
        memory.copy_in(MIB, &[]).unwrap();
        memory.copy_in(MIB - 3, &[1, 2, 3]).unwrap();
        assert!(memory.address(0, MIB).is_some());
    }
}

#[test]
fn instructions_of_other_cpus_are_refused() {
    let missing = if cfg!(target_arch = "x86_64") { LineFlush::DcCivac } else { LineFlush::Clflush };
    let instructions = Some(Instructions { flush: missing, ..Instructions::best().unwrap() });
    let options = CoherenceOptions { instructions, ..CoherenceOptions::default() };
    assert!(matches!(over_mapping(map_new(MIB), &options), Err(Error::Invalid(_))));
}

#[test]
fn contradictory_mappings_are_refused() {
    let refused = |change: fn(&mut Mapping)| {
        let mut mapping = map_new(MIB);
        change(&mut mapping);
        assert!(matches!(FaultMap::new(mapping), Err(Error::Invalid(_))));
    };
    refused(|mapping| mapping.len_bytes = 0);
    refused(|mapping| mapping.len_bytes += 1);
    refused(|mapping| mapping.len_bytes += 4096);
    refused(|mapping| mapping.len_bytes = u64::MAX - 4095);
    refused(|mapping| mapping.devices.clear());
    refused(|mapping| mapping.segments.clear());
    refused(|mapping| mapping.segments[0].device = 1);
    refused(|mapping| mapping.segments[0].start = 4096);
    refused(|mapping| mapping.segments[0].len_bytes = u64::MAX - 4095);
    refused(|mapping| mapping.segments[0].len_bytes -= 1);
    refused(|mapping| mapping.segments.push(Segment { start: MIB, len_bytes: 4096, device: 0 }));
    // SAFETY: the address is never used.
    refused(|mapping| mapping.base = unsafe { mapping.base.add(64) });
    assert!(FaultMap::new(map_new(MIB)).is_ok());
}
