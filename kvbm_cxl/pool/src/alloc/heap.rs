// SPDX-License-Identifier: Apache-2.0
//! The free lists of one process for one size class, in ordinary memory: nothing here touches the pool.

use crate::media::BLOCKS_PER_KEEP;

/// 64-bit words in one keep-map line.
const WORDS_PER_KEEP: usize = BLOCKS_PER_KEEP / 64;
const _: () = assert!(BLOCKS_PER_KEEP.is_multiple_of(64));

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BlockSet(Vec<u64>);

impl BlockSet {
    /// An empty set with room for `blocks`, in whole keep-map lines.
    pub fn new(blocks: u32) -> Self {
        BlockSet(vec![0; (blocks as usize).div_ceil(BLOCKS_PER_KEEP) * WORDS_PER_KEEP])
    }

    pub fn has(&self, block: u32) -> bool {
        self.0.get(block as usize / 64).is_some_and(|word| word >> (block % 64) & 1 != 0)
    }

    pub fn insert(&mut self, block: u32) {
        self.0[block as usize / 64] |= 1 << (block % 64);
    }

    pub fn remove(&mut self, block: u32) {
        self.0[block as usize / 64] &= !(1 << (block % 64));
    }

    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// The highest block in the set.
    pub fn last(&self) -> Option<u32> {
        let (index, word) = self.0.iter().enumerate().rev().find(|(_, word)| **word != 0)?;
        Some(index as u32 * 64 + 63 - word.leading_zeros())
    }

    pub fn line(&self, line: usize) -> [u8; BLOCKS_PER_KEEP / 8] {
        let mut bits = [0; BLOCKS_PER_KEEP / 8];
        let words = self.0.iter().skip(line * WORDS_PER_KEEP).take(WORDS_PER_KEEP);
        bits.chunks_exact_mut(8).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        bits
    }

    pub fn set_line(&mut self, line: usize, bits: &[u8; BLOCKS_PER_KEEP / 8]) {
        let words = self.0.iter_mut().skip(line * WORDS_PER_KEEP).take(WORDS_PER_KEEP);
        for (word, bytes) in words.zip(bits.chunks_exact(8)) {
            *word = bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        }
    }
}

/// One chunk cut into blocks of one size.
#[derive(Debug)]
pub(super) struct HeapChunk {
    number: u64,
    blocks: u32,
    /// Blocks from here on were never used: free, and not in `free`.
    fresh: u32,
    /// Blocks that are neither free nor on their way to it.
    taken: BlockSet,
    kept: BlockSet,
    free: Vec<u32>,
    /// Blocks that are not free: taken, or freed and still being published as such.
    used: u32,
    listed: bool,
}

impl HeapChunk {
    pub fn empty(number: u64, blocks: u32) -> Self {
        let taken = BlockSet::new(blocks);
        HeapChunk { number, blocks, fresh: 0, kept: BlockSet::default(), taken, free: Vec::new(), used: 0, listed: false }
    }

    /// A chunk of which exactly the kept blocks are used.
    pub fn rebuilt(number: u64, blocks: u32, kept: BlockSet) -> Self {
        let used = kept.count();
        let free = (0..blocks).rev().filter(|&block| !kept.has(block)).collect();
        HeapChunk { number, blocks, fresh: blocks, taken: kept.clone(), kept, free, used, listed: false }
    }

    fn take(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None if self.fresh < self.blocks => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => return None,
        };
        self.taken.insert(block);
        self.used += 1;
        Some(block)
    }
}

/// What freeing a block led to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Freed {
    Done,
    /// It is kept, so nothing was done: see [`Heap::unkeep`].
    IsKept,
    /// It is not allocated: a double free, or an offset that never was a block.
    NotAllocated,
}

/// A keep-map line to publish. A thread that changes kept blocks of a chunk holds the chunk's stripe lock until that is done.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct KeepLine {
    pub line: usize,
    pub bits: [u8; BLOCKS_PER_KEEP / 8],
}

/// What keeping a block led to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kept {
    Publish(KeepLine),
    Already,
    NotAllocated,
}

/// The chunks of one size class that this process owns. Chunks are named by their place in the heap.
#[derive(Debug, Default)]
pub(super) struct Heap {
    chunks: Vec<Option<HeapChunk>>,
    vacant: Vec<u32>,
    /// Chunks that may have a free block; each at most once (`Chunk::listed`).
    list: Vec<u32>,
}

impl Heap {
    pub fn add(&mut self, chunk: HeapChunk) -> u32 {
        let place = self.vacant.pop().unwrap_or_else(|| {
            self.chunks.push(None);
            self.chunks.len() as u32 - 1
        });
        self.chunks[place as usize] = Some(chunk);
        self.list_again(place);
        place
    }

    fn list_again(&mut self, place: u32) {
        if let Some(Some(chunk)) = self.chunks.get_mut(place as usize)
            && !chunk.listed
        {
            chunk.listed = true;
            self.list.push(place);
        }
    }

    fn chunk(&mut self, place: u32, number: u64) -> Option<&mut HeapChunk> {
        self.chunks.get_mut(place as usize)?.as_mut().filter(|chunk| chunk.number == number)
    }

    /// Allocates a block: its chunk's number and its own.
    pub fn take(&mut self) -> Option<(u64, u32)> {
        while let Some(&place) = self.list.last() {
            if let Some(Some(chunk)) = self.chunks.get_mut(place as usize) {
                if let Some(block) = chunk.take() {
                    return Some((chunk.number, block));
                }
                chunk.listed = false;
            }
            self.list.pop();
        }
        None
    }

    /// Frees a block unless it is kept.
    pub fn free(&mut self, place: u32, number: u64, block: u32) -> Freed {
        let freed = self.begin_free(place, number, block);
        if freed == Freed::Done {
            self.finish_free(place, number, block);
        }
        freed
    }

    /// As [`Heap::free`], but no caller gets the block before [`Heap::finish_free`].
    pub fn begin_free(&mut self, place: u32, number: u64, block: u32) -> Freed {
        let Some(chunk) = self.chunk(place, number).filter(|chunk| chunk.taken.has(block)) else { return Freed::NotAllocated };
        if chunk.kept.has(block) {
            return Freed::IsKept;
        }
        chunk.taken.remove(block);
        Freed::Done
    }

    /// Begins to free a kept block: publish the line, then call [`Heap::finish_free`]. Until then no caller gets the block, so that its bit
    /// is never set while another caller has it. `None` when it is not kept (any more).
    pub fn unkeep(&mut self, place: u32, number: u64, block: u32) -> Option<KeepLine> {
        let chunk = self.chunk(place, number).filter(|chunk| chunk.kept.has(block))?;
        chunk.taken.remove(block);
        chunk.kept.remove(block);
        let line = block as usize / BLOCKS_PER_KEEP;
        Some(KeepLine { line, bits: chunk.kept.line(line) })
    }

    /// Puts a block whose keep bit is gone from the pool on the free list.
    pub fn finish_free(&mut self, place: u32, number: u64, block: u32) {
        if let Some(chunk) = self.chunk(place, number) {
            chunk.free.push(block);
            chunk.used -= 1;
            self.list_again(place);
        }
    }

    /// Marks a block as kept.
    pub fn keep(&mut self, place: u32, number: u64, block: u32) -> Kept {
        let Some(chunk) = self.chunk(place, number).filter(|chunk| chunk.taken.has(block)) else { return Kept::NotAllocated };
        if chunk.kept.has(block) {
            return Kept::Already;
        }
        if chunk.kept == BlockSet::default() {
            chunk.kept = BlockSet::new(chunk.blocks);
        }
        chunk.kept.insert(block);
        let line = block as usize / BLOCKS_PER_KEEP;
        Kept::Publish(KeepLine { line, bits: chunk.kept.line(line) })
    }

    /// Takes empty chunks out beyond the first `spare` of them; at most `limit`.
    pub fn remove_empty(&mut self, spare: usize, limit: usize) -> Vec<u64> {
        let empty = |chunk: &Option<HeapChunk>| chunk.as_ref().is_some_and(|chunk| chunk.used == 0);
        let places: Vec<usize> = (0..self.chunks.len()).filter(|&place| empty(&self.chunks[place])).skip(spare).take(limit).collect();
        places.into_iter().filter_map(|place| self.remove_at(place)).collect()
    }

    pub fn remove(&mut self, place: u32, number: u64) {
        if self.chunk(place, number).is_some() {
            self.remove_at(place as usize);
        }
    }

    fn remove_at(&mut self, place: usize) -> Option<u64> {
        let chunk = self.chunks[place].take()?;
        self.vacant.push(place as u32);
        if chunk.listed {
            self.list.retain(|&listed| listed as usize != place);
        }
        Some(chunk.number)
    }

    /// Chunks, blocks taken and not kept, and blocks kept.
    pub fn count(&self) -> (u64, u64, u64) {
        self.chunks.iter().flatten().fold((0, 0, 0), |(chunks, scratch, kept), chunk| {
            let kept_here = u64::from(chunk.kept.count());
            (chunks + 1, scratch + u64::from(chunk.used) - kept_here, kept + kept_here)
        })
    }
}

#[cfg(test)]
mod tests;
