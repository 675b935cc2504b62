// SPDX-License-Identifier: Apache-2.0
//! Requests to the owners of cells: only they can evict. Each host has one line to ask in; every process looks at all of them, and serves
//! them for its own cells. A request is a favour: no process waits for it in the pool, and the requester looks at the effect.
//!
//! Requests are not acknowledged. So the next one of a host waits, in the memory of its process, until owners have had time for
//! several rounds of their service. One that is slower misses it, and what waits goes with its process.

use crate::background::held;
use crate::cache::cells::Pace;
use crate::cache::cells::evict::Reason;
use crate::cache::cells::local::LocalCells;
use crate::cache::{BlockKey, Cache, Inner, Namespace};
use crate::error::{Error, Result};
use crate::fault::point;
use crate::host::{Host, Op};
use crate::limits::MAX_SLOTS;
use crate::media::{Ask, Identity};
use std::collections::{HashSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

/// Rest between two requests of one process for room, in nanoseconds.
const ROOM_PERIOD_NS: u64 = 100_000_000;

/// Rounds of the service that owners have for a request before the next one of the same host takes its place.
const ROUNDS_PER_ASK: u64 = 3;
/// Requests that wait at most; the oldest go.
const MAX_WAITING: usize = 1 << 12;

/// The requests of this process, and what it has dealt with of the other hosts'.
pub(in crate::cache) struct OwnerRequests {
    host: Host,
    local: LocalCells,
    /// Rest between two requests of this host, in nanoseconds.
    rest_ns: u64,
    /// Those for which it is not time yet.
    waiting: Mutex<VecDeque<Ask>>,
    room: Pace,
    answered: Mutex<Vec<Option<(u32, u64)>>>,
}

impl OwnerRequests {
    /// None yet, of a cache whose upkeep has a round each `service_ms`.
    pub fn new(host: &Host, local: &LocalCells, service_ms: u64) -> Self {
        OwnerRequests {
            host: host.clone(),
            local: local.clone(),
            rest_ns: ROUNDS_PER_ASK * service_ms * 1_000_000,
            waiting: Mutex::default(),
            room: Pace::default(),
            answered: Mutex::new(vec![None; MAX_SLOTS]),
        }
    }

    fn lock_waiting(&self) -> MutexGuard<'_, VecDeque<Ask>> {
        held(&self.waiting)
    }

    fn lock_answered(&self) -> MutexGuard<'_, Vec<Option<(u32, u64)>>> {
        held(&self.answered)
    }

    /// Publishes the request that has waited longest, if it is time.
    fn publish_next(&self, op: &Op<'_>) -> Result<()> {
        let header = self.local.header();
        self.host.inner.with_mutex(&header.ask, || {
            let now_ns = self.host.platform().now_ns().max(1);
            let last_ns = header.asked_at_ns.load(Ordering::Relaxed);
            // A time to come can only be something that was left there.
            let since_ns = now_ns.checked_sub(last_ns).filter(|_| last_ns != 0);
            if since_ns.is_some_and(|since_ns| since_ns < self.rest_ns) {
                return Ok(());
            }
            let Some(request) = self.lock_waiting().pop_front() else { return Ok(()) };
            header.asked_at_ns.store(now_ns, Ordering::Relaxed);
            let number = header.asked.fetch_add(1, Ordering::Relaxed) + 1;
            let line = Ask { incarnation: op.incarnation(), number, ..request };
            if let Some(known) = self.lock_answered().get_mut(usize::from(self.host.slot())) {
                *known = Some((line.incarnation, number));
            }
            self.host.lines().publish(self.host.slot().into(), line)
        })?;
        point!("cache.asked");
        Ok(())
    }

    fn asks(&self) -> Result<Vec<Option<Ask>>> {
        let slots: Vec<u64> = (0..u64::from(self.host.geometry().slots)).collect();
        let mut fetched: Vec<Result<Ask>> = Vec::with_capacity(slots.len());
        self.host.lines().fetch_many(&slots, &mut fetched)?;
        Ok(fetched.into_iter().map(|ask| ask.ok().filter(|ask| ask.number != 0)).collect())
    }

    /// Requests from before this process started do not concern it.
    pub(in crate::cache) fn skip_asks(&self) -> Result<()> {
        let asks = self.asks()?;
        *self.lock_answered() = asks.iter().map(|ask| ask.map(|ask| (ask.incarnation, ask.number))).collect();
        Ok(())
    }

    fn live_hosts(&self) -> Result<u64> {
        let slots: Vec<u64> = (0..u64::from(self.host.geometry().slots)).collect();
        let mut fetched: Vec<Result<Identity>> = Vec::with_capacity(slots.len());
        self.host.lines().fetch_many(&slots, &mut fetched)?;
        let mut live = 0;
        for (slot, identity) in fetched.into_iter().enumerate() {
            match identity {
                Ok(identity) if identity.state == Identity::LIVE && identity.incarnation > 0 => {
                    live += u64::from(!self.host.is_fenced(slot as u16, identity.incarnation)?);
                }
                Ok(_) | Err(Error::BadLine { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(live)
    }
}

/// Notes a request. Requests for room go first: a publish waits for them.
fn queue_up(waiting: &mut VecDeque<Ask>, request: Ask) {
    if waiting.contains(&request) {
        return;
    }
    if waiting.len() >= MAX_WAITING {
        waiting.pop_front();
    }
    if request.what == Ask::ROOM { waiting.push_front(request) } else { waiting.push_back(request) }
}

impl Inner {
    /// Has a request of this host published to all but this process: it does its part by itself, and may publish a block again before it
    /// would answer. It is published now, or by the upkeep where the one before has not been there for long.
    pub(in crate::cache) fn ask(&self, what: u32, class: u32, key: BlockKey, namespace: Namespace) -> Result<()> {
        let request = Ask { what, class, key: key.0, namespace: namespace.0, ..Ask::default() };
        queue_up(&mut self.requests.lock_waiting(), request);
        self.request_next()
    }

    pub(in crate::cache) fn request_next(&self) -> Result<()> {
        if self.requests.lock_waiting().is_empty() {
            return Ok(());
        }
        self.requests.publish_next(&self.store.work()?)
    }

    /// Asks hosts with many chunks for one, if this process has not done so just now.
    pub(in crate::cache) fn ask_for_room(&self, class: usize) -> Result<()> {
        if !self.requests.room.is_time(self.host.platform().now_ns(), ROOM_PERIOD_NS) {
            return Ok(());
        }
        // The answer to the request before may be a chunk without an owner.
        self.store.has_exhausted(class, false);
        self.ask(Ask::ROOM, class as u32, BlockKey([0; 16]), Namespace([0; 16]))
    }

    pub(in crate::cache) fn answer_asks(&self) -> Result<()> {
        let mut done = Ok(());
        for (slot, ask) in self.requests.asks()?.into_iter().enumerate() {
            let Some(ask) = ask else { continue };
            let id = Some((ask.incarnation, ask.number));
            // One of this process that was published since the line was fetched is a later one.
            let before = self.requests.lock_answered().get_mut(slot).filter(|known| **known < id).map(|known| std::mem::replace(known, id));
            let Some(before) = before else { continue };
            point!("cache.ask_seen");
            if let Err(error) = self.answer(&ask) {
                // The next round tries again what may work then.
                if matches!(error, Error::Fenced { .. } | Error::Timeout { .. })
                    && let Some(known) = self.requests.lock_answered().get_mut(slot).filter(|known| **known == id)
                {
                    *known = before;
                }
                done = done.and(Err(error));
            }
        }
        done
    }

    fn answer(&self, ask: &Ask) -> Result<()> {
        match ask.what {
            Ask::EVICT => self.remove_blocks(|block| block.key == ask.key && block.namespace == ask.namespace).map(drop),
            Ask::CLEAR => self.clear_own(Some(Namespace(ask.namespace))).map(drop),
            Ask::CLEAR_ALL => self.clear_own(None).map(drop),
            _ => self.make_room_for_others(ask.class as usize),
        }
    }

    /// Gives a chunk back if this process has more than its share of those of a class: an equal part of its host's equal part.
    fn make_room_for_others(&self, class: usize) -> Result<()> {
        let Some(chunks) = self.geometry().cells.get(class).map(|class| class.chunks).filter(|&chunks| chunks > 0) else { return Ok(()) };
        let per_chunk = u64::from(self.geometry().cells_per_chunk);
        let mine = self.store.cells().counts(class).2 / per_chunk;
        if mine <= chunks / self.requests.live_hosts()?.max(1) / self.pins.live_processes().max(1) || mine <= 1 {
            return Ok(());
        }
        let settled = self.store.cells().emptiest(class);
        for chunk in settled {
            // Otherwise its blocks would go for nothing.
            let cells: Vec<u64> = self.store.cells_of(chunk).collect();
            if self.store.is_beside_others(chunk)? || self.store.uses(&cells)?.iter().any(|seen| seen.pinned) {
                continue;
            }
            self.store.cells().drain(chunk, true);
            let blocks = self.store.cells().blocks_in(chunk);
            let result = self.remove_each(blocks, Reason::Asked).and_then(|_| self.store.give_back(chunk));
            if !matches!(result, Ok(true)) {
                self.store.cells().drain(chunk, false);
            }
            // A host may have pinned one of them meanwhile: then it is another chunk's turn.
            if result? {
                break;
            }
        }
        Ok(())
    }
}

impl Cache {
    /// Evicts a block of any owner: right away if this process does, else soon, by a request to its owner. True when it was this
    /// process's. A pinned block stays.
    ///
    /// A host asks for one thing at a time: further requests wait for the upkeep of this process ([`Cache::service_round`]), some tens of
    /// milliseconds each. A request can be lost, with a process that ends or with an owner that is slow: a caller that needs the block to
    /// be gone looks for it, and asks again.
    ///
    /// # Errors
    /// [`Error::Fenced`], those of the memory.
    pub fn evict(&self, namespace: Namespace, key: BlockKey) -> Result<bool> {
        let mine = self.inner.remove_blocks(|block| block.key == key.0 && block.namespace == namespace.0)? > 0;
        if !mine {
            self.inner.ask(Ask::EVICT, 0, key, namespace)?;
        }
        Ok(mine)
    }

    /// Evicts several blocks of any owner: this process's in one pass, the others by one request each, as [`Cache::evict`]. Tells of
    /// each key whether its block is gone now; one that is pinned stays, and one of another process may go a little later.
    ///
    /// # Errors
    /// [`Error::Fenced`], those of the memory.
    pub fn evict_all(&self, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<bool>> {
        let wanted: HashSet<[u8; 16]> = keys.iter().map(|key| key.0).collect();
        self.inner.remove_blocks(|block| block.namespace == namespace.0 && wanted.contains(&block.key))?;
        let left = self.inner.index.found_of(namespace, keys)?;
        for (&key, _) in keys.iter().zip(&left).filter(|(_, found)| found.is_some()) {
            self.inner.ask(Ask::EVICT, 0, key, namespace)?;
        }
        Ok(left.iter().map(Option::is_none).collect())
    }

    /// Evicts the blocks of a namespace, or all blocks, of every process and host, as far as they are not pinned: this process's right
    /// away, the others' soon, by a request as that of [`Cache::evict`]. Returns how many were this process's.
    ///
    /// # Errors
    /// [`Error::Fenced`], those of the memory.
    pub fn clear(&self, namespace: Option<Namespace>) -> Result<usize> {
        let what = if namespace.is_some() { Ask::CLEAR } else { Ask::CLEAR_ALL };
        self.inner.ask(what, 0, BlockKey([0; 16]), namespace.unwrap_or(Namespace([0; 16])))?;
        self.inner.clear_own(namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_request_goes_where_too_many_wait() {
        let (room, limit) = (Ask { what: Ask::ROOM, ..Ask::default() }, MAX_WAITING as u32);
        let evict = |number: u32| Ask { what: Ask::EVICT, class: number, ..Ask::default() };
        let mut waiting = VecDeque::new();
        let mut add = |request| {
            queue_up(&mut waiting, request);
            (waiting.len() as u32, waiting.front().copied())
        };
        for number in 0..limit {
            assert_eq!(add(evict(number)), (number + 1, Some(evict(0))));
        }
        assert_eq!(add(evict(limit - 1)), (limit, Some(evict(0))), "it waits already");
        assert_eq!(add(evict(limit)), (limit, Some(evict(1))));
        assert_eq!(add(room), (limit, Some(room)), "first of all");
    }
}
