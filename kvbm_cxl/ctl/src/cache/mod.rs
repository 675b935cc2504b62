// SPDX-License-Identifier: Apache-2.0
//! `cxlctl cache` and `cxlctl why`: the content of the prefix cache, read without joining the pool; copies of blocks and requests for
//! evictions, which join it.

mod act;
mod list;
mod why;

use crate::output::{Exit, Failure, Out};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use cxl_pool::cache::survey::{CacheView, CellState};
use cxl_pool::cache::{BlockKey, Namespace};
use cxl_pool::pool::Pool;

pub use why::run as why;

/// Options of `cache`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Show cells by state and owner, blocks by namespace, and hosts whose end is awaited
    Stat {
        /// Read the whole hint table as well
        #[arg(long)]
        hints: bool,
    },
    /// List cells: block, owner, pins
    Ls {
        /// List only blocks of this namespace (32 hexadecimal digits)
        #[arg(long, value_name = "NS")]
        namespace: Option<Namespace>,
        /// List only cells in this state; default: all that are not free
        #[arg(long, value_parser = state_parser())]
        state: Option<CellState>,
        /// List at most so many cells
        #[arg(long, default_value_t = 1000)]
        limit: u64,
    },
    /// Copy a block out of the pool, verified as every pull is
    ///
    /// Joins the pool. Exit status: 0 = a hit, 1 = a miss, with its reason.
    Get {
        #[command(flatten)]
        block: Block,
        /// Write its bytes to this file, or to standard output with `-`
        #[arg(short, long, value_name = "FILE")]
        output: Option<String>,
    },
    /// Request the owner of a block to evict it, and wait until it is gone
    ///
    /// Joins the pool. A pinned block stays. Exit status: 0 = the block is gone, 1 = it stays.
    Evict {
        #[command(flatten)]
        block: Block,
        #[command(flatten)]
        wait: Wait,
    },
    /// Request all owners to evict the blocks of a namespace, or all blocks, and wait until they are gone
    ///
    /// Joins the pool. Pinned blocks stay. Exit status: 0 = none is left, 1 = some stay.
    Clear {
        /// Clear this namespace (32 hexadecimal digits)
        #[arg(long, value_name = "NS", required_unless_present = "all", conflicts_with = "all")]
        namespace: Option<Namespace>,
        /// Clear every namespace
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        wait: Wait,
    },
}

/// Which block.
#[derive(clap::Args, Debug)]
struct Block {
    /// Key of the block (32 hexadecimal digits)
    key: BlockKey,
    /// Take the block of this namespace (32 hexadecimal digits); needed if several namespaces have the key
    #[arg(long, value_name = "NS")]
    namespace: Option<Namespace>,
}

/// How long.
#[derive(clap::Args, Debug)]
struct Wait {
    /// Wait this long for the owners, in milliseconds
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(0..=600_000))]
    timeout_ms: u64,
}

/// Options of `why`.
#[derive(clap::Args, Debug)]
pub struct WhyArgs {
    #[command(flatten)]
    block: Block,
    /// Only follow the hints; do not scan all descriptors for blocks without a hint and for the key in other namespaces
    #[arg(long)]
    no_scan: bool,
}

/// Reads the name of a cell's state.
fn state_parser() -> impl TypedValueParser<Value = CellState> {
    let named = |name: String| CellState::ALL.into_iter().find(|state| state.name() == name).ok_or("not known");
    PossibleValuesParser::new(CellState::ALL.map(CellState::name)).try_map(named)
}

pub fn run(pool: Option<&str>, args: &Args, out: &mut Out) -> Result<Exit, Failure> {
    match &args.what {
        What::Stat { hints } => list::stat(&view(&crate::pool::open(pool, true)?)?, *hints, out),
        What::Ls { namespace, state, limit } => list::ls(&view(&crate::pool::open(pool, true)?)?, *namespace, *state, *limit, out),
        What::Get { block, output } => act::get(&crate::pool::open(pool, false)?, block, output.as_deref(), out),
        What::Evict { block, wait } => act::evict(&crate::pool::open(pool, false)?, block, wait.timeout_ms, out),
        What::Clear { namespace, wait, .. } => act::clear(&crate::pool::open(pool, false)?, *namespace, wait.timeout_ms, out),
    }
}

fn view(pool: &Pool) -> Result<CacheView, Failure> {
    Ok(CacheView::load(pool.lines())?)
}

/// The namespace meant; `None` when it was not named and none has the key.
fn namespace_of(view: &CacheView, block: &Block) -> Result<Option<Namespace>, Failure> {
    if block.namespace.is_some() {
        return Ok(block.namespace);
    }
    match &view.namespaces_of(block.key)?[..] {
        [] => Ok(None),
        [namespace] => Ok(Some(*namespace)),
        several => {
            let names: Vec<String> = several.iter().map(Namespace::to_string).collect();
            Err(Failure::usage(format!("several namespaces have the key: say which with --namespace: {}", names.join(", "))))
        }
    }
}
