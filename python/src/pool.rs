// SPDX-License-Identifier: Apache-2.0
//! A pool as Python has it.

use crate::cache::{self, Cache, OpenCache};
use crate::failure::{Failure, Outcome};
use crate::format::{cell_bytes, coherence_text, spec_of};
use crate::handle::{OpenHandle, drop_detached, held};
use crate::member::Member;
use crate::memory::PoolMemory;
use crate::metrics;
use crate::names::Namespace;
use cxl_pool::cache::CacheConfig;
use cxl_pool::cache::policy::PolicyKind;
use cxl_pool::copy::CudaConfig;
use cxl_pool::cpus::ThreadKind;
use cxl_pool::host::HostConfig;
use cxl_pool::media::uuid_text;
use cxl_pool::pool::OpenOptions;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};

const WHAT: &str = "the pool";
/// Longest period or deadline, in milliseconds: 11 days, far from any overflow of a clock in nanoseconds.
const MAX_MS: u64 = 1_000_000_000;

/// What namespaces may take of a process's cells.
#[derive(FromPyObject)]
enum Quotas {
    /// Bytes of each of them.
    OfEach(u64),
    /// Bytes of those that are named; others have no bound.
    OfSome(HashMap<Namespace, u64>),
}

/// A pool that this process has joined.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct Pool {
    member: Option<OpenHandle<Member>>,
    /// Its cache, if that is open.
    cache: Mutex<Weak<OpenHandle<OpenCache>>>,
    #[pyo3(get)]
    spec: String,
    #[pyo3(get)]
    uuid: String,
    #[pyo3(get)]
    coherence: &'static str,
    #[pyo3(get)]
    memory: String,
    #[pyo3(get)]
    cell_bytes: Vec<u64>,
}

fn join(spec: Option<&str>, config: HostConfig) -> Outcome<(String, Member)> {
    let spec = spec_of(spec)?;
    let pool = cxl_pool::Pool::open(&spec, &OpenOptions::default())?;
    let host = pool.join(config)?;
    match host.serve() {
        Ok(service) => {
            // The pool's name without the size, which opening needs none of.
            Ok((spec.without_sizes().to_string(), Member::new(pool, host, service)))
        }
        Err(error) => {
            // The first error is the one to report; if leaving fails too, the host is taken for dead after a while.
            let _ = host.leave();
            Err(error.into())
        }
    }
}

impl Pool {
    fn member(&self) -> Outcome<&OpenHandle<Member>> {
        self.member.as_ref().ok_or_else(|| Failure::closed(WHAT))
    }

    /// Runs `work` as a member of the pool without the interpreter's lock.
    fn call<T: Send>(&self, py: Python<'_>, work: impl FnOnce(Arc<Member>) -> Outcome<T> + Send) -> PyResult<T> {
        let handle = self.member()?;
        Ok(py.detach(|| work(handle.hold()?))?)
    }

    fn end(&self) -> Outcome<()> {
        let handle = self.member()?;
        handle.check_here()?;
        let open = held(&self.cache).upgrade();
        if let Some(open) = open {
            cache::close(&open)?;
        }
        let Some(member) = handle.take() else { return Ok(()) };
        let (end, timeout_ms) = (member.end.clone(), member.timeout_ms());
        let is_shared = member.blocks.load(Ordering::Acquire) > 0;
        drop(member);
        // Memory that the program still has keeps the host joined, so that no other host gets it meanwhile.
        if is_shared { Ok(()) } else { end.wait(WHAT, timeout_ms) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        drop_detached(self.member.take());
    }
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (spec=None, *, slot=None, join_timeout_ms=None, heartbeat_ms=None, suspect_ms=None))]
    fn new(
        py: Python<'_>,
        spec: Option<&str>,
        slot: Option<u16>,
        join_timeout_ms: Option<u64>,
        heartbeat_ms: Option<u64>,
        suspect_ms: Option<u64>,
    ) -> PyResult<Self> {
        let defaults = HostConfig::from_env().map_err(Failure::Pool)?;
        let config = HostConfig {
            slot,
            join_timeout_ms: join_timeout_ms.map(|ms| ms.min(MAX_MS)),
            heartbeat_ms: heartbeat_ms.unwrap_or(defaults.heartbeat_ms).clamp(1, MAX_MS),
            suspect_ms: suspect_ms.unwrap_or(defaults.suspect_ms).min(MAX_MS),
            ..defaults
        };
        config.check().map_err(Failure::Pool)?;
        let (spec, member) = py.detach(|| join(spec, config))?;
        Ok(Pool {
            spec,
            uuid: uuid_text(member.pool.superblock().uuid()),
            coherence: coherence_text(member.pool.superblock().coherence()),
            memory: member.pool.description().into(),
            cell_bytes: cell_bytes(&member.pool),
            cache: Mutex::default(),
            member: Some(OpenHandle::new(WHAT, member)),
        })
    }

    #[getter]
    fn slot(&self, py: Python<'_>) -> PyResult<u16> {
        self.call(py, |member| Ok(member.host.slot()))
    }

    #[getter]
    fn last_error(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let failed = self.call(py, |member| Ok(member.host.failed_rounds().last()))?;
        Ok(failed.map(|failed| format!("{}: {}", failed.what, failed.message)))
    }

    fn bind_worker(&self, py: Python<'_>) -> PyResult<()> {
        // On the caller's own thread, whichever runs this.
        self.call(py, |member| Ok(member.host.config().cpus.bind_current_thread(ThreadKind::Worker)?))
    }

    #[getter]
    fn incarnation(&self, py: Python<'_>) -> PyResult<u32> {
        self.call(py, |member| Ok(member.host.incarnation()))
    }

    #[getter]
    fn suspect_ms(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |member| Ok(member.host.config().suspect_ms))
    }

    #[pyo3(signature = (*, policy="lru", checksums=true, low_water_percent=None, high_water_percent=None, quotas=None,
        lock_timeout_ms=None, service_ms=None, upkeep_ms=None, remembered_keys=None, copy=None, dma=None, register_bytes=None))]
    #[expect(clippy::too_many_arguments, reason = "all by name: they are the fields of the library's structure")]
    fn cache(
        &self,
        py: Python<'_>,
        policy: &str,
        checksums: bool,
        low_water_percent: Option<u32>,
        high_water_percent: Option<u32>,
        quotas: Option<Quotas>,
        lock_timeout_ms: Option<u64>,
        service_ms: Option<u64>,
        upkeep_ms: Option<u64>,
        remembered_keys: Option<usize>,
        copy: Option<&str>,
        dma: Option<&str>,
        register_bytes: Option<u64>,
    ) -> PyResult<Cache> {
        let defaults = CacheConfig::default();
        let policy: PolicyKind = policy.parse().map_err(Failure::Pool)?;
        let mut cuda = CudaConfig::from_env().map_err(Failure::Pool)?;
        cuda.dma = dma.map(str::parse).transpose().map_err(Failure::Pool)?.unwrap_or(cuda.dma);
        cuda.register_bytes = register_bytes.unwrap_or(cuda.register_bytes);
        let (of_each, of_some) = match quotas {
            Some(Quotas::OfEach(bytes)) => (Some(bytes), HashMap::new()),
            Some(Quotas::OfSome(some)) => (None, some.into_iter().map(|(namespace, bytes)| (namespace.0, bytes)).collect()),
            None => (None, HashMap::new()),
        };
        let config = CacheConfig {
            policy,
            checksums,
            low_water_percent: low_water_percent.unwrap_or(defaults.low_water_percent),
            high_water_percent: high_water_percent.unwrap_or(defaults.high_water_percent),
            quotas: of_some,
            quota_bytes: of_each,
            lock_timeout_ms: lock_timeout_ms.map(|ms| ms.min(MAX_MS)),
            service_ms: service_ms.unwrap_or(defaults.service_ms).min(MAX_MS),
            upkeep_ms: upkeep_ms.unwrap_or(defaults.upkeep_ms).min(MAX_MS),
            remembered_keys: remembered_keys.unwrap_or(defaults.remembered_keys),
            copy: copy.map(str::parse).transpose().map_err(Failure::Pool)?,
            cuda: Some(cuda),
            ..defaults
        };
        let slot = self.call(py, |member| {
            // Held while it opens: two caches of one membership would write each other's lines.
            let mut known = held(&self.cache);
            if known.upgrade().is_some_and(|open| open.is_open()) {
                let advice = "the cache of this pool is open already: share it, or open the pool once more";
                return Err(Failure::Own("ExistsError", "exists", advice.into()));
            }
            let slot = Arc::new(OpenHandle::new(cache::WHAT, OpenCache::open(member, config)?));
            *known = Arc::downgrade(&slot);
            Ok(slot)
        })?;
        Ok(Cache::over(slot))
    }

    #[pyo3(signature = (*, timeout_ms=10_000))]
    fn map_ahead(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<u64> {
        self.call(py, |member| Ok(member.pool.map_ahead(timeout_ms.min(MAX_MS))))
    }

    #[pyo3(signature = (len_bytes, *, name=None, kept=None))]
    fn allocate(&self, py: Python<'_>, len_bytes: u64, name: Option<String>, kept: Option<bool>) -> PyResult<PoolMemory> {
        self.call(py, |member| PoolMemory::allocate(member, len_bytes, name, kept))
    }

    fn find(&self, py: Python<'_>, name: String) -> PyResult<PoolMemory> {
        self.call(py, |member| PoolMemory::find(member, name))
    }

    fn prometheus(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |member| metrics::of_pool(&member))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.end())?)
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        format!("Pool({:?}, uuid={})", self.spec, self.uuid)
    }
}
