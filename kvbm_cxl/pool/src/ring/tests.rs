// SPDX-License-Identifier: Apache-2.0
//! Lines that are sealed as they should be and say what cannot be: an end that lies harms its own connection only.

use super::lines::{Listening, Progress, RingSlot};
use super::link::{Own, Side};
use super::rpc::{Client, Server};
use super::*;
use crate::alloc::{AllocConfig, LocalArea};
use crate::device::PoolSpec;
use crate::host::{HostConfig, Service};
use crate::lock::LOCK_CHUNKS;
use crate::machine::{Machine, State};
use crate::media::Region;
use crate::objects::Object;
use crate::platform::MachineId;
use crate::pool::{FormatOptions, Pool};
use std::time::{Duration, Instant};

const PATIENCE_MS: u64 = 30_000;
/// Cells of the table of names.
const OBJECTS: u32 = 32;

struct Lab {
    rings: [Rings; 2],
    _hosts: [(Host, Service); 2],
    _pool: Pool,
    _directory: tempfile::TempDir,
}

impl Lab {
    fn new() -> Lab {
        Lab::with(HostConfig::default())
    }

    fn with(config: HostConfig) -> Lab {
        let directory = tempfile::tempdir().unwrap();
        let spec = PoolSpec::new(vec![directory.path().join("pool")], Some(24 << 20)).unwrap();
        let machine = |number: u8| MachineId([number + 1; 16]);
        let options = FormatOptions {
            machine: Some(machine(0)),
            // Seat 1 is that of a machine that never comes, so that no host writes its lines.
            seats: vec![machine(8)],
            slots: 4,
            locks: 32,
            objects: OBJECTS,
            chunk_bytes: 64 << 10,
            ..Default::default()
        };
        let pool = Pool::format(&spec, &options).unwrap();
        let hosts = [0, 1].map(|number| {
            let uuid = pool.superblock().uuid();
            let state = State::open(&directory.path().join("state"), uuid, machine(number)).unwrap();
            let config = HostConfig { seats: pool.superblock().seats(), ..config.clone() };
            let host = crate::pool::join(pool.lines().clone(), Arc::new(Machine::new(machine(number), state).unwrap()), config).unwrap();
            let service = host.serve().unwrap();
            (host, service)
        });
        let rings = [&hosts[0].0, &hosts[1].0].map(|host| {
            let allocator = Allocator::attach(host, LocalArea::of(host).unwrap(), AllocConfig::default()).unwrap();
            let config = RingConfig { ring_bytes: 1024, peer_timeout_ms: PATIENCE_MS, ..RingConfig::default() };
            Rings::new(host, Arc::new(allocator), config).unwrap()
        });
        Lab { rings, _hosts: hosts, _pool: pool, _directory: directory }
    }

    /// Two ends of a new connection.
    fn connect(&self, listener: &mut Listener) -> (Connection, Connection) {
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| self.rings[1].connect(b"tested", PATIENCE_MS).unwrap());
            (listener.accept(PATIENCE_MS).unwrap(), connecting.join().unwrap())
        })
    }
}

/// Writes line `number` of the ring that `liar` sends into.
fn forge(liar: &Connection, number: u64, kind: u16, rest_bytes: u16) {
    let (link, half) = (liar.sender.link(), *liar.sender.link().own());
    let slot =
        RingSlot { crc: 0, sequence: number as u32, connection: half.connection, rest_bytes, kind, payload: [number as u8; SLOT_BYTES] };
    link.lines().publish_in(half.seal, number, half.slot_at(number % half.slots()), slot).unwrap();
}

#[test]
fn lines_that_do_not_belong_together_are_refused() {
    let lab = Lab::new();
    let mut listener = lab.rings[0].listen(b"tested").unwrap();
    let cases: [&[(u16, u16)]; 8] = [
        &[(RingSlot::MORE, 48)],
        &[(RingSlot::MORE, 0)],
        &[(RingSlot::FIRST, u16::MAX)],
        &[(RingSlot::FIRST, 100), (RingSlot::FIRST, 48)],
        &[(RingSlot::FIRST, 100), (RingSlot::MORE, 100)],
        &[(RingSlot::FIRST, 100), (RingSlot::MORE, 51)],
        &[(RingSlot::FIRST, 100), (RingSlot::MORE, 0)],
        &[(RingSlot::FIRST, 100), (RingSlot::END, 0)],
    ];
    for case in cases {
        let (mut honest, liar) = lab.connect(&mut listener);
        (0..).zip(case).for_each(|(number, (kind, rest_bytes))| forge(&liar, number, *kind, *rest_bytes));
        let mut message = Vec::new();
        let error = honest.recv(&mut message, PATIENCE_MS).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{case:?}: {error}");
        // Nor does anything come of it later.
        assert!(honest.recv(&mut message, 1).is_err(), "{case:?}");
    }
}

#[test]
fn lines_of_another_number_kind_or_connection_are_not_there() {
    let lab = Lab::new();
    let mut listener = lab.rings[0].listen(b"tested").unwrap();
    let (mut honest, liar) = lab.connect(&mut listener);
    let half = *liar.sender.link().own();
    let lines = liar.sender.link().lines();
    let right =
        RingSlot { crc: 0, sequence: 0, connection: half.connection, rest_bytes: 4, kind: RingSlot::FIRST, payload: [7; SLOT_BYTES] };
    let mut message = Vec::new();
    let wrong = [
        (half.slots(), right),
        (u64::MAX, right),
        (1 << 32, right),
        (0, RingSlot { sequence: 1, ..right }),
        (0, RingSlot { connection: !half.connection, ..right }),
        (0, RingSlot { kind: 0, ..right }),
        (0, RingSlot { kind: u16::MAX, ..right }),
    ];
    for (number, slot) in wrong {
        lines.publish_in(half.seal, number, half.slot_at(0), slot).unwrap();
        let found = honest.recv(&mut message, 2);
        assert!(matches!(found, Err(Error::Timeout { .. })), "{number} {slot:?}: {found:?}");
    }
    let other = *honest.sender.link().own();
    lines.publish_in(other.seal, 0, half.slot_at(0), right).unwrap();
    assert!(matches!(honest.recv(&mut message, 2), Err(Error::Timeout { .. })), "sealed for the other direction");
    lines.publish_in(half.seal, 0, half.slot_at(0), right).unwrap();
    honest.recv(&mut message, PATIENCE_MS).unwrap();
    assert_eq!(message, [7; 4]);
}

#[test]
fn a_progress_that_cannot_be_is_refused() {
    let lab = Lab::new();
    let mut listener = lab.rings[0].listen(b"tested").unwrap();
    for lies in [&[15][..], &[u64::MAX], &[14, 13], &[3, 0]] {
        let (mut honest, liar) = lab.connect(&mut listener);
        let half = *liar.sender.link().own();
        let mut found = Ok(());
        for &read in lies {
            while honest.sender.try_push(&[b"x"]).unwrap_or(false) {}
            liar.sender.link().lines().publish_in(half.seal, 0, half.progress_at(), Progress { read, ..Progress::default() }).unwrap();
            found = honest.sender.push(&[b"x"]);
        }
        assert!(matches!(found, Err(Error::Protocol { .. })), "{lies:?}: {found:?}");
    }
}

#[test]
fn a_half_lies_in_the_blocks_and_is_of_this_connection() {
    let lab = Lab::new();
    let mut listener = lab.rings[0].listen(b"tested").unwrap();
    let (at_a, at_b) = lab.connect(&mut listener);
    let (link, layout) = (at_a.sender.link(), lab.rings[0].lines().layout().clone());
    let place = link.other().slot_at(0) - HEAD_LINES * LINE_BYTES as u64;
    let end = layout.data_offset() + layout.chunks() * layout.geometry().chunk_bytes;
    let slots = link.other().slots();
    for (offset, slots) in [
        (place, slots), // of another connection
        (place + 1, slots),
        (place, 0),
        (place, u64::MAX),
        (place, u64::MAX / 64),
        (place, slots + 1),
        (0, slots),
        (u64::MAX - 63, slots),
        (end - 64, slots),
        (end, slots),
    ] {
        let own = Own::make(&lab.rings[0], 77, Side::Listener, None).unwrap();
        assert!(own.join(Side::Listener, offset, slots, *link.peer()).unwrap().is_err(), "{offset:#x} {slots}");
    }
    drop(at_b);
}

#[test]
fn a_message_that_is_no_call_ends_the_calls() {
    let lab = Lab::new();
    let mut listener = lab.rings[0].listen(b"tested").unwrap();
    for message in [&b"short"[..], &[0xee; 40]] {
        let (mut at_a, at_b) = lab.connect(&mut listener);
        at_a.send(message, 0).unwrap();
        let mut client = Client::new(at_b, 1).unwrap();
        let found = client.call(b"", &mut Vec::new(), PATIENCE_MS);
        assert!(matches!(found, Err(Error::Protocol { .. })), "{found:?}");
        let (at_a, mut at_b) = lab.connect(&mut listener);
        at_b.send(message, 0).unwrap();
        let mut server = Server::new(at_a);
        let found = server.serve(1, 0, |_, _| 0);
        assert!(matches!(found, Err(Error::Protocol { .. })), "{found:?}");
    }
}

/// Binds names that start with `prefix` to what `at` gives for each, as a listener or not, until every cell of the table has one.
fn fill_names(lab: &Lab, prefix: &str, is_listener: bool, mut at: impl FnMut(&[u8]) -> u64) {
    let objects = &lab.rings[0].shared.objects;
    let names = (0..).map(|number| format!("{prefix}{number}").into_bytes());
    for name in names.take(10_000) {
        let object = Object { offset: at(&name), name, len_bytes: 64, is_listener };
        match objects.bind(&object, PATIENCE_MS, |_| Ok(false)) {
            Ok(()) | Err(Error::Full { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        if objects.list(PATIENCE_MS).unwrap().len() == OBJECTS as usize {
            return;
        }
    }
    panic!("the table did not become full");
}

fn names(lab: &Lab) -> Vec<String> {
    let listed = lab.rings[0].shared.objects.list(PATIENCE_MS).unwrap();
    let mut names: Vec<_> = listed.into_iter().map(|object| String::from_utf8(object.name).unwrap()).collect();
    names.sort();
    names
}

#[test]
fn names_of_listeners_that_are_gone_make_room_for_another() {
    let lab = Lab::new();
    let rings = &lab.rings[0];
    let shared = &rings.shared;
    let mut living = rings.listen(b"living").unwrap();
    let living_at = shared.objects.get(b"living", PATIENCE_MS).unwrap().offset;
    let other = shared.allocator.alloc(4096).unwrap();
    shared.objects.put(b"other's", other.offset, 64, PATIENCE_MS).unwrap();
    // What a process leaves that was killed: its line, or memory that has gone to another listener, or to another owner.
    let room = (1 + shared.doors.count()) * LINE_BYTES as u64;
    let mut number = 0;
    fill_names(&lab, "left", true, |name| {
        number += 1;
        match number % 3 {
            0 => return living_at,
            1 => return other.offset,
            _ => {}
        }
        let block = shared.allocator.alloc(room).unwrap();
        let door = shared.number as u32;
        let mut line = Listening { door, instance: !shared.instance, doors: shared.doors.nonce, ..Listening::default() };
        line.name[..name.len()].copy_from_slice(name);
        line.name_len = name.len() as u32;
        rings.lines().publish_in(rings.lines().seal_of(&[listen::SEAL]), block.offset, block.offset, line).unwrap();
        block.offset
    });
    let _new = lab.rings[1].listen(b"new").unwrap();
    assert_eq!(names(&lab), ["cxl.ring.doors", "living", "new", "other's"]);
    lab.rings[1].listen(b"tested").unwrap().close().unwrap();
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| lab.rings[1].connect(b"living", PATIENCE_MS).unwrap());
        let _accepted = living.accept(PATIENCE_MS).unwrap();
        connecting.join().unwrap();
    });
    fill_names(&lab, "mine", false, |_| other.offset);
    let full = names(&lab);
    assert!(matches!(lab.rings[1].listen(b"another"), Err(Error::Full { .. })));
    assert_eq!(names(&lab), full, "an object of no listener is not touched");
}

/// A line of the manager that cannot be read holds no call up: those that wait go by other evidence, and who must know gets an error.
#[test]
fn a_fence_that_cannot_be_read_holds_no_call_up() {
    // A call that waited for that line would wait for this long.
    let lab = Lab::with(HostConfig { suspect_ms: 2 * PATIENCE_MS, ..HostConfig::default() });
    let mut listener = lab.rings[0].listen(b"tested").unwrap();
    let (mut here, mut there) = lab.connect(&mut listener);
    let trace = here.probe().trace().unwrap();
    let lines = lab.rings[0].lines();
    let offset = lines.layout().line_offset(Region::Fence, lines.layout().geometry().fence_lines()).unwrap();
    let mut line = lines.fetch_raw(offset).unwrap();
    let mut flip = || {
        line.0[20] ^= 1;
        lines.memory().write_line(offset, &line).unwrap();
        lines.fence_published();
    };
    flip();
    let begun = Instant::now();
    let in_time = || assert!(begun.elapsed() < Duration::from_millis(PATIENCE_MS), "{:?}", begun.elapsed());
    let mut message = Vec::new();
    assert!(matches!(here.recv(&mut message, 20), Err(Error::Timeout { .. })));
    in_time();
    there.send(b"x", PATIENCE_MS).unwrap();
    here.recv(&mut message, PATIENCE_MS).unwrap();
    assert_eq!(message, b"x");
    in_time();
    assert!(!trace.has_let_go(&lab.rings[0]).unwrap());
    in_time();
    assert!(matches!(here.probe().check(), Err(Error::PeerGone { reason: "whether its host is fenced cannot be read", .. })));
    in_time();
    // That the other end has closed is seen all the same.
    drop(there);
    assert!(trace.has_let_go(&lab.rings[0]).unwrap());
    assert!(matches!(here.recv(&mut message, PATIENCE_MS), Err(Error::PeerClosed { .. } | Error::PeerGone { .. })));
    in_time();
    // The threads of the hosts wait for the line.
    flip();
}

/// A host has the lock of the chunks and does not give it back, and there is no memory left here without it.
#[test]
fn who_connects_waits_for_memory_no_longer_than_it_wants_to() {
    let lab = Lab::new();
    let _listener = lab.rings[0].listen(b"tested").unwrap();
    let _guard = lab._hosts[0].0.acquire(LOCK_CHUNKS, PATIENCE_MS).unwrap();
    let allocator = &lab.rings[1].shared.allocator;
    let most = 24 << 20 >> 10;
    let ended = (0..most).find_map(|_| allocator.alloc_within(lab.rings[1].config().ring_bytes, 1).err());
    assert!(matches!(ended, Some(Error::Timeout { .. })), "{ended:?}");
    let begun = Instant::now();
    let error = lab.rings[1].connect(b"tested", 100).err();
    assert!(matches!(error, Some(Error::Timeout { .. })), "{error:?}");
    let timeout_ms = HostConfig::default().default_timeout_ms();
    assert!(begun.elapsed() < Duration::from_millis(timeout_ms / 2), "{:?}", begun.elapsed());
}
