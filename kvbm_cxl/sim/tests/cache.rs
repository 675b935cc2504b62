// SPDX-License-Identifier: Apache-2.0
//! The prefix cache on simulated hosts.

use cxl_pool::cache::{BlockKey, Cache, CacheConfig, Namespace, Published};
use cxl_pool::media::CellClass;
use cxl_sim::scenarios::cache;
use cxl_sim::scenarios::setup::{Cluster, join};
use cxl_sim::{Chances, Failure, Fault, Stats, WritePath, explore, names, strike_points};
use std::cell::Cell;
use std::rc::Rc;

/// Points of the cache.
fn points() -> Vec<&'static str> {
    let names = names::of_pool().expect("the pool's sources").points;
    names.into_iter().filter(|name| name.starts_with("cache.")).collect()
}

#[test]
fn a_crash_or_pause_at_any_point_of_the_cache_is_survived() {
    let restart_after_ns = Some(1_000_000);
    let faults = [
        Fault::CrashMachine { restart_after_ns },
        Fault::CrashProcess { restart_after_ns },
        Fault::PauseHost { for_ns: 30_000_000 },
        Fault::PauseThread { for_ns: 30_000_000 },
    ];
    let run = |seed, planned| cache::run_with(seed, Some(planned));
    // Some of them lie on paths that few seeds take.
    let rare = strike_points(&points(), &faults, 2, run);
    let unvisited = strike_points(&rare, &faults, 100, run);
    assert_eq!(unvisited, [""; 0], "no run came by there");
}

/// A host publishes a block and loses power for good; another one publishes the block again, and no host takes over what the first one had.
fn published_again(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = Cluster::new(seed, 3, 3, |config, _| {
        config.chances = Chances::default();
        config.write_path = WritePath::OneUnit;
        (config.geometry.stripes, config.geometry.cells_per_chunk) = (1, 1);
        config.geometry.cells[0] = CellClass { cell_bytes: 128, chunks: 4 };
    });
    // The machine that stays has the seat.
    cluster.host_config.seats.truncate(1);
    cluster.host_config.suspect_ms = 30;
    let seen = Rc::new(Cell::new(0));
    let (reader, first) = (cluster.hosts[0], cluster.hosts[1]);
    for host in cluster.hosts.clone() {
        let (config, seen) = (cluster.host_config.clone(), seen.clone());
        cluster.world.start(host, move |env| {
            let (config, seen) = (config.clone(), seen.clone());
            env.spawn("main", move |env| {
                let host = join(&env, &config)?;
                let cache = Cache::open(&host, CacheConfig { lock_timeout_ms: Some(500_000), ..CacheConfig::default() })?;
                let (namespace, key) = (Namespace([1; 16]), BlockKey([2; 16]));
                let until = |stage: u32| {
                    while seen.get() < stage {
                        env.platform().sleep_ns(1_000_000);
                    }
                };
                if env.host() == first {
                    cache.publish(namespace, key, None, &[1; 100])?;
                    seen.set(1);
                    until(9);
                } else if env.host() == reader {
                    until(1);
                    while cache.lookup(namespace, key)?.is_none() {
                        env.platform().sleep_ns(1_000_000);
                    }
                    env.inflict(first, Fault::CrashMachine { restart_after_ns: None });
                    seen.set(2);
                    until(3);
                    // What is known of the fences is as old as a heartbeat.
                    env.platform().sleep_ns(4_000_000);
                    let found = cache.lookup(namespace, key)?;
                    assert_eq!(found.map(|found| found.owner), Some(seen.get() as u16 - 10), "the block of a fenced host hides the other");
                } else {
                    until(2);
                    while cache.publish(namespace, key, None, &[2; 100])? != Published::Stored {
                        env.platform().sleep_ns(1_000_000);
                    }
                    seen.set(10 + u32::from(host.slot()));
                }
                Ok(())
            });
        });
    }
    cluster.world.run()
}

#[test]
fn a_void_block_does_not_hide_the_one_published_since() {
    explore("published_again", 30, published_again);
}
