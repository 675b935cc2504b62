// SPDX-License-Identifier: Apache-2.0
//! How connections end: one end closes, is given up or dies, while the other one looks the other way or has not received everything yet.
//! Each is a play of its own; the seed says which, and in what order its steps are taken.
//!
//! Checked: sent data arrives while its memory exists; a loss is never a close in good order (R2); a successful close was received
//! whole; and a waiting end learns when the other one is gone (R4).

use super::directed::{self, MS};
use super::setup::{Cluster, join};
use crate::{Chances, Env, Failure, Fault, Planned, SimHost, SimProcess, Stats, When};
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::host::HostConfig;
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Line;
use cxl_pool::ring::{Connection, RingConfig, Rings};
use cxl_pool::{Error, Result};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

const NAME: &[u8] = b"service";
/// Size of a half: 14 slots.
const RING_BYTES: u64 = 1024;
/// Blocks of that size that are reused: one of them is the half that was given back.
const REUSED: usize = 4;
/// Messages that are sent.
const MESSAGES: u64 = 3;
/// Longest wait for an end that lives, or for being told that it does not: far beyond the time after which it counts as gone.
const PATIENCE_MS: u64 = 300;
/// After so long a look at the other end is due again.
const LOOK_NS: u64 = 2 * MS;
/// Hosts are not taken for dead here.
const SUSPECT_MS: u64 = 10_000;
/// Where the receiver stands: it has found nothing, and is about to look at the other end.
const LOOKING: &str = "ring.looking";

/// What the sending end does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Sends and drops the connection while the receiver stands; the memory stays as it is.
    Dropped,
    /// The same, and the ring's memory is reused after the line that says that it was closed.
    RingReused,
    /// The same, and all of the memory is.
    HalfReused,
    /// Closes in good order while the receiver stands.
    Closed,
    /// Closes in good order, and the receiver drops the connection after the first message.
    ClosedUnread,
    /// Dies, and its host continues.
    Dead,
    /// Dies, and another process of its host gets its place.
    Replaced,
}

const ALL: [Ending; 7] =
    [Ending::Dropped, Ending::RingReused, Ending::HalfReused, Ending::Closed, Ending::ClosedUnread, Ending::Dead, Ending::Replaced];

impl Ending {
    /// The receiver stands until the sender has done its part.
    fn receiver_stands(self) -> bool {
        matches!(self, Ending::Dropped | Ending::RingReused | Ending::HalfReused | Ending::Closed)
    }
}

/// How far the play is.
#[derive(Default)]
struct Stage {
    listens: Cell<bool>,
    /// The visit of [`LOOKING`] at which the receiver stands, once it is going to.
    stands_at: Cell<Option<u64>>,
    sent: Cell<u64>,
    received: Cell<u64>,
    /// The sending process, once it is about to die.
    sender: Cell<Option<SimProcess>>,
    over: Cell<bool>,
}

impl Stage {
    fn wait(&self, env: &Env, is_so: impl Fn(&Stage) -> bool) {
        while !is_so(self) {
            env.platform().sleep_ns(MS / 10);
        }
    }
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    let ending = ALL[(seed % ALL.len() as u64) as usize];
    let mut cluster = Cluster::new(seed, 2, 2, |config, _| {
        // Every ending with either way of writing lines.
        config.write_path = directed::write_path(seed / ALL.len() as u64);
        config.chances = Chances::default();
    });
    // A host that is fenced because it is slow loses its connections as well.
    cluster.host_config.suspect_ms = SUSPECT_MS;
    let stage = Rc::new(Stage::default());
    let [receiver, sender]: [SimHost; 2] = [cluster.hosts[0], cluster.hosts[1]];
    let mut spawn = |host: SimHost, name: &str, work: fn(&Env, &Rc<Stage>, &HostConfig, Ending, SimHost) -> Result<()>| {
        let (stage, config) = (Rc::clone(&stage), cluster.host_config.clone());
        cluster.world.spawn(host, name, move |env| work(&env, &stage, &config, ending, receiver));
    };
    spawn(receiver, "receiver", receive);
    spawn(sender, "sender", send);
    if matches!(ending, Ending::Dead | Ending::Replaced) {
        spawn(sender, "keeper", keep);
    }
    if ending == Ending::Replaced {
        spawn(sender, "successor", succeed);
    }
    let stats = cluster.world.run()?;
    if stage.over.get() { Ok(stats) } else { Err(cluster.world.failure("the play did not come to its end")) }
}

fn rings(env: &Env, config: &HostConfig) -> Result<(Rings, Arc<Allocator>)> {
    let host = join(env, config)?;
    let alloc_config = AllocConfig { lock_timeout_ms: Some(500_000), spare_chunks: 1 };
    let allocator = Arc::new(Allocator::attach(&host, LocalArea::of(&host)?, alloc_config)?);
    let ring_config = RingConfig { ring_bytes: RING_BYTES, beat_ms: 1, peer_timeout_ms: 30, check_ms: 1, names_timeout_ms: 500_000 };
    let rings = again(env, || Rings::new(&host, Arc::clone(&allocator), ring_config.clone()))?;
    let beating = rings.clone();
    env.spawn_daemon("beat", move |env| {
        loop {
            beating.beat()?;
            env.platform().sleep_ns(MS / 2);
        }
    });
    Ok((rings, allocator))
}

/// Repeats what found a line half written: by this very process's other thread, or by the other end.
fn again<T>(env: &Env, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match work() {
            Err(Error::BadLine { .. } | Error::PeerGone { .. }) => env.platform().sleep_ns(MS / 10),
            other => return other,
        }
    }
}

/// The content of a message: each is one line.
fn message(number: u64) -> [u8; 8] {
    (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

fn receive(env: &Env, stage: &Rc<Stage>, config: &HostConfig, ending: Ending, _: SimHost) -> Result<()> {
    let (rings, _allocator) = rings(env, config)?;
    let mut listener = again(env, || rings.listen(NAME))?;
    stage.listens.set(true);
    let mut connection = listener.accept(PATIENCE_MS)?;
    if ending.receiver_stands() {
        let visit = 1 + env.view(|view| view.visits_by(env.host(), LOOKING));
        let fault = Fault::PauseThread { for_ns: u64::MAX };
        env.plan(Planned { when: When::Point(LOOKING, visit), host: Some(env.host()), fault });
        stage.stands_at.set(Some(visit));
    }
    let mut got = Vec::new();
    let error = loop {
        match connection.recv(&mut got, PATIENCE_MS) {
            Ok(()) if got == message(stage.received.get()) => stage.received.set(stage.received.get() + 1),
            Ok(()) => {
                env.fail(format!("R1: message {} is another one", stage.received.get()));
                return Ok(());
            }
            Err(error) => break error,
        }
        if ending == Ending::ClosedUnread {
            drop(connection);
            stage.over.set(true);
            return Ok(());
        }
    };
    judge(env, stage, ending, &error);
    stage.over.set(true);
    Ok(())
}

/// Whether the receiver's end came as it has to.
fn judge(env: &Env, stage: &Stage, ending: Ending, error: &Error) {
    let (sent, received) = (stage.sent.get(), stage.received.get());
    let is_whole = received == sent;
    let is_right = match ending {
        Ending::Dropped | Ending::Closed | Ending::ClosedUnread => is_whole && matches!(error, Error::PeerClosed { .. }),
        Ending::RingReused | Ending::HalfReused | Ending::Dead | Ending::Replaced => matches!(error, Error::PeerGone { .. }),
    };
    if !is_right {
        let rule = if matches!(error, Error::Timeout { .. }) { "R4" } else { "R2" };
        env.fail(format!("{rule}: {ending:?}: {received} of {sent} messages, then: {error}"));
    }
}

fn send(env: &Env, stage: &Rc<Stage>, config: &HostConfig, ending: Ending, receiver: SimHost) -> Result<()> {
    let (rings, allocator) = rings(env, config)?;
    stage.wait(env, |stage| stage.listens.get());
    let mut connection = again(env, || rings.connect(NAME, PATIENCE_MS))?;
    if ending.receiver_stands() {
        let is_there = |visit: u64| env.view(|view| view.visits_by(receiver, LOOKING)) >= visit;
        stage.wait(env, |stage| stage.stands_at.get().is_some_and(is_there));
    }
    // From before they can arrive.
    stage.sent.set(MESSAGES);
    for number in 0..MESSAGES {
        connection.sender().push(&[&message(number)])?;
    }
    connection.sender().flush();
    match ending {
        Ending::Dropped => drop(connection),
        Ending::RingReused | Ending::HalfReused => {
            drop(connection);
            reuse(env, &allocator, if ending == Ending::RingReused { LINE_BYTES } else { 0 })?;
        }
        Ending::Closed => {
            env.spawn("prompter", move |env| {
                env.platform().sleep_ns(LOOK_NS);
                env.resume(receiver);
                Ok(())
            });
            close(env, stage, connection, true);
        }
        Ending::ClosedUnread => close(env, stage, connection, false),
        Ending::Dead | Ending::Replaced => {
            stage.wait(env, |stage| stage.received.get() == MESSAGES);
            stage.sender.set(Some(env.process()));
            env.inflict(env.host(), Fault::CrashProcess { restart_after_ns: None });
            env.yield_now()?;
        }
    }
    if ending.receiver_stands() {
        env.platform().sleep_ns(LOOK_NS);
        env.resume(receiver);
    }
    // Its process lives on, whatever has become of the connection.
    stage.wait(env, |stage| stage.over.get());
    Ok(())
}

/// Closes in good order, which succeeds only once everything is received.
fn close(env: &Env, stage: &Stage, connection: Connection, is_read: bool) {
    let closed = connection.close(PATIENCE_MS);
    let (sent, received) = (stage.sent.get(), stage.received.get());
    if closed.is_ok() != is_read || closed.is_ok() && received < sent {
        env.fail(format!("R2: a close after {received} of {sent} messages said {closed:?}"));
    }
}

/// Uses given back memory for something else, from `from` on in each block.
fn reuse(env: &Env, allocator: &Allocator, from: usize) -> Result<()> {
    let lines = env.lines();
    let blocks = (0..REUSED).map(|_| allocator.alloc(RING_BYTES)).collect::<Result<Vec<_>>>()?;
    for block in &blocks {
        for offset in (block.offset + from as u64..block.offset + RING_BYTES).step_by(LINE_BYTES) {
            lines.memory().write_line(offset, &Line([0x5a; LINE_BYTES]))?;
        }
    }
    lines.memory().fence_all();
    Ok(())
}

/// A process of the sender's host that stays, so that the host does.
fn keep(env: &Env, stage: &Rc<Stage>, config: &HostConfig, _: Ending, _: SimHost) -> Result<()> {
    let _host = join(env, config)?;
    stage.wait(env, |stage| stage.over.get());
    Ok(())
}

/// Comes to the sender's host when the sender is dead, and its place is free.
fn succeed(env: &Env, stage: &Rc<Stage>, config: &HostConfig, _: Ending, _: SimHost) -> Result<()> {
    let is_dead = |process: SimProcess| !env.view(|view| view.is_alive(process));
    stage.wait(env, |stage| stage.sender.get().is_some_and(is_dead));
    // A few rounds of the keeper's service.
    env.platform().sleep_ns(5 * MS);
    let _rings = rings(env, config)?;
    stage.wait(env, |stage| stage.over.get());
    Ok(())
}
