// SPDX-License-Identifier: Apache-2.0

use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn is_the_crc32c_of_region_index_and_line(seed: u32, region: u32, index: u64, low: [u8; 32], high: [u8; 32]) {
        let mut line = Line::ZERO;
        line.0[..32].copy_from_slice(&low);
        line.0[32..].copy_from_slice(&high);
        let bytes = [&region.to_le_bytes()[..], &index.to_le_bytes(), &line.0[4..]].concat();
        prop_assert_eq!(line_crc(seed, region, index, &bytemuck::cast(line)), crc32c::crc32c_append(seed, &bytes));
    }

    #[test]
    fn of_many_lines_those_in_their_place_are_whole(seed: u32, region: u32, first: u32, whole: u64, count in 0_usize..70) {
        let indexes: Vec<u64> = (0..count as u64).map(|place| u64::from(first) << 8 | place).collect();
        let line = |&index: &u64| {
            let mut words: [u64; 8] = std::array::from_fn(|word| index.wrapping_mul(0x9e37_79b9_7f4a_7c15) << word);
            let is_whole = whole >> (index % 64) & 1 == 1;
            words[0] = words[0] & !0xffff_ffff | u64::from(line_crc(seed, region, index + u64::from(!is_whole), &words));
            bytemuck::cast(words)
        };
        let lines: Vec<Line> = indexes.iter().map(line).collect();
        let expected = indexes.iter().take(64).enumerate().fold(0, |mask, (place, index)| mask | (whole >> (index % 64) & 1) << place);
        prop_assert_eq!(whole_lines(seed, region, &indexes, &lines), expected);
    }
}
