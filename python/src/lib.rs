// SPDX-License-Identifier: Apache-2.0
//! Python module `kvbm_cxl._native`: the pool and its prefix cache.
//!
//! Every call that touches the pool does so without the interpreter's lock. What a call needs of Python objects is taken before, what it
//! says of failures after; nothing in between knows Python. The types and their documentation are in `kvbm_cxl/_native.pyi`.

mod blocks;
mod buffer;
mod cache;
mod cold;
mod events;
mod failure;
mod format;
mod handle;
mod layout;
mod local;
mod logging;
mod member;
mod memory;
mod metrics;
mod names;
mod pins;
mod pool;
mod queued;
mod reservations;
mod trace;
mod watch;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::cache::{BlockInfo, Cache, CellUsage, GpuReach, PullResult};
    #[pymodule_export]
    use crate::cold::{ColdBlock, checksum};
    #[pymodule_export]
    use crate::events::{Event, Events};
    #[pymodule_export]
    use crate::format::{format_pool, pool_info};
    #[pymodule_export]
    use crate::layout::BlockLayout;
    #[pymodule_export]
    use crate::memory::PoolMemory;
    #[pymodule_export]
    use crate::names::{Namespace, chain_key};
    #[pymodule_export]
    use crate::pins::Pins;
    #[pymodule_export]
    use crate::pool::Pool;
    #[pymodule_export]
    use crate::queued::Queued;
    #[pymodule_export]
    use crate::reservations::Reservations;
    #[pymodule_export]
    use crate::trace::TraceRecorder;
    #[pymodule_export]
    use crate::watch::{Changes, Watch};

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        cxl_pool::background::forks();
        crate::logging::install(module.py())
    }
}
