// SPDX-License-Identifier: Apache-2.0
//! One process serves, the others connect to it again and again, for messages in both directions or for calls, while hosts and processes
//! crash, restart, stand still and are fenced. Every process also uses and gives back blocks of the size of the rings' own.
//!
//! Checked: every message is the next one that the other end sent, byte for byte; a connection that ends in good order has lost none; each
//! connection is accepted once; each response is that of its own request; no end writes to memory that was given back; a call that waits
//! a loss of the other end is reported; and every block of the rings is given back once.

use super::setup::{Cluster, join, no_line_half_done};
use crate::{Env, Failure, Fault, Planned, SimProcess, Stats, WritePath};
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea, audit};
use cxl_pool::host::HostConfig;
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Line;
use cxl_pool::ring::rpc::{Client, Server};
use cxl_pool::ring::{Connection, Receiver, RingConfig, Rings, Sender};
use cxl_pool::{Error, Result};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

const NAME: &[u8] = b"service";
/// Size of a half: 14 slots.
const RING_BYTES: u64 = 1024;
/// Longest wait for an end that lives: far beyond every pause.
const PATIENCE_MS: u64 = 500;
/// Connections that each start of a process makes.
const SESSIONS: usize = 4;
/// Attempts to get one.
const ATTEMPTS: usize = 100;

/// What the ends know of one connection.
#[derive(Default)]
struct Session {
    /// Messages sent by the connector and by the listener.
    sent: [u64; 2],
    accepted: bool,
}

#[derive(Default)]
struct Ledger {
    sessions: BTreeMap<u64, Session>,
    /// The last start of each caller, and those that are through.
    callers: BTreeMap<usize, SimProcess>,
    through: BTreeSet<usize>,
    /// The last start of the server, and connections that it is through with.
    server: Option<SimProcess>,
    given_up: u64,
    /// The server has ended: no call is answered any more.
    over: bool,
    received: u64,
    answered: u64,
}

type Shared = Rc<RefCell<Ledger>>;

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with one more fault.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let hosts = crate::Random::new(seed).pick(&[2, 2, 2, 3, 4]);
    let mut cluster = Cluster::new(seed, hosts, hosts, |config, _| {
        no_line_half_done(config, seed);
        if matches!(planned, Some(Planned { fault: Fault::CrashMachine { .. }, .. })) {
            config.write_path = WritePath::OneUnit;
        }
    });
    let ledger = Shared::default();
    // Callers on every host, the server's own among them.
    for (index, host) in cluster.hosts.clone().into_iter().enumerate() {
        if index == 0 {
            start(&mut cluster, &ledger, host, None);
        }
        if index > 0 || hosts == 2 {
            start(&mut cluster, &ledger, host, Some(index));
        }
    }
    if let Some(planned) = planned {
        cluster.world.plan(planned);
    }
    let stats = cluster.world.run()?;
    let ledger = ledger.borrow();
    if ledger.received + ledger.answered == 0 && stats.crashes + stats.pauses == 0 {
        return Err(cluster.world.failure("nothing was ever received: nothing was tested"));
    }
    match audit(&cluster.world.inspector()) {
        // The doors, and those of processes that died, or were fenced, while they made them: two processes a host at most.
        Ok(audit) if audit.kept_blocks <= 1 + 2 * (stats.crashes + stats.pauses) => Ok(stats),
        other => Err(cluster.world.failure(format!("R5: more is kept than the doors: {other:?}"))),
    }
}

/// Starts the server, or caller `caller`.
fn start(cluster: &mut Cluster, ledger: &Shared, host: crate::SimHost, caller: Option<usize>) {
    let (ledger, config) = (Rc::clone(ledger), cluster.host_config.clone());
    cluster.world.start(host, move |env| {
        let (ledger, config) = (Rc::clone(&ledger), config.clone());
        match caller {
            Some(caller) => _ = ledger.borrow_mut().callers.insert(caller, env.process()),
            None => ledger.borrow_mut().server = Some(env.process()),
        }
        env.spawn(if caller.is_some() { "caller" } else { "server" }, move |env| main(&env, &ledger, &config, caller));
    });
}

/// The content of message `number` of end `end`, with a length of its own.
fn message(key: u64, end: usize, number: u64) -> Vec<u8> {
    let seed = (key * 2 + end as u64) << 16 | number;
    let len_bytes =
        if number == 0 && end == 0 { 8 } else { [0, 1, 40, 48, 49, 64, 100, 300][(seed.wrapping_mul(0x9e37_79b9) >> 7) as usize % 8] };
    let mut bytes: Vec<u8> = (0..len_bytes).map(|at| (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (at % 57)) as u8 ^ at as u8).collect();
    if number == 0 && end == 0 {
        bytes.copy_from_slice(&key.to_le_bytes());
    }
    bytes
}

fn main(env: &Env, ledger: &Shared, config: &HostConfig, caller: Option<usize>) -> Result<()> {
    let host = join(env, config)?;
    let alloc_config = AllocConfig { lock_timeout_ms: Some(500_000), spare_chunks: 1 };
    let allocator = Arc::new(again(env, || Allocator::attach(&host, LocalArea::of(&host)?, alloc_config.clone()))?);
    let ring_config = RingConfig { ring_bytes: RING_BYTES, beat_ms: 1, peer_timeout_ms: 30, check_ms: 1, names_timeout_ms: 500_000 };
    let rings = again(env, || Rings::new(&host, Arc::clone(&allocator), ring_config.clone()))?;
    let beating = rings.clone();
    env.spawn_daemon("beat", move |env| {
        loop {
            tolerated(beating.beat())?;
            env.platform().sleep_ns(500_000);
        }
    });
    let busy = Rc::new(RefCell::new(0usize));
    recycle(env, &allocator, &busy);
    match caller {
        Some(caller) => {
            call(env, ledger, &rings, caller, &busy)?;
            ledger.borrow_mut().through.insert(caller);
        }
        None => serve(env, ledger, &rings, &busy)?,
    }
    while *busy.borrow() > 0 {
        env.platform().sleep_ns(500_000);
    }
    let usage = allocator.usage();
    if usage.scratch_bytes != 0 || usage.rejected_frees != 0 {
        env.fail(format!("R5: not every block was given back once: {usage:?}"));
    }
    Ok(())
}

/// What a fence, or a line of a writer that is stopped, may do to any call.
fn tolerated(result: Result<()>) -> Result<()> {
    match result {
        Err(Error::Fenced { .. } | Error::BadLine { .. }) => Ok(()),
        other => other,
    }
}

fn again<T>(env: &Env, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 0..400 {
        match work() {
            Err(Error::Fenced { .. } | Error::BadLine { .. }) => env.platform().sleep_ns(500_000),
            other => return other,
        }
    }
    work()
}

/// Runs `work` on a thread that the process waits for.
fn beside(env: &Env, busy: &Rc<RefCell<usize>>, name: &str, work: impl FnOnce(&Env) -> Result<()> + 'static) {
    *busy.borrow_mut() += 1;
    let busy = Rc::clone(busy);
    env.spawn(name, move |env| {
        let result = work(&env);
        *busy.borrow_mut() -= 1;
        result
    });
}

/// Uses and gives back blocks of the size of a half: a process that still writes to memory that is not its own any more is seen here.
fn recycle(env: &Env, allocator: &Arc<Allocator>, busy: &Rc<RefCell<usize>>) {
    let allocator = Arc::clone(allocator);
    beside(env, busy, "recycler", move |env| {
        for round in 0..60u8 {
            let block = match allocator.alloc(RING_BYTES) {
                Ok(block) => block,
                Err(Error::Fenced { .. } | Error::Full { .. }) => continue,
                Err(error) => return Err(error),
            };
            let offsets = || (block.offset..block.offset + RING_BYTES).step_by(LINE_BYTES);
            let line = |offset: u64| Line([round ^ (offset / LINE_BYTES as u64) as u8; LINE_BYTES]);
            let lines = env.lines();
            for offset in offsets() {
                lines.memory().write_line(offset, &line(offset))?;
            }
            lines.memory().fence_all();
            env.platform().sleep_ns(env.below(300_000) as u64);
            for offset in offsets() {
                if lines.fetch_raw(offset)? != line(offset) {
                    env.fail(format!("R4: another process wrote to {offset:#x}, which was given back"));
                }
            }
            allocator.free(block.offset)?;
        }
        Ok(())
    });
}

fn serve(env: &Env, ledger: &Shared, rings: &Rings, busy: &Rc<RefCell<usize>>) -> Result<()> {
    let mut listener = again(env, || rings.listen(NAME))?;
    while !is_quiet(env, &ledger.borrow()) {
        match listener.accept(2) {
            Ok(connection) => {
                let ledger = Rc::clone(ledger);
                beside(env, busy, "answers", move |env| answer(env, &ledger, connection));
            }
            Err(Error::Timeout { .. } | Error::Fenced { .. } | Error::BadLine { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    ledger.borrow_mut().over = true;
    tolerated(listener.close())
}

/// Whether every caller that lives is through.
fn is_quiet(env: &Env, ledger: &Ledger) -> bool {
    let is_done = |(caller, process): (&usize, &SimProcess)| ledger.through.contains(caller) || !env.view(|view| view.is_alive(*process));
    ledger.callers.iter().all(is_done)
}

fn call(env: &Env, ledger: &Shared, rings: &Rings, caller: usize, busy: &Rc<RefCell<usize>>) -> Result<()> {
    for session in 0..SESSIONS {
        let Some(connection) = connect(env, ledger, rings)? else { return Ok(()) };
        let key = (env.process().0 as u64) << 16 | (caller as u64) << 8 | (session as u64 + 1);
        ledger.borrow_mut().sessions.insert(key, Session::default());
        match env.below(4) {
            0 => call_some(env, ledger, connection, key)?,
            1 => apart(env, busy, ledger, connection, key)?,
            _ => talk(env, ledger, connection, key, 0)?,
        }
    }
    Ok(())
}

/// Counts a connection as given up when it is dropped: it is declared after the connection, so that it is dropped first, whose
/// thread may stand still between the two.
struct GivesUp<'a>(&'a Shared);

impl Drop for GivesUp<'_> {
    fn drop(&mut self) {
        self.0.borrow_mut().given_up += 1;
    }
}

/// Changes whenever the server may have given up a connection.
fn server_state(env: &Env, ledger: &Shared) -> (Option<SimProcess>, bool, u64) {
    let ledger = ledger.borrow();
    (ledger.server, ledger.server.is_some_and(|server| env.view(|view| view.is_alive(server))), ledger.given_up)
}

fn connect(env: &Env, ledger: &Shared, rings: &Rings) -> Result<Option<Connection>> {
    for _ in 0..ATTEMPTS {
        let before = server_state(env, ledger);
        match rings.connect(NAME, 300) {
            Ok(connection) => return Ok(Some(connection)),
            Err(Error::PeerGone { reason, .. }) if reason.starts_with("its half") && before == server_state(env, ledger) => {
                env.fail("R3: a listener answered with a half that is not there");
            }
            Err(Error::NotFound(_) | Error::PeerGone { .. } | Error::Timeout { .. } | Error::Fenced { .. } | Error::BadLine { .. }) => {}
            Err(error) => return Err(error),
        }
        if ledger.borrow().over {
            return Ok(None);
        }
        env.platform().sleep_ns(1_000_000);
    }
    Ok(None)
}

/// The ways in which a connection may end for one end while the other one has a fault.
fn ended(env: &Env, error: Error) -> Result<()> {
    match error {
        Error::PeerGone { .. } | Error::PeerClosed { .. } | Error::Fenced { .. } => Ok(()),
        Error::Timeout { what, .. } => {
            env.fail(format!("R4: {what}: neither came nor was said to be gone"));
            Ok(())
        }
        other => Err(other),
    }
}

/// Takes the next message of end `from`, if it is there, and checks it.
fn take(env: &Env, ledger: &Shared, receiver: &mut Receiver, key: u64, from: usize, received: &mut u64) -> Result<bool> {
    let mut got = Vec::new();
    match receiver.try_recv(&mut got) {
        Ok(false) => return Ok(false),
        Ok(true) => {}
        Err(error) => {
            let sent = ledger.borrow().sessions.get(&key).map_or(0, |session| session.sent[from]);
            if matches!(error, Error::PeerClosed { .. }) && *received != sent {
                env.fail(format!("R2: a close in good order after {received} of {sent} messages"));
            }
            return Err(error);
        }
    }
    let sent = ledger.borrow().sessions.get(&key).map_or(0, |session| session.sent[from]);
    if got != message(key, from, *received) || *received >= sent {
        env.fail(format!("R1: message {received} of {sent} of end {from} is another one ({} bytes)", got.len()));
    }
    *received += 1;
    ledger.borrow_mut().received += 1;
    Ok(true)
}

/// Sends the next message of end `end` if there is room. It counts as sent from before it can arrive.
fn put(env: &Env, ledger: &Shared, sender: &mut Sender, key: u64, end: usize, sent: &mut u64) -> Result<bool> {
    let set = |sent| {
        if let Some(session) = ledger.borrow_mut().sessions.get_mut(&key) {
            session.sent[end] = sent;
        }
    };
    set(*sent + 1);
    match sender.try_push(&[&message(key, end, *sent)]) {
        Ok(true) => *sent += 1,
        other => {
            set(*sent);
            return other;
        }
    }
    if env.below(3) > 0 {
        sender.flush();
    }
    Ok(true)
}

/// Sends and receives some messages in any order, then closes in good order or does not.
fn talk(env: &Env, ledger: &Shared, mut connection: Connection, key: u64, end: usize) -> Result<()> {
    let _gives_up = (end == 1).then_some(GivesUp(ledger));
    // Both ends know how many there are.
    let wanted = 3 + key % 20;
    let (mut sent, mut received, mut idle_since_ns) = (0, u64::from(end == 1), None);
    while sent < wanted || received < wanted {
        let mut moved = false;
        let step = |connection: &mut Connection, moved: &mut bool| -> Result<()> {
            if sent < wanted && env.below(2) == 0 {
                *moved |= put(env, ledger, connection.sender(), key, end, &mut sent)?;
            }
            if received < wanted && env.below(2) == 0 {
                *moved |= take(env, ledger, connection.receiver(), key, 1 - end, &mut received)?;
            }
            if sent == wanted {
                connection.sender().flush();
            }
            Ok(())
        };
        let mut step = step;
        if let Err(error) = step(&mut connection, &mut moved) {
            return ended(env, error);
        }
        let now_ns = env.platform().now_ns();
        let since_ns = *idle_since_ns.get_or_insert(now_ns);
        if moved {
            idle_since_ns = None;
        } else if now_ns - since_ns > PATIENCE_MS * 1_000_000 {
            env.fail(format!("R4: end {end} had {sent} and {received} of {wanted}, and nothing came or was said to be gone"));
            return Ok(());
        } else {
            connection.sender().flush();
            env.platform().relax(16);
        }
    }
    if end == 0 && env.below(3) == 0 {
        return Ok(());
    }
    if end == 1 {
        // The other end closes, or is dropped after it has received everything.
        let mut got = Vec::new();
        return match connection.recv(&mut got, PATIENCE_MS) {
            Ok(()) => {
                env.fail("R1: a message that was not sent");
                Ok(())
            }
            Err(error) => ended(env, error),
        };
    }
    connection.close(PATIENCE_MS).or_else(|error| ended(env, error))
}

/// The two directions on two threads, given up in the middle.
fn apart(env: &Env, busy: &Rc<RefCell<usize>>, ledger: &Shared, connection: Connection, key: u64) -> Result<()> {
    let (mut sender, mut receiver) = connection.split();
    let sending = Rc::clone(ledger);
    beside(env, busy, "sends", move |env| {
        let mut sent = 0;
        for _ in 0..1 + env.below(3) {
            if let Err(error) = put(env, &sending, &mut sender, key, 0, &mut sent) {
                return ended(env, error);
            }
        }
        drop(sender);
        // What this thread has written and not fenced would still be on its way.
        env.platform().sleep_ns(2_000_000);
        Ok(())
    });
    let mut received = 0;
    for _ in 0..env.below(20) {
        if let Err(error) = take(env, ledger, &mut receiver, key, 1, &mut received) {
            return ended(env, error);
        }
    }
    Ok(())
}

/// Calls, some of them with deadlines that pass.
fn call_some(env: &Env, ledger: &Shared, connection: Connection, key: u64) -> Result<()> {
    let mut connection = connection;
    let mut hello = message(key, 0, 0);
    hello.push(0);
    if let Err(error) = connection.send(&hello, PATIENCE_MS) {
        return ended(env, error);
    }
    let depth = 1 + env.below(4);
    let mut client = Client::new(connection, depth)?;
    let mut under_way = BTreeMap::new();
    let mut response = Vec::new();
    let mut begun = 0u64;
    while begun < 12 || !under_way.is_empty() {
        if begun < 12 && under_way.len() < depth {
            let request = [key.to_le_bytes(), begun.to_le_bytes()].concat();
            let timeout_ms = if env.below(3) == 0 { 1 } else { PATIENCE_MS };
            match client.submit(&request, timeout_ms) {
                Ok(call) => _ = under_way.insert(format!("{call:?}"), (request, timeout_ms)),
                Err(Error::Timeout { .. }) if timeout_ms == 1 => {}
                Err(error) => return ended(env, error),
            }
            begun += 1;
            client.flush();
        }
        let completion = match client.poll(&mut response) {
            Ok(Some(completion)) => completion,
            Ok(None) => {
                env.platform().relax(16);
                continue;
            }
            Err(error) => return ended(env, error),
        };
        let Some((request, timeout_ms)) = under_way.remove(&format!("{:?}", completion.call)) else {
            env.fail("R3: a call was done twice");
            return Ok(());
        };
        match completion.status {
            Ok(7) if response == request.iter().map(|byte| !byte).collect::<Vec<u8>>() => ledger.borrow_mut().answered += 1,
            Ok(status) => env.fail(format!("R3: status {status} and {} bytes are not the answer to this call", response.len())),
            Err(Error::Timeout { .. }) if timeout_ms == 1 => {}
            Err(error) => return ended(env, error),
        }
    }
    Ok(())
}

/// The server's end: the first message says whose connection it is and what it is for.
fn answer(env: &Env, ledger: &Shared, mut connection: Connection) -> Result<()> {
    let _gives_up = GivesUp(ledger);
    let mut hello = Vec::new();
    if let Err(error) = connection.recv(&mut hello, PATIENCE_MS) {
        return ended(env, error);
    }
    let key = hello.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let is_right = {
        let mut ledger = ledger.borrow_mut();
        let session = ledger.sessions.get_mut(&key).filter(|_| hello.len() <= 9);
        session.is_some_and(|session| !std::mem::replace(&mut session.accepted, true))
    };
    if !is_right {
        env.fail(format!("R1: a connection that was accepted before, or never asked for, began with {hello:02x?}"));
        return Ok(());
    }
    if hello.len() == 8 {
        return talk(env, ledger, connection, key, 1);
    }
    let mut server = Server::new(connection);
    let _gives_up = GivesUp(ledger);
    let (mut request, mut waiting) = (Vec::new(), Vec::new());
    loop {
        match server.next(&mut request) {
            Ok(Some(ticket)) => waiting.push((ticket, request.clone())),
            Ok(None) => env.platform().relax(16),
            Err(error) => return ended(env, error),
        }
        if !waiting.is_empty() && env.below(3) == 0 {
            let (ticket, request) = waiting.swap_remove(env.below(waiting.len()));
            let response: Vec<u8> = request.iter().map(|byte| !byte).collect();
            if let Err(error) = server.reply(ticket, 7, &response, PATIENCE_MS) {
                return ended(env, error);
            }
            server.flush();
        }
    }
}
