// SPDX-License-Identifier: Apache-2.0
//! Events of the blocks of this process's cache, for the listeners in this process.
//!
//! Each subscriber has a bounded queue of its own. One that is too slow loses the oldest events and learns how many: it then takes a new
//! snapshot of the cache. Telling never waits for a subscriber, and costs one load while there is no listener.
//!
//! A listener that mirrors the cache subscribes first and takes its snapshot afterwards. For that to miss nothing, an event is emitted
//! after its change, in or after the critical section in which a snapshot would see it. For the order to be right as well, "stored" is
//! emitted in that section, before any thread can take the block out, and "gone" before any can publish its key again. Events are numbered
//! while there is a listener; a gap in the numbers is always announced by [`Received::Lagged`].

use crate::background::held;
use crate::cache::{BlockKey, Namespace};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Most events that a queue can be asked to hold.
pub const MAX_QUEUED_EVENTS: usize = 1 << 20;
/// Events that a queue holds unless another number is asked for.
pub const DEFAULT_QUEUED_EVENTS: usize = 1 << 12;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A block can be pulled by every host from now on: this process has published it, or has become its owner because the one before is
    /// gone. The events of another process may have reported the store.
    Stored {
        /// Its key.
        key: BlockKey,
        /// Key of the block before it, where the publisher told. Of a block that was taken over it is not known.
        parent: Option<BlockKey>,
        /// Its namespace.
        namespace: Namespace,
        /// The cell it lies in.
        cell: u64,
        /// Its length.
        len_bytes: u64,
    },
    /// A block was taken out on request, or because it can no longer be vouched for.
    Removed {
        /// Its key.
        key: BlockKey,
        /// Its namespace.
        namespace: Namespace,
        /// The cell it lay in.
        cell: u64,
    },
    /// A block made room for another.
    Evicted {
        /// Its key.
        key: BlockKey,
        /// Its namespace.
        namespace: Namespace,
        /// The cell it lay in.
        cell: u64,
    },
    /// All blocks of a namespace are gone.
    Cleared {
        /// The namespace.
        namespace: Namespace,
    },
}

/// A change with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Rises by one with each event of a source.
    pub sequence: u64,
    /// What happened.
    pub change: Change,
}

/// What a subscriber gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// The next event.
    Event(Event),
    /// The subscriber was too slow: this many events before the next one are lost to it.
    Lagged(u64),
}

/// Why a subscriber gets nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecvError {
    /// Nothing has happened, or not within the time allowed.
    #[error("no event is waiting")]
    Empty,
    /// The source is gone, and everything that it told was received.
    #[error("the source of the events is closed")]
    Closed,
}

/// A source of events. Clones are the same source; when the last one goes, its subscribers see the end.
#[derive(Clone, Default)]
pub struct Events {
    source: Arc<Source>,
}

#[derive(Default)]
struct Source {
    /// Length of the list of queues, to be read without its mutex.
    listening: AtomicUsize,
    listeners: Mutex<Listeners>,
}

#[derive(Default)]
struct Listeners {
    next_sequence: u64,
    queues: Vec<Arc<Queue>>,
}

impl Events {
    /// A source without listeners yet.
    pub fn new() -> Self {
        Events::default()
    }

    /// True when there is a listener. A caller that would have to compute an event can leave it out otherwise.
    pub fn is_heard(&self) -> bool {
        self.source.listening.load(Ordering::Acquire) != 0
    }

    /// Tells all listeners.
    pub fn emit(&self, change: Change) {
        self.emit_all([change]);
    }

    /// Tells all listeners several changes, which follow one another without a gap. `changes` is not even looked at while there is no
    /// listener.
    pub fn emit_all(&self, changes: impl IntoIterator<Item = Change>) {
        if !self.is_heard() {
            return;
        }
        // Collected before the mutex is taken: whatever computes the changes may take its time, or emit itself.
        let changes: Vec<Change> = changes.into_iter().collect();
        let mut listeners = held(&self.source.listeners);
        let first = listeners.next_sequence;
        listeners.next_sequence += changes.len() as u64;
        for queue in &listeners.queues {
            queue.push(first, &changes);
        }
    }

    /// Listens from now on, with a queue of [`DEFAULT_QUEUED_EVENTS`].
    pub fn subscribe(&self) -> Subscriber {
        self.subscribe_with(DEFAULT_QUEUED_EVENTS)
    }

    /// Listens from now on, with a queue of `capacity` events, 1 to [`MAX_QUEUED_EVENTS`].
    pub fn subscribe_with(&self, capacity: usize) -> Subscriber {
        let capacity = capacity.clamp(1, MAX_QUEUED_EVENTS);
        let state = QueueState { events: VecDeque::with_capacity(capacity), lost: 0, waiting: 0, is_closed: false };
        let queue = Arc::new(Queue { capacity, state: Mutex::new(state), filled: Condvar::new() });
        let mut listeners = held(&self.source.listeners);
        listeners.queues.push(queue.clone());
        self.source.listening.store(listeners.queues.len(), Ordering::Release);
        Subscriber { queue, source: Arc::downgrade(&self.source) }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        for queue in &held(&self.listeners).queues {
            held(&queue.state).is_closed = true;
            queue.filled.notify_all();
        }
    }
}

struct Queue {
    capacity: usize,
    state: Mutex<QueueState>,
    filled: Condvar,
}

struct QueueState {
    events: VecDeque<Event>,
    /// Events that were dropped from the front and not yet reported.
    lost: u64,
    /// Threads that sleep until there is something.
    waiting: usize,
    is_closed: bool,
}

impl Queue {
    fn push(&self, first: u64, changes: &[Change]) {
        let mut state = held(&self.state);
        for (sequence, &change) in (first..).zip(changes) {
            if state.events.len() == self.capacity {
                state.events.pop_front();
                state.lost += 1;
            }
            state.events.push_back(Event { sequence, change });
        }
        // A wake-up is a system call: only for a listener that sleeps.
        if state.waiting > 0 {
            self.filled.notify_all();
        }
    }
}

impl QueueState {
    fn take(&mut self) -> Result<Received, RecvError> {
        if self.lost > 0 {
            return Ok(Received::Lagged(std::mem::take(&mut self.lost)));
        }
        match self.events.pop_front() {
            Some(event) => Ok(Received::Event(event)),
            None if self.is_closed => Err(RecvError::Closed),
            None => Err(RecvError::Empty),
        }
    }
}

/// One listener's end. Threads that share it share its queue: each event goes to one of them.
pub struct Subscriber {
    queue: Arc<Queue>,
    source: Weak<Source>,
}

impl Subscriber {
    /// The next event or gap, without waiting for one.
    ///
    /// # Errors
    /// [`RecvError`].
    pub fn try_recv(&self) -> Result<Received, RecvError> {
        held(&self.queue.state).take()
    }

    /// The next event or gap, waited for at most `timeout`. It sleeps on the machine's own clock and so is not for simulated hosts.
    ///
    /// # Errors
    /// [`RecvError`].
    pub fn recv_timeout(&self, timeout: Duration) -> Result<Received, RecvError> {
        // A time too far away for the clock is waited for in steps.
        let deadline = Instant::now().checked_add(timeout);
        let mut state = held(&self.queue.state);
        loop {
            let received = state.take();
            if received != Err(RecvError::Empty) {
                return received;
            }
            let rest = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            if rest.is_zero() {
                return received;
            }
            state.waiting += 1;
            state = self.queue.filled.wait_timeout(state, rest.min(Duration::from_secs(3600))).unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
        }
    }

    /// Everything that comes, waiting for it, until the source is closed.
    pub fn iter(&self) -> impl Iterator<Item = Received> + '_ {
        std::iter::from_fn(|| {
            loop {
                match self.recv_timeout(Duration::MAX) {
                    Err(RecvError::Empty) => continue,
                    other => return other.ok(),
                }
            }
        })
    }

    /// Everything that is waiting now.
    pub fn try_iter(&self) -> impl Iterator<Item = Received> + '_ {
        std::iter::from_fn(|| self.try_recv().ok())
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        let Some(source) = self.source.upgrade() else { return };
        let mut listeners = held(&source.listeners);
        listeners.queues.retain(|queue| !Arc::ptr_eq(queue, &self.queue));
        source.listening.store(listeners.queues.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests;
