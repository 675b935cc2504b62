// SPDX-License-Identifier: Apache-2.0
//! The pool as this process uses it: opened, joined and served in the right order, and left in the right order.

use crate::blocks::CxlBlocks;
use crate::config::{RecordConfig, TierConfig};
use crate::error::Result;
use crate::names::{BlockShape, Model, Ranks};
use cxl_pool::cache::{Cache, Upkeep};
use cxl_pool::host::{Host, HostConfig, Service};
use cxl_pool::pool::{OpenOptions, Pool};

/// A process's membership in a pool and its cache. A process opens one, and all its workers share it.
///
/// [`Tier::close`] leaves in good order. Dropped without it, or killed, the process is taken for dead after a while, and its blocks go.
pub struct Tier {
    // In the order in which they end.
    upkeep: Upkeep,
    cache: Cache,
    service: Service,
    host: Host,
    pool: Pool,
    record: Option<RecordConfig>,
}

impl Tier {
    /// Opens the pool, joins it and serves its cache.
    ///
    /// # Errors
    /// [`crate::Error::Pool`]: no pool there, not formatted, formatted without cells, no manager answers, or this process has it open.
    pub fn open(config: &TierConfig) -> Result<Tier> {
        let pool = Pool::open(&config.pool, &OpenOptions::default())?;
        let host = pool.join(HostConfig::from_env()?)?;
        let service = host.serve()?;
        let cache = Cache::open(&host, config.cache.clone())?;
        let upkeep = cache.serve()?;
        Ok(Tier { upkeep, cache, service, host, pool, record: config.record.clone() })
    }

    /// The blocks of one worker of a model in this pool.
    ///
    /// # Errors
    /// As [`CxlBlocks::new`].
    pub fn blocks(&self, model: &Model, shape: BlockShape, ranks: Ranks) -> Result<CxlBlocks> {
        CxlBlocks::recorded(&self.cache, model, shape, ranks, self.record.as_ref())
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The host that this process is, or is part of.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Ends the cache and leaves the pool. Blocks of this host stay, unless it was the pool's last member that served them.
    ///
    /// # Errors
    /// Those of the pool; then other hosts take this one for dead after a while.
    pub fn close(self) -> Result<()> {
        let Tier { upkeep, cache, service, host, pool, record: _ } = self;
        drop(upkeep);
        cache.close()?;
        drop(service);
        host.leave()?;
        drop(pool);
        Ok(())
    }
}
