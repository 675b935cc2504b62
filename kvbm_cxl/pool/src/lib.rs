// SPDX-License-Identifier: Apache-2.0
//! A memory pool that several hosts map at once, **without cache coherence and without atomics between them**, made safe to use.
//!
//! # Layers
//!
//! A module uses those of its own row and of the rows below it: a test reads this table and every path of the sources.
//!
//! | layer | what it does |
//! |---|---|
//! | [`fsck`] | checks, describes and repairs the metadata of a pool, as a library |
//! | [`pool`] | formats, opens and joins: devices, superblock, layout, lines and host together |
//! | [`ring`] | messages and calls between two processes of any hosts |
//! | [`cache`] | the prefix cache: publish, verified pull, pins, eviction |
//! | [`copy`](mod@copy) | payload in and out of the pool: gather, scatter, sparse lists, with flushes and fences in their places |
//! | [`record`], [`alloc`], [`objects`], [`lock_table`], [`metrics`] | small tables whose commits survive a writer that resumes after it was taken for dead; chunks and blocks; names of roots; which locks are in use; what a process counts and a host tells the pool of it |
//! | [`host`], [`lock`] | slots, heartbeats, fences; the two-tier lock and its manager. One layer: a manager serves both |
//! | [`device`], [`machine`], [`platform`] | what a pool lies on; clock, processes and shared memory of this machine, and their trait |
//! | `crc`, [`line`](mod@line) | checksums; publish and fetch of a 64-byte line, the two recipes that everything above is made of |
//! | [`media`] | the on-media format: every line, its writer, its checks |
//! | [`coherence`] | flushes, fences, non-temporal stores; one trait for the CPU, the emulator and the simulator |
//! | [`limits`], `error`, [`fault`], [`background`], [`cpus`], `failure_detector`, `machine_id`, `named` | every bound; typed errors; the named rules and points that tests drop and strike; threads, and where they run; how long a host was silent; who a machine is; enumerations with names |
//!
//! # Example: a cache of KV blocks
//!
//! One process as one host. Another machine that opens the same devices pulls the same block.
//!
//! ```
//! use cxl_pool::cache::{CacheConfig, NamespaceFields, Pulled, chain};
//! use cxl_pool::device::PoolSpec;
//! use cxl_pool::host::HostConfig;
//! use cxl_pool::pool::{CellArea, FormatOptions, OpenOptions, Share};
//! use cxl_pool::{Cache, Pool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let directory = tempfile::tempdir()?;
//! # // SAFETY: this program has only one thread so far.
//! # unsafe { std::env::set_var("CXL_STATE_DIR", directory.path()) };
//! let spec = PoolSpec::parse(&format!("{},size=64M", directory.path().join("pool").display()))?;
//! let cells = vec![CellArea { cell_bytes: 64 << 10, share: Share::Percent(50) }];
//! Pool::format(&spec, &FormatOptions { cells, ..FormatOptions::default() })?; // once in the life of a pool
//!
//! let pool = Pool::open(&spec, &OpenOptions::default())?;
//! let host = pool.join(HostConfig::from_env()?)?;
//! let service = host.serve()?; // heartbeat, recalls, fences, and the manager's work if it falls to this machine
//! let cache = Cache::open(&host, CacheConfig::default())?;
//! let upkeep = cache.serve()?; // room ahead of the need, other hosts' leftovers
//!
//! // How the bytes were made, and of which tokens they are.
//! let model = NamespaceFields { model: "tiny".into(), dtype: "bf16".into(), block_tokens: 4, ..NamespaceFields::default() }.namespace();
//! let key = chain(None, &[1, 2, 3, 4], b"");
//! let (keys, values) = (vec![0x6b; 3000], vec![0x76; 3000]);
//! cache.publish(model, key, None, &[&keys[..], &values[..]].concat())?;
//!
//! // A worker, on any host, asks how much of a prompt is there, and pulls it.
//! assert_eq!(cache.lookup_chain(model, &[key, chain(Some(key), &[5], b"")])?.len(), 1);
//! let mut block = vec![0; 6000];
//! assert_eq!(cache.pull(model, key, &mut block)?, Pulled::Hit { len_bytes: 6000 }); // verified, or a miss
//! assert!(block[..3000] == keys && block[3000..] == values);
//! # drop(upkeep);
//! cache.close()?;
//! # drop(service);
//! host.leave()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Example: shared structures
//!
//! What the cache is made of can be used alone: blocks, names and locks.
//!
//! ```
//! use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
//! use cxl_pool::device::PoolSpec;
//! use cxl_pool::host::HostConfig;
//! use cxl_pool::lock_table::allocate_lock;
//! use cxl_pool::objects::Objects;
//! use cxl_pool::pool::{FormatOptions, OpenOptions, Pool};
//!
//! const TIMEOUT_MS: u64 = 10_000;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let directory = tempfile::tempdir()?;
//! # // SAFETY: this program has only one thread so far.
//! # unsafe { std::env::set_var("CXL_STATE_DIR", directory.path()) };
//! let spec = PoolSpec::parse(&format!("{},size=64M", directory.path().join("pool").display()))?;
//! Pool::format(&spec, &FormatOptions::default())?; // once in the life of a pool
//!
//! let pool = Pool::open(&spec, &OpenOptions::default())?;
//! let host = pool.join(HostConfig::from_env()?)?;
//! let service = host.serve()?; // heartbeat, recalls, fences, and the manager's work if it falls to this machine
//! let allocator = Allocator::attach(&host, LocalArea::of(&host)?, AllocConfig::default())?;
//! let objects = Objects::new(&host);
//! let memory = pool.lines().memory();
//!
//! // Publish: a kept block outlives this process and host. Its bytes are in the memory before its name is.
//! let text = b"the same bytes on every host";
//! let block = allocator.alloc(text.len() as u64)?;
//! allocator.keep(block.offset)?;
//! memory.copy_in(block.offset, text)?;
//! memory.fence_stores();
//! objects.put(b"greeting", block.offset, text.len() as u64, TIMEOUT_MS)?;
//!
//! // Fetch, on any host: drop what this host's caches may hold, then copy.
//! let found = objects.get(b"greeting", TIMEOUT_MS)?;
//! let mut bytes = vec![0; found.len_bytes as usize];
//! memory.flush_range(found.offset, found.len_bytes)?;
//! memory.fence_all();
//! memory.copy_out(found.offset, &mut bytes)?;
//! memory.fence_loads();
//! assert_eq!(bytes, text);
//!
//! // Change it under a lock, which excludes threads, processes and hosts. A number of a lock means the same everywhere.
//! let lock = allocate_lock(&host, TIMEOUT_MS)?;
//! let mut guard = host.acquire(lock, TIMEOUT_MS)?;
//! if guard.needs_repair() {
//!     // A holder before did not get to the end: make what the lock protects whole, then say so.
//!     guard.repaired();
//! }
//! memory.copy_in(block.offset, b"THE")?;
//! memory.fence_stores();
//! drop(guard);
//!
//! objects.destroy(b"greeting", TIMEOUT_MS)?;
//! allocator.free(block.offset)?;
//! allocator.close()?;
//! drop(service);
//! host.leave()?;
//! # Ok(())
//! # }
//! ```
//!
//! Every error says what failed, where and what to do. After [`Error::Fenced`] the outcome of the call is *unknown*: this host was taken
//! for dead, it joins again by itself, and the caller looks whether its change is there.
//!
//! # Environment
//!
//! | variable | what it says | without it |
//! |---|---|---|
//! | `CXL_POOL` | devices of the pool ([`PoolSpec`](device::PoolSpec)): `/dev/dax0.0,/dev/dax1.0`, `/dev/shm/kv,size=1G`; part of a device: `/dev/dax0.0,offset=64G,size=64G`; metadata on another device: `/dev/dax0.0,metadata=/dev/dax1.0` | required |
//! | `CXL_MACHINE_ID` | identity of this machine: 32 hexadecimal digits, or any text, which is hashed, and which commands and metrics show. **No two machines may share one** | from `/etc/machine-id` and the path of the state directory |
//! | `CXL_STATE_DIR` | absolute path of a local directory where this machine's processes find each other | `/dev/shm/cxl-pool-UID` |
//! | `CXL_SUSPECT_MS` | milliseconds of silence until a host is fenced; **equal on every host**. After a manager's machine died, lock grants resume within 1.5 times this value; waits without their own time-out last 3 times this value plus 5 s, at least 10 s | 1000 |
//! | `CXL_POLL_US` | microseconds between looks for recalls and fences; may delay a contended lock by as much | 1000 |
//! | `CXL_COHERENCE` | `native`, `native:write=avx512,flush=clflushopt`, or `emulated:seed=7,noise=4` | `native`, with the best instructions of the CPU |
//! | `CXL_COPY` | how payload is copied: `engine=cpu,workers=3,window=2M` and more ([`CopyConfig`](copy::CopyConfig)); `read_ahead=auto` (or 1 to 8 blocks) prefetches the next blocks from devices with flash | an accelerator if there is one, else the CPU |
//! | `CXL_CPUS` | CPUs of the pool's threads: `node:1`, `device`, a list such as `0-3,8`; or for each kind `copy=device;upkeep=0-1;workers=node:1` (docs/operating/cxlctl.md) | where the process runs |
//! | `CXL_CUDA_LIBRARY` | the CUDA driver, loaded when memory of a GPU is first copied; `none` = such copies are refused | `libcuda.so.1` |
//! | `CXL_CUDA_REGISTER_BYTES` | how much of the pool, from its beginning, is registered with the driver while a GPU is opened: `64G`; `0` = none. A copy registers the rest when it first needs it | all |
//! | `CXL_CUDA_THREADS` | threads that register the pool with the driver, and that flush payload around the copies of a GPU | 4, at most half of the CPUs |
//! | `CXL_CUDA_DMA` | `cached`: payload that GPUs copy is flushed around their copies. `uncached`: it is not, because **on this host** the pool's memory is uncacheable and DDIO is off (docs/internals/gpu.md says how to know) | `cached` |

pub mod alloc;
pub mod background;
pub mod cache;
pub mod coherence;
pub mod copy;
pub mod cpus;
mod crc;
pub mod device;
mod error;
mod failure_detector;
pub mod fault;
pub mod fsck;
pub mod host;
pub mod limits;
pub mod line;
pub mod lock;
pub mod lock_table;
pub mod machine;
mod machine_id;
pub mod media;
pub mod metrics;
mod named;
pub mod objects;
pub mod platform;
pub mod pool;
pub mod record;
pub mod ring;

pub use cache::Cache;
pub use error::{ERROR_CLASSES, Error, PartitionProblem, Result, display_path, escaped};
pub use host::Host;
pub use pool::Pool;
