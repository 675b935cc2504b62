// SPDX-License-Identifier: Apache-2.0
//! The arguments of a kernel launch: its pieces, one after the other in a stream, and the parts of the stream. The layout of the entries
//! and what the kernels make of them is in `kernels/move.cu`.

use super::driver::Address;
use super::lane::Move;
use bytemuck::{Pod, Zeroable};

/// Bytes of the stream that a warp takes at a time.
const CHUNK_BYTES: u64 = 1024;
/// Bytes that a lane takes at a time.
const UNIT_BYTES: u64 = 16;
/// Bytes for each list and for each chunk that kernels keep on the GPU, and of a list's result.
const STRIPE_BYTES: usize = 64;
/// Shorter lists have checksums of another kind, which no kernel takes; so many bytes and more can be one list of a launch.
pub(super) const SUMMED_BYTES: std::ops::Range<u64> = 241..1 << 40;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PieceEntry {
    at: u64,
    len_bytes: u64,
    destination: Address,
    source: Address,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ChunkEntry {
    piece: u32,
    list: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ListEntry {
    len_bytes: u64,
    first_chunk: u32,
    chunks: u32,
    mark: u64,
    done: u32,
    reserved: u32,
}

/// What a list's kernel leaves: its checksum, and the mark that it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ListResult {
    pub(super) checksum: u64,
    pub(super) mark: u64,
}

/// The parameter of a kernel: where everything lies.
#[repr(C)]
pub(super) struct Tables {
    pieces: Address,
    chunks: Address,
    lists: Address,
    tails: Address,
    sums: Address,
    results: Address,
    chunk_count: u32,
    list_count: u32,
}

const _: () = assert!(size_of::<PieceEntry>() == 32 && size_of::<ChunkEntry>() == 8 && size_of::<ListEntry>() == 32);
const _: () = assert!(size_of::<ListResult>() == 16 && size_of::<Tables>() == 56);

/// The entries of one launch.
#[derive(Default)]
pub(super) struct Entries {
    pieces: Vec<PieceEntry>,
    chunks: Vec<ChunkEntry>,
    lists: Vec<ListEntry>,
}

impl Entries {
    /// Of pieces whose checksums are not taken. In the stream each begins with a unit of its own, and where its destination is that of a
    /// whole unit, so that the alignment of one does not spoil that of the next.
    pub(super) fn of_moves(moves: &[Move], is_to_host: bool) -> Self {
        let mut entries = Entries { pieces: Vec::with_capacity(moves.len()), ..Entries::default() };
        let mut at = 0u64;
        for part in moves {
            let ((mut destination, mut source), mut left) = (part.ends(is_to_host), part.len_bytes as u64);
            let ragged = (UNIT_BYTES - destination % UNIT_BYTES) % UNIT_BYTES;
            if ragged > 0 && ragged < left {
                entries.push(at, ragged, destination, source, 0);
                (destination, source, left) = (destination + ragged, source + ragged, left - ragged);
                at += UNIT_BYTES;
            }
            entries.push(at, left, destination, source, 0);
            at = (at + left).next_multiple_of(UNIT_BYTES);
        }
        entries.end()
    }

    /// Of whole lists, with checksums; what belongs to one list is together and in the order of the checksum. Lists get marks from `mark`
    /// on.
    pub(super) fn of_lists(moves: &[Move], is_to_host: bool, mark: u64) -> Self {
        let mut entries = Entries { pieces: Vec::with_capacity(moves.len()), ..Entries::default() };
        let mut start = 0u64;
        for run in moves.chunk_by(|one, other| one.list == other.list) {
            let (list, mut at) = (entries.lists.len() as u32, start);
            for part in run {
                let (destination, source) = part.ends(is_to_host);
                entries.push(at, part.len_bytes as u64, destination, source, list);
                at += part.len_bytes as u64;
            }
            let len_bytes = at - start;
            entries.lists.push(ListEntry {
                len_bytes,
                first_chunk: (start / CHUNK_BYTES) as u32,
                chunks: len_bytes.div_ceil(CHUNK_BYTES) as u32,
                mark: mark + u64::from(list),
                done: 0,
                reserved: 0,
            });
            start = at.next_multiple_of(CHUNK_BYTES);
        }
        entries.end()
    }

    fn push(&mut self, at: u64, len_bytes: u64, destination: Address, source: Address, list: u32) {
        let piece = self.pieces.len() as u32;
        self.pieces.push(PieceEntry { at, len_bytes, destination, source });
        while (self.chunks.len() as u64) * CHUNK_BYTES < at + len_bytes {
            self.chunks.push(ChunkEntry { piece, list });
        }
    }

    fn end(mut self) -> Self {
        let last = self.pieces.len().saturating_sub(1) as u32;
        self.chunks.push(ChunkEntry { piece: last, list: 0 });
        self
    }

    /// Lists with checksums.
    pub(super) fn lists_len(&self) -> usize {
        self.lists.len()
    }

    /// Chunks to be moved.
    pub(super) fn chunks_len(&self) -> u32 {
        self.chunks.len().saturating_sub(1) as u32
    }

    /// The entries as the GPU reads them.
    pub(super) fn parts(&self) -> [&[u8]; 3] {
        [bytemuck::cast_slice(&self.pieces), bytemuck::cast_slice(&self.chunks), bytemuck::cast_slice(&self.lists)]
    }

    /// Bytes of the entries.
    pub(super) fn len_bytes(&self) -> usize {
        self.parts().iter().map(|part| part.len().next_multiple_of(STRIPE_BYTES)).sum()
    }

    /// Bytes on the GPU: the entries, and what kernels keep of each list and chunk.
    pub(super) fn gpu_bytes(&self) -> usize {
        self.len_bytes() + STRIPE_BYTES * (self.lists.len() + if self.lists.is_empty() { 0 } else { self.chunks.len() })
    }

    /// The parameter of the kernel: the entries lie at `start`, each part at a multiple of 64, and results at `results`.
    pub(super) fn tables(&self, start: Address, results: Address) -> Tables {
        let [pieces, chunks, lists] = self.parts().map(|part| part.len().next_multiple_of(STRIPE_BYTES) as Address);
        let tails = start + pieces + chunks + lists;
        Tables {
            pieces: start,
            chunks: start + pieces,
            lists: start + pieces + chunks,
            tails,
            sums: tails + (STRIPE_BYTES * self.lists.len()) as Address,
            results,
            chunk_count: self.chunks_len(),
            list_count: self.lists.len() as u32,
        }
    }
}
