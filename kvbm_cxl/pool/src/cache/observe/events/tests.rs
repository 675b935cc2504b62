// SPDX-License-Identifier: Apache-2.0
use super::*;
use std::thread;

const PATIENCE: Duration = Duration::from_secs(30);

/// A change that no other number makes.
fn stored(number: u64) -> Change {
    let mut name = [0xa5; 16];
    name[..8].copy_from_slice(&number.to_le_bytes());
    let (key, namespace) = (BlockKey(name), Namespace(name.map(|byte| !byte)));
    Change::Stored { key, parent: number.checked_sub(1).map(|_| key), namespace, cell: number, len_bytes: number << 7 }
}

fn event(sequence: u64, number: u64) -> Received {
    Received::Event(Event { sequence, change: stored(number) })
}

#[test]
fn every_subscriber_gets_every_event_in_order() {
    let events = Events::new();
    assert!(!events.is_heard());
    events.emit(stored(99));
    let subscribers = [events.subscribe(), events.subscribe(), events.subscribe()];
    assert!(events.is_heard());
    events.emit(stored(1));
    events.emit_all([stored(2), stored(3)]);
    for subscriber in &subscribers {
        assert_eq!(subscriber.try_iter().collect::<Vec<_>>(), [event(0, 1), event(1, 2), event(2, 3)]);
        assert_eq!(subscriber.try_recv(), Err(RecvError::Empty));
    }
}

#[test]
fn a_slow_subscriber_loses_the_oldest_and_is_told() {
    let events = Events::new();
    let (slow, fast) = (events.subscribe_with(3), events.subscribe());
    events.emit_all((0..10).map(stored));
    let kept = |from| (from..from + 3).map(|number| event(number, number));
    assert_eq!(slow.try_iter().collect::<Vec<_>>(), [Received::Lagged(7)].into_iter().chain(kept(7)).collect::<Vec<_>>());
    assert_eq!(fast.try_iter().count(), 10);
    events.emit_all((10..13).map(stored));
    assert_eq!(slow.try_iter().collect::<Vec<_>>(), kept(10).collect::<Vec<_>>(), "it has caught up");
    events.emit_all((13..17).map(stored));
    assert_eq!(slow.try_recv(), Ok(Received::Lagged(1)));
    events.emit_all((17..19).map(stored));
    assert_eq!(slow.try_recv(), Ok(Received::Lagged(2)), "further losses are counted from the last report on");
}

#[test]
fn a_queue_of_none_or_without_bound_is_bounded() {
    let events = Events::new();
    let least = events.subscribe_with(0);
    events.emit_all([stored(1), stored(2)]);
    assert_eq!(least.try_iter().collect::<Vec<_>>(), [Received::Lagged(1), event(1, 2)]);
    assert_eq!(events.subscribe_with(usize::MAX).queue.capacity, MAX_QUEUED_EVENTS);
}

#[test]
fn no_listener_is_left_after_the_last_subscriber() {
    let events = Events::new();
    let (one, other) = (events.subscribe(), events.subscribe());
    drop(one);
    assert!(events.is_heard());
    drop(other);
    assert!(!events.is_heard());
    events.emit_all(std::iter::from_fn(|| -> Option<Change> { panic!("computed without a listener") }));
    let late = events.subscribe();
    events.emit(stored(5));
    assert_eq!(late.try_recv(), Ok(event(0, 5)), "what no listener heard has no number");
}

#[test]
fn the_end_comes_behind_the_last_event() {
    let events = Events::new();
    let (clone, subscriber) = (events.clone(), events.subscribe());
    drop(events);
    clone.emit(stored(1));
    assert_eq!(subscriber.recv_timeout(PATIENCE), Ok(event(0, 1)));
    assert_eq!(subscriber.recv_timeout(Duration::ZERO), Err(RecvError::Empty));
    drop(clone);
    assert_eq!(subscriber.recv_timeout(PATIENCE), Err(RecvError::Closed));
    assert_eq!(subscriber.iter().count(), 0);
}

#[test]
fn a_sleeping_subscriber_is_woken() {
    let events = Events::new();
    let subscriber = events.subscribe();
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| (subscriber.recv_timeout(PATIENCE), subscriber.iter().collect::<Vec<_>>()));
        while held(&subscriber.queue.state).waiting == 0 {
            thread::yield_now();
        }
        events.emit(stored(1));
        while held(&subscriber.queue.state).waiting == 0 {
            thread::yield_now();
        }
        let started = Instant::now();
        drop(events);
        assert_eq!(sleeper.join().unwrap(), (Ok(event(0, 1)), vec![]));
        assert!(started.elapsed() < PATIENCE / 2, "the end wakes as well");
    });
}

#[test]
fn a_deadline_is_kept_while_nothing_happens() {
    let events = Events::new();
    let subscriber = events.subscribe();
    let started = Instant::now();
    assert_eq!(subscriber.recv_timeout(Duration::from_millis(20)), Err(RecvError::Empty));
    assert!(started.elapsed() >= Duration::from_millis(20));
}

/// Many publishers, and subscribers of which some are slow: each sees rising numbers, and what it got and what it lost are all there were.
#[test]
fn nothing_is_lost_without_notice_under_load() {
    const PUBLISHERS: u64 = 4;
    const EACH: u64 = 5_000;
    let events = Events::new();
    let subscribers: Vec<Subscriber> = [4, 64, (PUBLISHERS * EACH) as usize].map(|capacity| events.subscribe_with(capacity)).into();
    thread::scope(|scope| {
        let readers: Vec<_> = subscribers
            .iter()
            .map(|subscriber| {
                scope.spawn(move || {
                    let (mut next, mut lost, mut seen) = (0, 0, vec![None; PUBLISHERS as usize]);
                    for received in subscriber.iter() {
                        match received {
                            Received::Lagged(count) => {
                                assert!(count > 0);
                                (next, lost) = (next + count, lost + count);
                            }
                            Received::Event(event) => {
                                assert_eq!(event.sequence, next, "a gap that was not announced");
                                next += 1;
                                let Change::Stored { cell, .. } = event.change else { panic!("{event:?}") };
                                assert_eq!(event.change, stored(cell));
                                let last = &mut seen[(cell / EACH) as usize];
                                assert!(last.is_none_or(|last| last < cell), "out of order");
                                *last = Some(cell);
                            }
                        }
                    }
                    (next, lost)
                })
            })
            .collect();
        let publishers: Vec<_> = (0..PUBLISHERS)
            .map(|publisher| {
                let events = events.clone();
                scope.spawn(move || (publisher * EACH..(publisher + 1) * EACH).for_each(|number| events.emit(stored(number))))
            })
            .collect();
        publishers.into_iter().for_each(|publisher| publisher.join().unwrap());
        drop(events);
        let ends: Vec<_> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
        assert!(ends.iter().all(|(next, _)| *next == PUBLISHERS * EACH), "{ends:?}");
        assert_eq!(ends[2].1, 0, "room for everything");
    });
}
