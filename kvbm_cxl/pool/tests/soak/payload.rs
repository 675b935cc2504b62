// SPDX-License-Identifier: Apache-2.0
//! What blocks are called and what is in them. Every 64-byte line tells its namespace, key and place, and the one publication that wrote
//! it, so that neither a line of another block nor one of another publication of the same block passes.

use cxl_pool::cache::{BlockKey, Namespace, NamespaceFields, Salt, chain};

/// Namespaces; each has blocks of every key.
pub const SPACES: usize = 3;
/// Chains of blocks.
pub const CHAINS: usize = 32;
/// Blocks of a chain.
pub const CHAIN_BLOCKS: usize = 40;
/// Sizes of the pool's cells, in bytes.
pub const CELL_BYTES: [u64; 2] = [4 << 10, 16 << 10];

/// Bit of a publication's number that says that it is given up before its commit: no reader may ever see it.
const ABORTED: u64 = 1;

fn mix(state: u64, word: u64) -> u64 {
    let product = u128::from(state ^ word) * u128::from(0x9e37_79b9_7f4a_7c15_u64);
    (product as u64 ^ (product >> 64) as u64).wrapping_add(0xd1b5_4a32_d192_ed03)
}

/// A sequence of numbers that a seed gives.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(mix(seed, 0x5eed) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0, self.0 >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }
}

/// The names of all blocks.
pub struct Names {
    pub spaces: Vec<Namespace>,
    pub chains: Vec<Vec<BlockKey>>,
}

impl Names {
    pub fn new() -> Self {
        let space = |number: usize| {
            let salt = Salt(vec![number as u8; 4]);
            NamespaceFields { model: "soak".into(), block_tokens: 16, tenant_salt: salt, ..NamespaceFields::default() }.namespace()
        };
        let blocks_of = |number: usize| {
            let mut parent = None;
            let blocks = (0..CHAIN_BLOCKS).map(|block| {
                let key = chain(parent, &[number as u32, block as u32], b"");
                parent = Some(key);
                key
            });
            blocks.collect()
        };
        Names { spaces: (0..SPACES).map(space).collect(), chains: (0..CHAINS).map(blocks_of).collect() }
    }
}

/// What a block's lines have in common, of any publisher.
fn identity(namespace: Namespace, key: BlockKey) -> u64 {
    let words: [u64; 4] = bytemuck::cast([namespace.0, key.0]);
    words.into_iter().fold(0x50a4, mix)
}

/// Numbers the publications of one start of a worker.
pub fn publication(start: u64, count: u64, aborted: bool) -> u64 {
    start << 34 | count << 1 | if aborted { ABORTED } else { 0 }
}

/// Length of a publication: any, also of parts of a line, often of one byte in the last, and mostly that of small cells.
pub fn len_bytes(publication: u64) -> usize {
    let dice = mix(publication, 0x1e4);
    let most = CELL_BYTES[usize::from(dice.is_multiple_of(5))];
    let any = 64 + (dice >> 8) % (most - 63);
    let len_bytes = match dice >> 60 {
        0 | 1 => any,
        2 | 3 => any.next_multiple_of(64).min(most - 64) + 1,
        _ => any.next_multiple_of(64),
    };
    len_bytes as usize
}

/// Bytes of a publication.
pub fn bytes(namespace: Namespace, key: BlockKey, publication: u64) -> Vec<u8> {
    let (identity, len) = (identity(namespace, key), len_bytes(publication));
    let mut bytes = Vec::with_capacity(len.next_multiple_of(64));
    for line in 0..len.div_ceil(64) as u64 {
        let seed = mix(mix(identity, line), publication);
        bytes.extend_from_slice(&publication.to_le_bytes());
        bytes.extend_from_slice(&(identity ^ line).to_le_bytes());
        (0..6).for_each(|word| bytes.extend_from_slice(&mix(seed, word).to_le_bytes()));
    }
    bytes.truncate(len);
    bytes
}

/// The publication that wrote these bytes; else what is wrong with them.
pub fn check(namespace: Namespace, key: BlockKey, found: &[u8]) -> Result<u64, String> {
    let word = |at: usize| found.get(at..at + 8).map_or(0, |word| u64::from_le_bytes(word.try_into().unwrap()));
    let publication = word(0);
    if found.len() != len_bytes(publication) {
        return Err(format!("{} bytes that begin as publication {publication:#x}, of {} bytes", found.len(), len_bytes(publication)));
    }
    let expected = bytes(namespace, key, publication);
    let wrong = found.chunks(64).zip(expected.chunks(64)).enumerate().find(|(_, (found, expected))| found != expected);
    if let Some((line, _)) = wrong {
        let here = identity(namespace, key) ^ word(line * 64 + 8) ^ line as u64 == 0;
        let (whose, other) = (if here { "the same block" } else { "something else" }, word(line * 64));
        let lines = found.len().div_ceil(64);
        return Err(format!("line {line} of {lines} is of {whose}, publication {other:#x}, line 0 of publication {publication:#x}"));
    }
    if publication & ABORTED != 0 {
        return Err(format!("publication {publication:#x} was never committed"));
    }
    Ok(publication)
}

#[test]
fn every_kind_of_wrong_byte_is_noticed() {
    let names = Names::new();
    let (space, key, other) = (names.spaces[0], names.chains[3][5], names.chains[3][6]);
    // The first two publications with the length of the first.
    let mut alike = (1..).map(|count| publication(7, count, false));
    let one = alike.next().unwrap();
    let two = alike.find(|&two| len_bytes(two) == len_bytes(one) || len_bytes(one).min(len_bytes(two)) > 256).unwrap();
    let (good, second) = (bytes(space, key, one), bytes(space, key, two));
    assert_eq!(check(space, key, &good), Ok(one));
    assert_ne!(one, two);
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        assert!(check(space, key, &bad).is_err(), "byte {at}");
    }
    let mut torn = good.clone();
    torn[64..128].copy_from_slice(&second[64..128]);
    assert!(check(space, key, &torn).unwrap_err().contains("line 1"), "{:?}", check(space, key, &torn));
    assert!(check(space, other, &good).is_err() && check(names.spaces[1], key, &good).is_err());
    assert!(check(space, key, &good[..good.len() - 1]).is_err() && check(space, key, &[]).is_err());
    let aborted = publication(7, 1, true);
    assert!(check(space, key, &bytes(space, key, aborted)).unwrap_err().contains("never committed"));
}
