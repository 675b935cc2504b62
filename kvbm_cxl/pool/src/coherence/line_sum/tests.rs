// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::copy::checksum_of;

fn add(sum: &mut LineSum, bytes: &[u8]) {
    let word = |bytes: &[u8], index: usize| u64::from_le_bytes(*bytes[index * 8..].first_chunk().unwrap());
    let mut rest = bytes.chunks_exact(LINE_BYTES);
    while rest.len() > 0 {
        let run = sum.next_run(rest.len());
        for (step, line) in rest.by_ref().take(run.lines).enumerate() {
            for index in 0..8 {
                let keyed = word(line, index) ^ word(&run.keys[step * 8..], index);
                sum.sums[index] = sum.sums[index].wrapping_add((keyed & 0xffff_ffff) * (keyed >> 32));
                sum.sums[index ^ 1] = sum.sums[index ^ 1].wrapping_add(word(line, index));
            }
        }
        if let Some(key) = run.scramble {
            for (index, sum) in sum.sums.iter_mut().enumerate() {
                *sum = (*sum ^ *sum >> 47 ^ word(key, index)).wrapping_mul(PRIME32_1);
            }
        }
    }
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at * at / 7 + at * 31) as u8).collect()
}

#[test]
fn it_is_xxh3_of_any_number_of_lines_however_they_come() {
    for lines in (4..70).chain([1023, 1024, 1025, 8192]) {
        let bytes = bytes(lines * LINE_BYTES);
        for step in [1, 3, 16, 17, lines] {
            let mut sum = LineSum::of(bytes.len() as u64).unwrap();
            assert_eq!(sum.finish(), None);
            bytes.chunks(step * LINE_BYTES).for_each(|part| add(&mut sum, part));
            assert_eq!(sum.finish(), Some(checksum_of(&bytes)), "{lines} lines by {step}");
        }
    }
}

#[test]
fn other_lengths_have_none_and_lines_too_many_end_it() {
    assert!([0, 1, 64, 192, 255, 257, 1000].into_iter().all(|len_bytes| LineSum::of(len_bytes).is_none()));
    let mut sum = LineSum::of(256).unwrap();
    add(&mut sum, &bytes(256 + 64));
    assert_eq!(sum.finish(), None);
}
