// SPDX-License-Identifier: Apache-2.0
//! Two hosts in this process, each end on a thread of its own.

use crate::lab::{Lab, Member, PATIENCE_MS, message, ring_config};
use cxl_pool::Error;
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea, audit};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Line;
use cxl_pool::objects::Objects;
use cxl_pool::ring::rpc::{Client, Server};
use cxl_pool::ring::{Alive, Connection, Listener, Presence, RingConfig, Rings};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Connects `from` to a listener of `to`.
fn connect(to: &Member, from: &Member) -> (Listener, Connection, Connection) {
    let mut listener = to.rings.listen(b"here").unwrap();
    let (accepted, connected) = reconnect(&mut listener, from);
    (listener, accepted, connected)
}

fn reconnect(listener: &mut Listener, from: &Member) -> (Connection, Connection) {
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| from.rings.connect(b"here", PATIENCE_MS).unwrap());
        (listener.accept(PATIENCE_MS).unwrap(), connecting.join().unwrap())
    })
}

#[test]
fn messages_of_every_length_arrive_in_order_in_both_directions() {
    const MESSAGES: u64 = 3000;
    let lab = Lab::new();
    let (a, b) = (lab.join(0), lab.join(1));
    let (_listener, mut at_a, at_b) = connect(&a, &b);
    let most = at_a.sender().max_message_bytes();
    assert!(most > 1000 && matches!(at_a.send(&vec![1; most as usize + 1], 0), Err(Error::TooLarge { .. })));
    std::thread::scope(|scope| {
        for (own, other, end) in [(1, 2, at_a), (2, 1, at_b)] {
            let (mut sender, mut receiver) = end.split();
            scope.spawn(move || (0..MESSAGES).for_each(|number| sender.send(&message(own, number, most), PATIENCE_MS).unwrap()));
            scope.spawn(move || {
                let mut got = Vec::new();
                for number in 0..MESSAGES {
                    receiver.recv(&mut got, PATIENCE_MS).unwrap();
                    assert_eq!(got, message(other, number, most), "message {number} of {other}");
                }
            });
        }
    });
}

#[test]
fn a_close_in_good_order_loses_nothing_and_a_drop_says_that_it_may() {
    let lab = Lab::new();
    let (a, b) = (lab.join(0), lab.join(1));
    let (mut listener, mut at_a, mut at_b) = connect(&a, &b);
    let mut got = Vec::new();
    std::thread::scope(|scope| {
        let closing = scope.spawn(move || {
            (0..20).for_each(|number| at_b.send(&message(1, number, 100), PATIENCE_MS).unwrap());
            at_b.close(PATIENCE_MS)
        });
        for number in 0..20 {
            std::thread::sleep(Duration::from_millis(1));
            at_a.recv(&mut got, PATIENCE_MS).unwrap();
            assert_eq!(got, message(1, number, 100));
        }
        assert!(matches!(at_a.recv(&mut got, PATIENCE_MS), Err(Error::PeerClosed { .. })));
        closing.join().unwrap().unwrap();
    });
    assert!(matches!(at_a.recv(&mut got, 0), Err(Error::PeerClosed { .. })));
    drop(at_a);

    // Dropped with two messages that were not received: they are there or the loss is told, never a clean end without them.
    let (mut at_a, mut at_b) = reconnect(&mut listener, &b);
    at_b.send(b"one", 0).unwrap();
    at_b.send(b"two", 0).unwrap();
    drop(at_b);
    let mut received = Vec::new();
    let end = loop {
        match at_a.recv(&mut got, PATIENCE_MS) {
            Ok(()) => received.push(got.clone()),
            Err(error) => break error,
        }
    };
    match (received.len(), end) {
        (2, Error::PeerClosed { .. }) | (0 | 1, Error::PeerGone { .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_block_of_a_connection_is_given_back_once() {
    let lab = Lab::new();
    let (a, b) = (lab.join(0), lab.join(1));
    let before = [a.allocator.usage().scratch_bytes, b.allocator.usage().scratch_bytes];
    assert_eq!(before, [0, 0]);
    let mut listener = a.rings.listen(b"here").unwrap();
    for round in 0..40 {
        let (mut at_a, mut at_b) = reconnect(&mut listener, &b);
        at_a.send(&message(1, round, 500), PATIENCE_MS).unwrap();
        let mut got = Vec::new();
        at_b.recv(&mut got, PATIENCE_MS).unwrap();
        // The memory is that of former connections, with their lines still in it.
        assert_eq!(got, message(1, round, 500));
        assert!(a.allocator.usage().scratch_bytes > 0 && b.allocator.usage().scratch_bytes > 0);
    }
    listener.close().unwrap();
    assert_eq!([a.allocator.usage().scratch_bytes, b.allocator.usage().scratch_bytes], [0, 0]);
    assert_eq!([a.allocator.usage().rejected_frees, b.allocator.usage().rejected_frees], [0, 0]);
    // The doors are all that is left.
    assert_eq!(audit(lab.pool.lines()).unwrap().kept_blocks, 1);
    assert!(matches!(b.rings.connect(b"here", 0), Err(Error::NotFound(_))));
}

#[test]
fn a_full_ring_is_told_and_goes_on_when_there_is_room() {
    let lab = Lab::new();
    let (a, b) = (lab.join(0), lab.join(1));
    let (_listener, mut at_a, mut at_b) = connect(&a, &b);
    let mut sent = 0;
    while at_a.sender().try_push(&[&message(1, sent, 200)]).unwrap() {
        sent += 1;
    }
    at_a.sender().flush();
    assert!(sent > 10);
    assert!(matches!(at_a.sender().push(&[&[0; 200]]), Err(Error::Full { .. })));
    assert!(matches!(at_a.send(&[0; 200], 20), Err(Error::Timeout { .. })));
    let mut got = Vec::new();
    for number in 0..sent {
        at_b.recv(&mut got, PATIENCE_MS).unwrap();
        assert_eq!(got, message(1, number, 200));
    }
    assert!(matches!(at_b.recv(&mut got, 20), Err(Error::Timeout { .. })));
    at_a.send(b"again", PATIENCE_MS).unwrap();
    at_b.recv(&mut got, PATIENCE_MS).unwrap();
    assert_eq!(got, b"again");
}

#[test]
fn a_name_has_one_living_listener_and_is_taken_over_from_a_dead_one() {
    let lab = Lab::new();
    let (a, b) = (lab.join(0), lab.join(1));
    let first = a.rings.listen(b"name").unwrap();
    let beating = a.rings.serve().unwrap();
    assert!(matches!(b.rings.listen(b"name"), Err(Error::Exists(_))));
    let presences = || [&a, &b].map(|at| at.rings.presence(b"name").unwrap());
    assert_eq!(presences(), [Presence::Listens; 2]);
    drop((first, beating));
    assert!(presences().iter().all(|seen| matches!(seen, Presence::Ended(_))), "{:?}", presences());
    assert!(matches!(a.rings.connect(b"name", 100), Err(Error::PeerGone { .. })));
    let mut second = b.rings.listen(b"name").unwrap();
    let ends = std::thread::scope(|scope| {
        let connecting = scope.spawn(|| a.rings.connect(b"name", PATIENCE_MS).unwrap());
        (second.accept(PATIENCE_MS).unwrap(), connecting.join().unwrap())
    });
    drop(ends);
    // No process accepts.
    assert!(matches!(a.rings.connect(b"name", 50), Err(Error::Timeout { .. })));
    assert!(matches!(second.accept(50), Err(Error::Timeout { .. })));
    // It is there all the same, whether it answers or not.
    assert_eq!(presences(), [Presence::Listens; 2]);
    second.close().unwrap();
    assert_eq!(presences(), [Presence::Ended("it has stopped listening"); 2]);
    assert!(matches!(a.rings.listen(&[b'x'; 25]), Err(Error::Invalid(_))));
}

#[test]
fn a_name_that_is_no_listeners_is_not_taken() {
    let lab = Lab::new();
    let (a, b) = (lab.join(0), lab.join(1));
    let (of_a, of_b) = (Objects::new(&a.host), Objects::new(&b.host));
    let block = a.allocator.alloc(4096).unwrap();
    of_a.put(b"root", block.offset, 4096, PATIENCE_MS).unwrap();
    // A root whose memory has gone to a listener since.
    let listener = a.rings.listen(b"here").unwrap();
    let listening = of_a.get(b"here", PATIENCE_MS).unwrap();
    of_b.put(b"dangling", listening.offset, 64, PATIENCE_MS).unwrap();
    for name in [&b"root"[..], b"dangling", b"cxl.ring.doors"] {
        let bound = of_b.get(name, PATIENCE_MS).unwrap();
        assert!(matches!(b.rings.listen(name), Err(Error::Exists(_))), "{name:?}");
        assert!(matches!(b.rings.connect(name, 50), Err(Error::PeerGone { .. })), "{name:?}");
        assert!(matches!(b.rings.presence(name).unwrap(), Presence::InDoubt(_)), "{name:?}");
        assert_eq!(of_a.get(name, PATIENCE_MS).unwrap(), bound);
    }
    // Rings go on, for those who come later as well.
    drop(listener);
    drop(connect(&b, &a));
    let c = lab.join(2);
    drop(connect(&a, &c));
}

#[test]
fn rings_of_a_membership_are_there_once_and_have_sound_times() {
    let lab = Lab::new();
    let a = lab.join(0);
    assert!(matches!(Rings::new(&a.host, a.allocator.clone(), ring_config()), Err(Error::Exists(_))));
    for config in [
        RingConfig { ring_bytes: 64, ..ring_config() },
        RingConfig { ring_bytes: u64::MAX, ..ring_config() },
        RingConfig { beat_ms: 800, ..ring_config() },
        RingConfig { beat_ms: 0, ..ring_config() },
    ] {
        assert!(matches!(Rings::new(&a.host, a.allocator.clone(), config), Err(Error::Invalid(_))));
    }
}

#[test]
fn a_silent_peer_counts_as_gone_within_its_time() {
    let lab = Lab::new();
    let (a, b) = (lab.join(0), lab.join(1));
    let (mut listener, mut at_a, at_b) = connect(&a, &b);
    // Nothing of b polls or beats any more, but its host lives.
    let since = Instant::now();
    let mut got = Vec::new();
    let error = at_a.recv(&mut got, PATIENCE_MS).unwrap_err();
    assert!(matches!(error, Error::PeerGone { .. }), "{error}");
    let took_ms = since.elapsed().as_millis() as u64;
    assert!((ring_config().peer_timeout_ms / 2..ring_config().peer_timeout_ms + 2_000).contains(&took_ms), "{took_ms} ms");
    // With a thread that beats it lives.
    drop((at_a, at_b));
    let beating = b.rings.serve().unwrap();
    let (mut at_a, _at_b) = reconnect(&mut listener, &b);
    assert!(matches!(at_a.recv(&mut got, 3 * ring_config().peer_timeout_ms), Err(Error::Timeout { .. })));
    drop(beating);
}

#[test]
fn calls_are_answered_in_any_order_each_to_its_own() {
    const CALLS: u64 = 2000;
    let lab = Lab::new();
    let (a, b) = (lab.join(0), lab.join(1));
    let (_listener, at_a, at_b) = connect(&a, &b);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut server = Server::new(at_a);
            let (mut request, mut waiting) = (Vec::new(), Vec::new());
            let mut answered = 0;
            while answered < CALLS {
                while let Some(ticket) = server.next(&mut request).unwrap() {
                    waiting.push((ticket, request.clone()));
                }
                // The last comes first.
                while let Some((ticket, request)) = waiting.pop() {
                    let response: Vec<u8> = request.iter().rev().map(|byte| !byte).collect();
                    server.reply(ticket, request.len() as u32, &response, PATIENCE_MS).unwrap();
                    answered += 1;
                }
                server.flush();
                std::thread::yield_now();
            }
        });
        let mut client = Client::new(at_b, 32).unwrap();
        let (mut begun, mut done, mut under_way, mut response) = (0, 0, HashMap::new(), Vec::new());
        while done < CALLS {
            while begun < CALLS && under_way.len() < 32 {
                let request = message(3, begun, 150);
                under_way.insert(client.submit(&request, PATIENCE_MS).unwrap(), request);
                begun += 1;
            }
            if under_way.len() == 32 {
                assert!(matches!(client.submit(b"", PATIENCE_MS), Err(Error::Full { .. })));
            }
            client.flush();
            while let Some(completion) = client.poll(&mut response).unwrap() {
                let request = under_way.remove(&completion.call).expect("each call is done once");
                assert_eq!(completion.status.unwrap(), request.len() as u32);
                assert!(response.iter().eq(request.iter().rev().map(|byte| !byte).collect::<Vec<_>>().iter()));
                done += 1;
            }
        }
        assert!(under_way.is_empty());
    });
}

#[test]
fn a_late_answer_is_nobodys() {
    let lab = Lab::new();
    let (a, b) = (lab.join(0), lab.join(1));
    let (_listener, at_a, at_b) = connect(&a, &b);
    let (mut server, mut client) = (Server::new(at_a), Client::new(at_b, 1).unwrap());
    let (mut request, mut response) = (Vec::new(), Vec::new());
    let late = client.submit(b"first", 20).unwrap();
    client.flush();
    assert!(matches!(client.wait(late, &mut response), Err(Error::Timeout { .. })));
    assert!(matches!(client.wait(late, &mut response), Err(Error::NotFound(_))));
    let ticket = server.next(&mut request).unwrap().expect("the request is there");
    server.reply(ticket, 1, b"too late", 0).unwrap();
    server.flush();
    // The only place of the table is taken by another call by now.
    let call = client.submit(b"second", PATIENCE_MS).unwrap();
    client.flush();
    assert_eq!(
        server
            .serve(8, 0, |request, response| {
                response.extend_from_slice(request);
                2
            })
            .unwrap(),
        1
    );
    assert_eq!(client.wait(call, &mut response).unwrap(), 2);
    assert_eq!(response, b"second");
    drop(server);
    assert!(matches!(client.call(b"third", &mut response, PATIENCE_MS), Err(Error::PeerClosed { .. } | Error::PeerGone { .. })));
}

#[test]
fn whatever_lies_in_a_ring_neither_panics_nor_hangs() {
    let lab = Lab::new();
    let (a, b) = (lab.join(0), lab.join(1));
    let (_listener, mut at_a, mut at_b) = connect(&a, &b);
    // Every line of every block but the metadata becomes something else, again and again, while both ends go on.
    let layout = lab.pool.layout();
    let (start, lines) = (layout.data_offset(), 2 * layout.geometry().chunk_bytes / LINE_BYTES as u64);
    let memory = lab.pool.lines().memory();
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let end = Instant::now() + Duration::from_secs(3);
    let mut got = Vec::new();
    while Instant::now() < end {
        for _ in 0..2000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let line = match random >> 61 {
                0 => Line::ZERO,
                1 => Line([0xff; LINE_BYTES]),
                2 => memory.load_line(start + (random >> 20) % lines * LINE_BYTES as u64).unwrap(),
                _ => Line([(random >> 40) as u8; LINE_BYTES]),
            };
            memory.write_line(start + (random >> 8) % lines * LINE_BYTES as u64, &line).unwrap();
        }
        memory.fence_all();
        // The metadata of the pool lies elsewhere, so only the rings can go wrong.
        let _ = at_a.send(&message(1, random >> 40, 900), 0);
        let _ = at_b.recv(&mut got, 1);
        let _ = at_b.send(&message(2, random >> 40, 900), 0);
        let _ = at_a.recv(&mut got, 1);
    }
    let allocator = Allocator::attach(&b.host, LocalArea::of(&b.host).unwrap(), AllocConfig::default());
    drop((allocator, at_a, at_b));
}

#[test]
fn a_look_at_the_other_end_says_what_it_is_worth_and_finds_every_way_of_being_gone() {
    let lab = Lab::new();
    let (a, b, sibling) = (lab.join(0), lab.join(1), lab.join(0));
    // Nothing was received in between: the look alone finds it.
    let (mut listener, at_a, at_b) = connect(&a, &b);
    assert_eq!(at_a.probe().check().unwrap(), Alive::Believed);
    assert_eq!(at_b.probe().check().unwrap(), Alive::Believed);
    let probe = at_b.probe();
    drop(at_b);
    assert!(matches!(probe.check(), Err(Error::Closed)));
    assert!(matches!(at_a.probe().check(), Err(Error::PeerClosed { .. })));
    drop(at_a);

    let (at_a, at_sibling) = reconnect(&mut listener, &sibling);
    assert_eq!(at_a.probe().check().unwrap(), Alive::Seen);
    assert_eq!(at_sibling.probe().check().unwrap(), Alive::Seen);
    drop((at_a, at_sibling));

    // Its memory is used for something else, whatever that is.
    let (at_a, at_b) = reconnect(&mut listener, &b);
    let (start, chunk_bytes) = (lab.pool.layout().data_offset(), lab.pool.layout().geometry().chunk_bytes);
    let memory = lab.pool.lines().memory();
    for line in 0..4 * chunk_bytes / LINE_BYTES as u64 {
        memory.write_line(start + line * LINE_BYTES as u64, &Line([0x5a; LINE_BYTES])).unwrap();
    }
    memory.fence_all();
    assert!(matches!(at_a.probe().check(), Err(Error::PeerGone { .. })));
    drop((at_a, at_b));
}

/// Who has given a connection up learns when the other end uses it no more, and not before.
#[test]
fn a_trace_tells_when_the_other_end_has_let_go() {
    let lab = Lab::new();
    let (a, b, sibling) = (lab.join(0), lab.join(1), lab.join(0));
    let (mut listener, at_a, at_b) = connect(&a, &b);
    let (probe, trace) = (at_a.probe(), at_a.probe().trace().unwrap());
    drop(at_a);
    assert!(matches!(probe.trace(), Err(Error::Closed)));
    // It has been told, which is not to say that it has taken note.
    assert!(!trace.has_let_go(&a.rings).unwrap());
    drop(at_b);
    assert!(trace.has_let_go(&a.rings).unwrap());

    // A process that runs, on the same host as well.
    let (at_a, at_sibling) = reconnect(&mut listener, &sibling);
    let trace = at_a.probe().trace().unwrap();
    drop(at_a);
    assert!(!trace.has_let_go(&a.rings).unwrap());
    drop(at_sibling);
    assert!(trace.has_let_go(&a.rings).unwrap());

    // Its memory is another owner's.
    let (at_a, at_b) = reconnect(&mut listener, &b);
    let trace = at_a.probe().trace().unwrap();
    let (start, chunk_bytes) = (lab.pool.layout().data_offset(), lab.pool.layout().geometry().chunk_bytes);
    let memory = lab.pool.lines().memory();
    for line in 0..4 * chunk_bytes / LINE_BYTES as u64 {
        memory.write_line(start + line * LINE_BYTES as u64, &Line([0x5a; LINE_BYTES])).unwrap();
    }
    memory.fence_all();
    assert!(trace.has_let_go(&a.rings).unwrap());
    drop((at_a, at_b));
}
