// SPDX-License-Identifier: Apache-2.0
//! The prefix cache in one process as one host: publish a chain of blocks, look it up, pin it, pull it. Another machine that opens the
//! same devices pulls the same blocks.
//!
//!     cargo run --locked -p cxl-pool --example publish_pull

use cxl_pool::cache::{CacheConfig, NamespaceFields, Pulled, chain};
use cxl_pool::device::PoolSpec;
use cxl_pool::host::HostConfig;
use cxl_pool::pool::{CellArea, FormatOptions, OpenOptions, Share};
use cxl_pool::{Cache, Pool};

const BLOCK_BYTES: usize = 60_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Without CXL_POOL: a small pool of our own, formatted once in its life.
    let folder = tempfile::tempdir()?;
    let spec = match std::env::var("CXL_POOL") {
        Ok(named) => PoolSpec::parse(&named)?,
        Err(_) => {
            let spec = PoolSpec::parse(&format!("{},size=64M", folder.path().join("pool").display()))?;
            let cells = vec![CellArea { cell_bytes: 64 << 10, share: Share::Percent(75) }];
            Pool::format(&spec, &FormatOptions { cells, ..FormatOptions::default() })?;
            spec
        }
    };

    let pool = Pool::open(&spec, &OpenOptions::default())?;
    let host = pool.join(HostConfig::from_env()?)?; // a slot for this machine; its processes share it
    let service = host.serve()?; // heartbeat, recalls, fences, the manager's work
    let cache = Cache::open(&host, CacheConfig::default())?;
    let upkeep = cache.serve()?; // room ahead of the need, what dead hosts left

    // How the bytes were made: blocks of another model, type or layout are never found.
    let model = NamespaceFields { model: "tiny".into(), dtype: "bf16".into(), block_tokens: 4, ..NamespaceFields::default() }.namespace();
    let first = chain(None, &[1, 2, 3, 4], b"");
    let second = chain(Some(first), &[5, 6, 7, 8], b"");
    let block = |fill: u8| -> Vec<u8> { (0..BLOCK_BYTES).map(|at| fill.wrapping_add((at % 251) as u8)).collect() };

    cache.publish(model, first, None, &block(1))?; // every host can pull it when this returns
    cache.publish(model, second, Some(first), &block(2))?;

    let keys = [first, second];
    println!("cached prefix: {} blocks", cache.lookup_chain(model, &keys)?.len());
    let pinned = cache.pin_chain(model, &keys)?; // the blocks stay until this is dropped
    let mut copy = vec![0; BLOCK_BYTES];
    match cache.pull(model, second, &mut copy)? {
        Pulled::Hit { len_bytes } => println!("pulled {len_bytes} bytes, verified"),
        Pulled::Miss(reason) => return Err(format!("a miss: {reason:?}").into()),
    }
    assert!(copy == block(2), "a hit has the bytes that were published");

    drop(pinned);
    drop(upkeep);
    cache.close()?;
    drop(service);
    host.leave()?;
    Ok(())
}
