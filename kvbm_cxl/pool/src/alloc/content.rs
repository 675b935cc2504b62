// SPDX-License-Identifier: Apache-2.0
//! What a chunk holds, read from its head and its keep map: what survives of it when its owner is gone.

use super::class::Classes;
use super::heap::BlockSet;
use crate::error::{Error, Result};
use crate::line::Lines;
use crate::media::{BLOCKS_PER_KEEP, ChunkHead, KeepMap};

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Nothing.
    Nothing,
    /// Kept blocks of one size class.
    Blocks {
        class: usize,
        /// The blocks; at least one.
        kept: BlockSet,
    },
    /// The first chunk of a kept block of this many chunks.
    Run(u64),
    /// A later chunk of the kept block that begins in this chunk.
    Inside(u64),
    /// Unknown: nothing of the chunk may be used.
    Bad(&'static str),
}

/// Turns a line that does not verify into `Bad`; other errors stay errors.
fn or_bad<T>(fetched: Result<T>) -> Result<std::result::Result<T, Content>> {
    match fetched {
        Ok(line) => Ok(Ok(line)),
        Err(Error::BadLine { reason, .. }) => Ok(Err(Content::Bad(reason))),
        Err(error) => Err(error),
    }
}

fn kept_blocks(lines: &Lines, chunk: u64, blocks: u32) -> Result<std::result::Result<BlockSet, Content>> {
    let per_chunk = lines.layout().geometry().keep_lines();
    let used = u64::from(blocks).div_ceil(BLOCKS_PER_KEEP as u64);
    let indexes: Vec<u64> = (chunk * per_chunk..).take(used as usize).collect();
    let mut fetched: Vec<Result<KeepMap>> = Vec::with_capacity(indexes.len());
    lines.fetch_many(&indexes, &mut fetched)?;
    let mut kept = BlockSet::new(blocks);
    for (line, map) in fetched.into_iter().enumerate() {
        match or_bad(map)? {
            Ok(map) => kept.set_line(line, &map.bits),
            Err(bad) => return Ok(Err(bad)),
        }
    }
    Ok(match kept.last() {
        Some(last) if last >= blocks => Err(Content::Bad("keep bit after the last block")),
        _ => Ok(kept),
    })
}

/// Whether `head`, the head of chunk `first`, begins a kept block that covers `chunk`.
fn covers(lines: &Lines, first: u64, head: &ChunkHead, chunk: u64) -> Result<std::result::Result<bool, Content>> {
    let end = first.checked_add(head.run).filter(|&end| end <= lines.layout().chunks());
    if head.state != ChunkHead::RUN || head.run == 0 || end.is_none_or(|end| chunk >= end) {
        return Ok(Ok(false));
    }
    Ok(kept_blocks(lines, first, 1)?.map(|kept| kept.has(0)))
}

pub(super) fn read(lines: &Lines, classes: &Classes, chunk: u64) -> Result<(Content, ChunkHead)> {
    let head: ChunkHead = match or_bad(lines.fetch(chunk))? {
        Ok(head) => head,
        Err(bad) => return Ok((bad, ChunkHead::default())),
    };
    let content = match head.state {
        ChunkHead::UNCUT => Content::Nothing,
        ChunkHead::BLOCKS => match classes.exactly(head.block_bytes) {
            None => Content::Bad("block size of no class"),
            Some(class) => {
                let blocks = (lines.layout().geometry().chunk_bytes / head.block_bytes) as u32;
                match kept_blocks(lines, chunk, blocks)? {
                    Ok(kept) if kept.count() == 0 => Content::Nothing,
                    Ok(kept) => Content::Blocks { class, kept },
                    Err(bad) => bad,
                }
            }
        },
        ChunkHead::RUN => match covers(lines, chunk, &head, chunk)? {
            Ok(true) => Content::Run(head.run),
            Ok(false) => Content::Nothing,
            Err(bad) => bad,
        },
        _ if head.run >= chunk => Content::Nothing,
        _ => match or_bad(lines.fetch(head.run))? {
            Err(bad) => bad,
            Ok(first) => match covers(lines, head.run, &first, chunk)? {
                Ok(true) => Content::Inside(head.run),
                Ok(false) => Content::Nothing,
                Err(bad) => bad,
            },
        },
    };
    Ok((content, head))
}
