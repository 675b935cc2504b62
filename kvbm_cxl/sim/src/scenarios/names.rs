// SPDX-License-Identifier: Apache-2.0
//! Processes listen under a few names in a table with room for fewer, close or leave them, and take over what others left, while each of
//! them may stand still between a look at a name and the change that follows from it. One more name is a root, under which no process
//! listens.
//!
//! Checked: a listener that was never silent keeps its name until it closes; the root stays bound to what it was bound to, whichever
//! process asks for its name or for the room that it takes.

use super::directed::{self, MS, at};
use super::setup::join;
use crate::{Env, Failure, Fault, Planned, Stats, WritePath};
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::objects::Objects;
use cxl_pool::ring::{Listener, RingConfig, Rings};
use cxl_pool::{Error, Result};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// Names that processes listen under.
const NAMES: [&[u8]; 3] = [b"one", b"two", b"three"];
/// A name of another kind.
const ROOT: &[u8] = b"root";
/// Cells of the table: the root, the doors, and room for one or two listeners.
const CELLS: [u32; 2] = [3, 4];
/// The processes run until then.
const UNTIL_NS: u64 = 120 * MS;
/// A process that was not seen to live for this long counts as gone.
const PEER_TIMEOUT_MS: u64 = 8;
/// Where the processes stand still.
const POINTS: [&str; 4] = ["ring.unlistening", "ring.taking_over", "ring.forgetting", "ring.listening"];

/// What the processes have done.
#[derive(Default)]
struct Ledger {
    /// Where the root is, once it is bound.
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
        return Err(cluster.world.failure("no process ever listened: nothing was tested"));
    }
    Ok(stats)
}

/// One listener stands still in the middle of its close, for longer than the others wait for it, and another one takes its name over.
pub fn closes_late(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = super::setup::Cluster::new(seed, 2, 2, |config, _| {
        config.write_path = directed::write_path(seed);
        config.chances = crate::Chances::default();
    });
    let [closer, heir] = [cluster.hosts[0], cluster.hosts[1]];
    cluster.world.plan(at("ring.unlistening", 1, Some(closer), Fault::PauseThread { for_ns: u64::MAX }));
    let (listens, closed) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
    for (host, is_closer) in [(closer, true), (heir, false)] {
        let (config, listens, closed) = (cluster.host_config.clone(), Rc::clone(&listens), Rc::clone(&closed));
        cluster.world.spawn(host, "main", move |env| {
            let wait = |cue: &Cell<bool>| {
                while !cue.get() {
                    env.platform().sleep_ns(MS / 4);
                }
            };
            let host = join(&env, &config)?;
            let rings = rings(&env, &host)?;
            if is_closer {
                let listener = listen_at_last(&env, &rings)?;
                listens.set(true);
                _ = tolerated(listener.close())?;
                closed.set(true);
                return Ok(());
            }
            wait(&listens);
            let _listener = listen_at_last(&env, &rings)?;
            env.resume(closer);
            wait(&closed);
            match Objects::new(&host).get(NAMES[0], 500_000) {
                Err(Error::NotFound(_)) => env.fail("N1: a listener has lost its name to one that was closing"),
                other => _ = tolerated(other)?,
            }
            Ok(())
        });
    }
    cluster.world.run()
}

/// One process stands still between its look at a name that was left and its taking that over, and another one takes it over meanwhile.
pub fn takes_over_late(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = super::setup::Cluster::new(seed, 3, 3, |config, _| {
        config.write_path = directed::write_path(seed);
        config.chances = crate::Chances::default();
    });
    // A host that is fenced cannot say that it lives.
    cluster.host_config.suspect_ms = 10_000;
    let [leaver, late, heir] = [cluster.hosts[0], cluster.hosts[1], cluster.hosts[2]];
    cluster.world.plan(at("ring.taking_over", 1, Some(late), Fault::PauseThread { for_ns: u64::MAX }));
    let (left, asked) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
    for host in [leaver, late, heir] {
        let (config, left, asked) = (cluster.host_config.clone(), Rc::clone(&left), Rc::clone(&asked));
        cluster.world.spawn(host, "main", move |env| {
            let host = join(&env, &config)?;
            let rings = rings(&env, &host)?;
            if env.host() == leaver {
                drop(listen_at_last(&env, &rings)?);
                left.set(true);
                return Ok(());
            }
            let is_late = env.host() == late;
            let stands = || env.view(|view| view.visits_by(late, "ring.taking_over")) > 0;
            while !left.get() || !(is_late || stands()) {
                env.platform().sleep_ns(MS / 4);
            }
            if is_late {
                if tolerated(rings.listen(NAMES[0]))?.is_some() {
                    env.fail("N1: a listener that was never silent has lost its name");
                }
                asked.set(true);
                return Ok(());
            }
            let mut listener = listen_at_last(&env, &rings)?;
            env.resume(late);
            while !asked.get() {
                _ = tolerated(listener.try_accept())?;
                env.platform().sleep_ns(MS / 4);
            }
            Ok(())
        });
    }
    cluster.world.run()
}

/// One process stands still between its look at a name that was left and its unbinding that to make room, and another one takes it over
/// meanwhile.
pub fn forgets_late(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = super::setup::Cluster::new(seed, 3, 3, |config, _| {
        config.write_path = directed::write_path(seed);
        config.chances = crate::Chances::default();
        // The doors, and room for one listener.
        config.geometry.objects = 2;
    });
    // A host that is fenced cannot say that it lives.
    cluster.host_config.suspect_ms = 10_000;
    let [leaver, late, heir] = [cluster.hosts[0], cluster.hosts[1], cluster.hosts[2]];
    cluster.world.plan(at("ring.forgetting", 1, Some(late), Fault::PauseThread { for_ns: u64::MAX }));
    let (left, asked) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
    for host in [leaver, late, heir] {
        let (config, left, asked) = (cluster.host_config.clone(), Rc::clone(&left), Rc::clone(&asked));
        cluster.world.spawn(host, "main", move |env| {
            let host = join(&env, &config)?;
            let rings = rings(&env, &host)?;
            if env.host() == leaver {
                drop(listen_at_last(&env, &rings)?);
                left.set(true);
                return Ok(());
            }
            let is_late = env.host() == late;
            let stands = || env.view(|view| view.visits_by(late, "ring.forgetting")) > 0;
            while !left.get() || !(is_late || stands()) {
                env.platform().sleep_ns(MS / 4);
            }
            if is_late {
                // Whether it finds room does not matter here: only whose it is.
                while !stands() {
                    _ = tolerated(rings.listen(NAMES[1]))?;
                }
                asked.set(true);
                return Ok(());
            }
            let mut listener = listen_at_last(&env, &rings)?;
            env.resume(late);
            while !asked.get() {
                _ = tolerated(listener.try_accept())?;
                env.platform().sleep_ns(MS / 4);
            }
            match Objects::new(&host).get(NAMES[0], 500_000) {
                Err(Error::NotFound(_)) => env.fail("N1: a listener that was never silent has lost its name"),
                other => _ = tolerated(other)?,
            }
            Ok(())
        });
    }
    cluster.world.run()
}

/// Listens under the first name as soon as it is free.
fn listen_at_last(env: &Env, rings: &Rings) -> Result<Listener> {
    loop {
        if let Some(listener) = tolerated(rings.listen(NAMES[0]))? {
            return Ok(listener);
        }
        env.platform().sleep_ns(MS / 4);
    }
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
    let allocator = allocator(&host)?;
    bind_root(env, ledger, &host, &allocator)?;
    let rings = rings_over(env, &host, &allocator)?;
    while env.global_ns() < UNTIL_NS {
        let began_ns = env.global_ns();
        let name = if env.below(6) == 0 { ROOT } else { NAMES[env.below(NAMES.len())] };
        if let Some(listener) = tolerated(rings.listen(name))? {
            if name == ROOT {
                env.fail("N2: a process listens under the name of a root");
            }
            ledger.borrow_mut().listened += 1;
            listen(env, &host, &rings, listener, began_ns)?;
        }
        look_at_root(env, ledger, &host)?;
        env.platform().sleep_ns(env.below(2 * MS as usize) as u64);
    }
    Ok(())
}

fn rings(env: &Env, host: &Host) -> Result<Rings> {
    rings_over(env, host, &allocator(host)?)
}

fn allocator(host: &Host) -> Result<Arc<Allocator>> {
    let alloc_config = AllocConfig { lock_timeout_ms: Some(500_000), spare_chunks: 1 };
    Ok(Arc::new(Allocator::attach(host, LocalArea::of(host)?, alloc_config)?))
}

fn rings_over(env: &Env, host: &Host, allocator: &Arc<Allocator>) -> Result<Rings> {
    let ring_config = RingConfig { ring_bytes: 1024, beat_ms: 1, peer_timeout_ms: PEER_TIMEOUT_MS, check_ms: 1, names_timeout_ms: 500_000 };
    loop {
        match tolerated(Rings::new(host, Arc::clone(allocator), ring_config.clone()))? {
            Some(rings) => return Ok(rings),
            None => env.platform().sleep_ns(MS),
        }
    }
}

/// Binds the root if it is not bound, to a block that stays.
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

/// Listens for a while; a listener that looks in again and again is never silent.
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
