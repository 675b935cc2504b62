// SPDX-License-Identifier: Apache-2.0
//! What can go wrong before the first block moves. Afterwards every block gets an answer of its own ([`crate::counts`]).

/// Result of the fallible calls of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why the tier cannot be used as it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the text of an error says what its fields are")]
pub enum Error {
    /// An environment variable has a value that cannot be used.
    #[error("{name} is {value:?}: {expected}")]
    Variable { name: &'static str, value: String, expected: &'static str },
    /// A name or number of the builder cannot be used.
    #[error("{field}: {reason}")]
    Field { field: &'static str, reason: String },
    /// The pool has no cells in which a block fits.
    #[error(
        "a block of {block_bytes} bytes does not fit the largest cell of the pool, {cell_bytes} bytes: \
         format the pool with larger cells (`cxlctl format --cells`), or use smaller blocks"
    )]
    CellTooSmall { block_bytes: u64, cell_bytes: u64 },
    /// The pool has no cells for descriptions of blocks.
    #[error(
        "the pool has no cells smaller than those of {block_bytes} bytes, and a description would take one of them: \
         format the pool with two sizes (`cxlctl format --cells {block_bytes}:75% --cells 64:1%`)"
    )]
    NoSmallCells { block_bytes: u64 },
    /// The system gave no memory.
    #[error("no {len_bytes} bytes of host memory: {source}")]
    Memory { len_bytes: usize, source: std::io::Error },
    /// The pool.
    #[error("pool: {0}")]
    Pool(#[from] cxl_pool::Error),
}
