// SPDX-License-Identifier: Apache-2.0
//! `cxlctl cache` and `cxlctl why`: what is in the prefix cache, read without joining the pool; and what takes a host of this machine to
//! do: copying a block out, and asking for blocks to be evicted.

mod act;
mod list;
mod why;

use crate::output::{Exit, Failure, Out};
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
    /// Tell in numbers what the cells are, who owns them, which namespaces have how much, and who is waited for
    Stat {
        /// Look at the hint table as well, which reads every line of it
        #[arg(long)]
        hints: bool,
    },
    /// List cells: block, owner, pins
    Ls {
        /// Only blocks of this namespace (32 hexadecimal digits)
        #[arg(long, value_name = "NS")]
        namespace: Option<Namespace>,
        /// Only cells in this state; default: all that are not free
        #[arg(long, value_enum)]
        state: Option<State>,
        /// List at most so many
        #[arg(long, default_value_t = 1000)]
        limit: u64,
    },
    /// Copy a block out of the pool, verified as every pull is
    ///
    /// This machine joins the pool for it. Exit status: 0 = a hit, 1 = a miss, which names its reason.
    Get {
        #[command(flatten)]
        block: Block,
        /// Write its bytes to this file, or to standard output with `-`
        #[arg(short, long, value_name = "FILE")]
        output: Option<String>,
    },
    /// Ask the owner of a block to evict it, and wait until it is gone
    ///
    /// This machine joins the pool for it. A block that is pinned stays. Exit status: 0 = no such block is there any more, 1 = it stays.
    Evict {
        #[command(flatten)]
        block: Block,
        #[command(flatten)]
        wait: Wait,
    },
    /// Ask all owners to evict the blocks of a namespace, or all blocks, and wait until they are gone
    ///
    /// This machine joins the pool for it. Blocks that are pinned stay. Exit status: 0 = none is left, 1 = some stay.
    Clear {
        /// The namespace (32 hexadecimal digits)
        #[arg(long, value_name = "NS", required_unless_present = "all", conflicts_with = "all")]
        namespace: Option<Namespace>,
        /// Every namespace
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
    /// Its namespace (32 hexadecimal digits); default: the one that has such a block, if only one has
    #[arg(long, value_name = "NS")]
    namespace: Option<Namespace>,
}

/// How long.
#[derive(clap::Args, Debug)]
struct Wait {
    /// How long to wait for the owners, in milliseconds
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(0..=600_000))]
    timeout_ms: u64,
}

/// Options of `why`.
#[derive(clap::Args, Debug)]
pub struct WhyArgs {
    #[command(flatten)]
    block: Block,
    /// Only follow the hints: do not look at every descriptor for blocks without hint, and for the key in other namespaces
    #[arg(long)]
    no_scan: bool,
}

/// State of a cell.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum State {
    /// Nothing in it
    Free,
    /// A process is publishing a block
    Writing,
    /// A complete block
    Ready,
    /// A block about to go unless a reader pins it
    Evicting,
    /// On its way out of quarantine
    Retiring,
    /// Its descriptor does not verify
    Damaged,
}

impl State {
    fn state(self) -> CellState {
        match self {
            State::Free => CellState::Free,
            State::Writing => CellState::Writing,
            State::Ready => CellState::Ready,
            State::Evicting => CellState::Evicting,
            State::Retiring => CellState::Retiring,
            State::Damaged => CellState::Damaged,
        }
    }
}

/// `cxlctl cache`.
pub fn run(pool: Option<&str>, args: &Args, out: &mut Out) -> Result<Exit, Failure> {
    match &args.what {
        What::Stat { hints } => list::stat(&view(&crate::pool::open(pool, true)?)?, *hints, out),
        What::Ls { namespace, state, limit } => {
            list::ls(&view(&crate::pool::open(pool, true)?)?, *namespace, state.map(State::state), *limit, out)
        }
        What::Get { block, output } => act::get(&crate::pool::open(pool, false)?, block, output.as_deref(), out),
        What::Evict { block, wait } => act::evict(&crate::pool::open(pool, false)?, block, wait.timeout_ms, out),
        What::Clear { namespace, wait, .. } => act::clear(&crate::pool::open(pool, false)?, *namespace, wait.timeout_ms, out),
    }
}

/// The cache of a pool.
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
