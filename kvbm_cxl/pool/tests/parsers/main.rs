// SPDX-License-Identifier: Apache-2.0
//! Runs what the fuzz targets run, over pseudo-random inputs, on the stable compiler and in seconds.

mod targets;

const INPUTS: u64 = 20_000;

/// xorshift64*: the same inputs on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Random bytes; one in four inputs is mostly zero, as media often is.
    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let sparse = self.below(4) == 0;
        (0..len).map(|_| if sparse && self.below(8) != 0 { 0 } else { self.next() as u8 }).collect()
    }
}

#[test]
fn superblock() {
    let mut random = Random(1);
    let good = targets::good_superblock().encode().to_vec();
    targets::superblock(&good);
    targets::superblock(targets::apart_superblock().encode());
    for input in 0..INPUTS {
        // Changes within the part that is in use, then anything at all.
        let mut changes = Vec::new();
        for _ in 0..random.below(4) {
            changes.extend_from_slice(&(random.below(1400) as u16 + if random.below(8) == 0 { 2000 } else { 0 }).to_le_bytes());
            changes.extend_from_slice(&random.bytes(8));
        }
        targets::superblock(&changes);
        if input % 8 == 0 {
            let len = random.below(2 * good.len());
            targets::superblock(&random.bytes(len));
        }
    }
}

#[test]
fn layout() {
    let mut random = Random(2);
    for _ in 0..INPUTS {
        let mut bytes = random.bytes(targets::LAYOUT_BYTES);
        // Half of the inputs have all numbers near their limits, and lengths of up to 2^46.
        if random.below(2) == 0 {
            bytes[20..24].copy_from_slice(&((18 + random.below(20) as u32) << 8).to_le_bytes());
        }
        targets::layout(&bytes);
    }
}

#[test]
fn lines() {
    let mut random = Random(3);
    for _ in 0..INPUTS {
        targets::lines(&random.bytes(targets::LINES_BYTES));
    }
}

#[test]
fn pool_spec() {
    const PARTS: [&str; 20] = [
        "/", "dev", "/dax", "0.0", ",", "size=", "1", "99", "G", "K", "iB", " ", "\0", "é", "=", "..", ",metadata=/m", "metadata_",
        "offset=", "2M",
    ];
    let mut random = Random(4);
    for _ in 0..INPUTS {
        let text: String = (0..random.below(14)).map(|_| PARTS[random.below(PARTS.len())]).collect();
        targets::pool_spec(text.as_bytes());
        let len = random.below(40);
        targets::pool_spec(&random.bytes(len));
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]
    /// Seal and open of every line structure: round trip, any single bit flip, another line number, region and pool.
    #[test]
    fn a_sealed_line_is_read_back_in_its_place_and_nowhere_else(words: [u64; 8], index: u64, other_index: u64) {
        targets::sealed_lines(words, index, other_index);
    }
}
