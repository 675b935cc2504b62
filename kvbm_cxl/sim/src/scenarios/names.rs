// SPDX-License-Identifier: Apache-2.0
//! Processes listen under a few names in a table with room for fewer, close or leave them, and take over what others left, while each of
//! them may stand still between a look at a name and the change that follows from it. One more name is a root, which nobody listens under.
//!
//! Checked: a listener that was never silent keeps its name until it closes; the root stays bound to what it was bound to, whoever asks for
//! its name or for the room that it takes.

use super::directed::{self, MS, at};
use super::setup::join;
use crate::{Env, Failure, Fault, Planned, Stats, WritePath};
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::objects::Objects;
use cxl_pool::ring::{Listener, RingConfig, Rings};
use cxl_pool::{Error, Result};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Names that processes listen under.
const NAMES: [&[u8]; 3] = [b"one", b"two", b"three"];
/// A name of another kind.
const ROOT: &[u8] = b"root";
/// Cells of the table: the root, the doors, and room for one or two listeners.
const CELLS: [u32; 2] = [3, 4];
/// The processes go on until then.
const UNTIL_NS: u64 = 120 * MS;
/// A process that was not seen to live for this long counts as gone.
const PEER_TIMEOUT_MS: u64 = 8;
/// Where the processes stand still.
const POINTS: [&str; 4] = ["ring.unlistening", "ring.taking_over", "ring.forgetting", "ring.listening"];

/// What the processes have done.
#[derive(Default)]
struct Ledger {
    /// Where the root is, once somebody has bound it.
    root: Option<u64>,
    listened: u64,
}

type Shared = Rc<RefCell<Ledger>>;

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with one more fault.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let hosts = crate::Random::new(seed).pick(&[2, 3]);
    let path = match planned {
        Some(Planned { fault: Fault::CrashMachine { .. }, .. }) => WritePath::OneUnit,
        _ => directed::write_path(seed),
    };
    let mut cluster = super::setup::Cluster::new(seed, hosts, hosts, |config, random| {
        config.write_path = path;
        config.geometry.objects = random.pick(&CELLS);
        config.chances = crate::Chances::default();
    });
    for _ in 0..cluster.random.between(2, 12) {
        let random = &mut cluster.random;
        // Mostly for longer than the others wait for a process.
        let longest = random.pick(&[2 * MS, 12 * MS, 30 * MS]);
        let fault = match random.below(6) {
            0 => directed::crash(random, path),
            _ => Fault::PauseThread { for_ns: random.between(MS / 2, longest) },
        };
        let planned = at(random.pick(&POINTS), random.between(1, 12), None, fault);
        cluster.world.plan(planned);
    }
    if let Some(planned) = planned {
        cluster.world.plan(planned);
    }
    let ledger = Shared::default();
    for host in cluster.hosts.clone() {
        let (ledger, config) = (Rc::clone(&ledger), cluster.host_config.clone());
        cluster.world.start(host, move |env| {
            let (ledger, config) = (Rc::clone(&ledger), config.clone());
            env.spawn("main", move |env| main(&env, &ledger, &config));
        });
    }
    let stats = cluster.world.run()?;
    if ledger.borrow().listened == 0 {
        return Err(cluster.world.failure("nobody ever listened: nothing was tested"));
    }
    Ok(stats)
}

/// What a fence, a full table, another's name or a writer that stands still may do to any call.
fn tolerated<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(done) => Ok(Some(done)),
        Err(Error::Fenced { .. } | Error::BadLine { .. } | Error::Timeout { .. } | Error::Exists(_) | Error::Full { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn main(env: &Env, ledger: &Shared, config: &HostConfig) -> Result<()> {
    let host = join(env, config)?;
    let alloc_config = AllocConfig { lock_timeout_ms: 500_000, spare_chunks: 1 };
    let allocator = Arc::new(Allocator::attach(&host, LocalArea::of(&host)?, alloc_config)?);
    bind_root(env, ledger, &host, &allocator)?;
    let ring_config = RingConfig { ring_bytes: 1024, beat_ms: 1, peer_timeout_ms: PEER_TIMEOUT_MS, check_ms: 1, names_timeout_ms: 500_000 };
    let rings = loop {
        match tolerated(Rings::new(&host, Arc::clone(&allocator), ring_config.clone()))? {
            Some(rings) => break rings,
            None => env.platform().sleep_ns(MS),
        }
    };
    while env.global_ns() < UNTIL_NS {
        let began_ns = env.global_ns();
        let name = if env.below(6) == 0 { ROOT } else { NAMES[env.below(NAMES.len())] };
        if let Some(listener) = tolerated(rings.listen(name))? {
            if name == ROOT {
                env.fail("N2: somebody listens under the name of a root");
            }
            ledger.borrow_mut().listened += 1;
            listen(env, &host, &rings, listener, began_ns)?;
        }
        look_at_root(env, ledger, &host)?;
        env.platform().sleep_ns(env.below(2 * MS as usize) as u64);
    }
    Ok(())
}

/// Binds the root if nobody has, to a block that stays.
fn bind_root(env: &Env, ledger: &Shared, host: &Host, allocator: &Allocator) -> Result<()> {
    if ledger.borrow().root.is_some() {
        return Ok(());
    }
    ledger.borrow_mut().root = Some(0);
    let block = allocator.alloc(4096)?;
    allocator.keep(block.offset)?;
    while tolerated(Objects::new(host).put(ROOT, block.offset, block.len_bytes, 500_000))?.is_none() {
        env.platform().sleep_ns(MS);
    }
    ledger.borrow_mut().root = Some(block.offset);
    Ok(())
}

fn look_at_root(env: &Env, ledger: &Shared, host: &Host) -> Result<()> {
    let Some(root) = ledger.borrow().root.filter(|root| *root != 0) else { return Ok(()) };
    match Objects::new(host).get(ROOT, 500_000) {
        Ok(found) if found.offset == root && !found.is_listener => Ok(()),
        Err(Error::Fenced { .. } | Error::BadLine { .. } | Error::Timeout { .. }) => Ok(()),
        other => {
            env.fail(format!("N2: the root at {root:#x} is {other:?}"));
            Ok(())
        }
    }
}

/// Listens for a while; whoever looks in again and again is never silent.
fn listen(env: &Env, host: &Host, rings: &Rings, mut listener: Listener, began_ns: u64) -> Result<()> {
    let incarnation = host.incarnation();
    let (until_ns, mut last_ns) = (env.global_ns() + env.below(8 * MS as usize) as u64, began_ns);
    let mut was_silent = false;
    while env.global_ns() < until_ns {
        let accepted = listener.try_accept();
        was_silent |= env.global_ns() - last_ns > PEER_TIMEOUT_MS * MS / 2;
        last_ns = env.global_ns();
        match accepted {
            Ok(_) | Err(Error::Fenced { .. } | Error::BadLine { .. }) => {}
            Err(Error::NotFound(_)) => {
                let is_member = host.incarnation() == incarnation && rings.beat().is_ok();
                if is_member && !was_silent {
                    env.fail("N1: a listener that was never silent has lost its name");
                }
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        env.platform().sleep_ns(MS / 4);
    }
    match env.below(3) {
        0 => drop(listener),
        _ => _ = tolerated(listener.close())?,
    }
    Ok(())
}
