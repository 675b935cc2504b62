// SPDX-License-Identifier: Apache-2.0
//! The demo's data: bytes that no other block of any round has, and the directory through which they are found.

use cxl_pool::Error;

/// Name of the directory object.
pub const DIRECTORY: &[u8] = b"demo-directory";
/// Name of the counter object.
pub const COUNTER: &[u8] = b"demo-counter";
/// First bytes of a directory.
const MAGIC: u64 = u64::from_le_bytes(*b"demo-dir");
/// Most blocks of a directory.
pub const MAX_BLOCKS: u64 = 4096;
/// Bytes of a directory's head and of each entry.
const HEAD_BYTES: usize = 24;
const ENTRY_BYTES: usize = 16;

/// SplitMix64: every seed gives another sequence, and every position in it another word.
fn word(seed: u64, position: u64) -> u64 {
    let mut z = seed.wrapping_add(position.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn seed(round: u64, block: u64) -> u64 {
    word(round.wrapping_mul(0xd134_2543_de82_ef95), block)
}

/// Writes the bytes of a block.
pub fn fill(round: u64, block: u64, bytes: &mut [u8]) {
    let seed = seed(round, block);
    for (position, chunk) in bytes.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&word(seed, position as u64).to_le_bytes()[..chunk.len()]);
    }
}

/// The first byte that is not the block's.
pub fn first_wrong(round: u64, block: u64, bytes: &[u8]) -> Option<usize> {
    let seed = seed(round, block);
    bytes.chunks(8).enumerate().find_map(|(position, chunk)| {
        let right = word(seed, position as u64).to_le_bytes();
        let at = chunk.iter().zip(right).position(|(byte, right)| *byte != right)?;
        Some(position * 8 + at)
    })
}

/// Where the blocks of a round are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directory {
    /// The round.
    pub round: u64,
    /// Pool offset and length of each block.
    pub blocks: Vec<(u64, u64)>,
}

impl Directory {
    /// As it lies in the pool.
    pub fn encode(&self) -> Vec<u8> {
        let head = [MAGIC, self.round, self.blocks.len() as u64];
        let entries = self.blocks.iter().flat_map(|&(offset, len_bytes)| [offset, len_bytes]);
        head.into_iter().chain(entries).flat_map(u64::to_le_bytes).collect()
    }

    /// Bytes that a directory of `blocks` blocks takes.
    pub fn len_bytes(blocks: u64) -> u64 {
        HEAD_BYTES as u64 + blocks * ENTRY_BYTES as u64
    }

    /// Reads one.
    pub fn decode(bytes: &[u8]) -> Result<Directory, Error> {
        let mut words = bytes.chunks_exact(8).map(|word| word.iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte)));
        let mut next = || words.next().ok_or_else(|| Error::Invalid("the directory is cut off".into()));
        if next()? != MAGIC {
            return Err(Error::Invalid("there is no directory where its name points".into()));
        }
        let (round, count) = (next()?, next()?);
        if count > MAX_BLOCKS {
            return Err(Error::Invalid(format!("the directory names {count} blocks, more than {MAX_BLOCKS}")));
        }
        let blocks = (0..count).map(|_| Ok((next()?, next()?))).collect::<Result<_, Error>>()?;
        Ok(Directory { round, blocks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_counts() {
        let mut bytes = vec![0; 1003];
        fill(3, 7, &mut bytes);
        assert_eq!(first_wrong(3, 7, &bytes), None);
        assert!(first_wrong(3, 8, &bytes).is_some() && first_wrong(4, 7, &bytes).is_some());
        for at in [0, 8, 500, 1002] {
            bytes[at] ^= 1;
            assert_eq!(first_wrong(3, 7, &bytes), Some(at));
            bytes[at] ^= 1;
        }
    }

    #[test]
    fn directories_come_back_and_hostile_ones_are_refused() {
        let directory = Directory { round: 5, blocks: vec![(4096, 10), (8192, 20)] };
        let bytes = directory.encode();
        assert_eq!(bytes.len() as u64, Directory::len_bytes(2));
        assert_eq!(Directory::decode(&bytes).unwrap(), directory);
        assert!(Directory::decode(&bytes[..bytes.len() - 8]).is_err());
        assert!(Directory::decode(&[0; 64]).is_err());
        let huge = [MAGIC, 1, u64::MAX].into_iter().flat_map(u64::to_le_bytes).collect::<Vec<_>>();
        assert!(Directory::decode(&huge).is_err());
    }
}
