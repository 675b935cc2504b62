// SPDX-License-Identifier: Apache-2.0
//! What one process of the cache scenario does: publish, look up, pin, pull, use in place, evict, clear, and keep cold blocks in a second
//! level and bring them back.

use super::cache_ledger::{Name, Shared};
use crate::Env;
use cxl_pool::cache::{Cache, Pinned, PublishRequest, Published, Pulled, Reservation, Reserved};
use cxl_pool::host::Host;
use cxl_pool::metrics::MissReason;
use cxl_pool::{Error, Result};

/// What all processes of a run are like.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// Keys of each namespace.
    pub keys: u16,
    /// Namespaces.
    pub namespaces: u8,
    /// Largest cell, in bytes.
    pub most_bytes: usize,
    /// No host takes a block away, and there is room for all: stored blocks are found, as long as no host is fenced.
    pub roomy: bool,
    /// Blocks come and go, and little else happens.
    pub tight: bool,
    /// One reservation in so many is given up; 0 = none.
    pub abort_one_in: usize,
    /// Blocks in a batch.
    pub batch: usize,
    /// Lines may look damaged while their writer stands still.
    pub half_written: bool,
    /// Longest rest before an operation, in microseconds.
    pub longest_wait_us: usize,
}

/// One thread of a process at work.
pub struct Worker<'a> {
    /// The thread.
    pub env: &'a Env,
    /// The history.
    pub shared: &'a Shared,
    /// What it does.
    pub habits: Habits,
    /// Its host.
    pub host: &'a Host,
    /// Pins, with their names and tickets.
    pub pins: Vec<(Pinned, Name, u64)>,
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        // What unwinds is dead already, and no checker asks about its pins.
        for (_, _, ticket) in &self.pins {
            if let Ok(mut ledger) = self.shared.try_borrow_mut() {
                ledger.unpins(*ticket);
            }
        }
    }
}

impl Worker<'_> {
    fn name(&self) -> Name {
        Name(self.env.below(self.habits.namespaces.into()) as u8, self.env.below(self.habits.keys.into()) as u16)
    }

    fn len_bytes(&self) -> usize {
        match self.env.below(4) {
            0 => self.habits.most_bytes,
            _ => 8 + self.env.below(self.habits.most_bytes - 7),
        }
    }

    /// Hands on what no fault explains.
    fn tolerate(&self, error: Error) -> Result<()> {
        match error {
            Error::Fenced { .. } => self.env.platform().sleep_ns(300_000),
            Error::BadLine { .. } if self.habits.half_written => self.env.platform().sleep_ns(300_000),
            error => return Err(error),
        }
        Ok(())
    }

    /// As [`Worker::tolerate`], where a bound may be met as well.
    fn tolerate_full(&self, error: Error) -> Result<()> {
        match error {
            Error::Full { .. } => Ok(()),
            error => self.tolerate(error),
        }
    }

    /// One operation.
    pub fn operate(&mut self, cache: &Cache) -> Result<()> {
        if self.env.below(3) == 0 {
            self.env.platform().sleep_ns(1 + self.env.below(self.habits.longest_wait_us * 1000) as u64);
        }
        match self.env.below(23) {
            _ if self.habits.tight && self.env.below(2) == 0 => self.evict(cache),
            0..3 => self.publish(cache),
            3..7 => self.publish_batch(cache),
            7 => self.look_up(cache),
            8 => self.look_up_chain(cache),
            9..12 => self.pull(cache),
            12 | 13 => self.pin(cache),
            14 => self.pin_chain(cache),
            15 => self.use_pin(),
            16 | 17 => self.unpin(),
            18 if !self.habits.roomy => self.evict(cache),
            19 if !self.habits.roomy && self.env.below(4) == 0 => self.clear(cache),
            20 => self.demote(cache),
            21 => self.promote(cache),
            _ => self.use_pin(),
        }
    }

    fn publish(&mut self, cache: &Cache) -> Result<()> {
        let name = self.name();
        let (number, bytes) = self.shared.borrow_mut().publication(name, self.len_bytes());
        self.shared.borrow_mut().commits(number);
        match cache.publish(name.namespace(), name.key(), None, &bytes) {
            Ok(Published::Stored) => self.stored(name),
            Ok(Published::Exists | Published::Busy) => {}
            Err(error) => self.tolerate_full(error)?,
        }
        Ok(())
    }

    fn stored(&self, name: Name) {
        if self.habits.roomy {
            // Who tells others of a block does so by later stores; the ledger needs none, so it waits until the line has arrived.
            self.env.memory().fence_all();
        }
        let mut ledger = self.shared.borrow_mut();
        ledger.counts.0 += 1;
        ledger.stored.insert(name);
    }

    fn publish_batch(&mut self, cache: &Cache) -> Result<()> {
        let first = self.name();
        let count = 1 + self.env.below(self.habits.batch);
        let (mut requests, mut tried) = (Vec::new(), Vec::new());
        for step in 0..count as u16 {
            let name = Name(first.0, (first.1 + step) % self.habits.keys);
            let parent = (step > 0).then(|| Name(first.0, (first.1 + step - 1) % self.habits.keys).key());
            let (number, bytes) = self.shared.borrow_mut().publication(name, self.len_bytes());
            requests.push(PublishRequest { namespace: name.namespace(), key: name.key(), parent, len_bytes: bytes.len() as u64 });
            tried.push((name, number, bytes));
        }
        let answers = match cache.reserve_all(&requests) {
            Ok(answers) => answers,
            Err(error) => return self.tolerate(error),
        };
        if answers.len() != requests.len() {
            self.env.fail(format!("{} requests have {} answers", requests.len(), answers.len()));
        }
        let mut begun = Vec::new();
        for (answer, (name, number, bytes)) in answers.into_iter().zip(tried) {
            if let Reserved::Cell(reservation) = answer {
                self.shared.borrow_mut().writes(self.env, reservation.cell(), name);
                begun.push((reservation, name, number, bytes));
            }
        }
        let mut ready = Vec::new();
        for (mut reservation, name, number, bytes) in begun {
            let filled = match self.env.below(8) {
                0 => {
                    let (head, tail) = bytes.split_at(self.env.below(bytes.len()));
                    reservation.write(head.len() as u64, tail).and_then(|()| reservation.write(0, head))
                }
                1 | 2 => {
                    // The simulator has no addresses; what it says is that there will be stores in place.
                    reservation.address();
                    self.env.store(reservation.offset(), &bytes)
                }
                _ => reservation.fill(bytes.chunks(1 + self.env.below(200))),
            };
            if let Err(error) = filled {
                self.give_up(reservation);
                self.tolerate(error)?;
            } else if self.habits.abort_one_in > 0 && self.env.below(self.habits.abort_one_in) == 0 {
                self.give_up(reservation);
            } else {
                ready.push((reservation, name, number));
            }
        }
        self.commit(cache, ready)
    }

    fn commit(&mut self, cache: &Cache, mut ready: Vec<(Reservation, Name, usize)>) -> Result<()> {
        let together = self.env.below(2) == 0;
        while !ready.is_empty() {
            let rest = if together { Vec::new() } else { ready.split_off(1) };
            let (mut reservations, mut names) = (Vec::new(), Vec::new());
            for (reservation, name, number) in std::mem::replace(&mut ready, rest) {
                let mut ledger = self.shared.borrow_mut();
                ledger.wrote(self.env, reservation.cell());
                ledger.commits(number);
                reservations.push(reservation);
                names.push(name);
            }
            match cache.commit_all(reservations) {
                Ok(()) => names.into_iter().for_each(|name| self.stored(name)),
                Err(error) => self.tolerate(error)?,
            }
        }
        Ok(())
    }

    fn give_up(&self, reservation: Reservation) {
        self.shared.borrow_mut().wrote(self.env, reservation.cell());
        match self.env.below(2) {
            0 => drop(reservation),
            // What it says is what `drop` hides: the host is fenced.
            _ => drop(reservation.abort()),
        }
    }

    /// Whether no cell ever changed hands. Such a cell gets a new stamp, which a pin cannot tell from another block; and with another
    /// host's claim on it, it loses its block.
    fn is_calm(&self) -> bool {
        let ledger = self.shared.borrow();
        // A line whose writer stands still in the middle of it is no block for the time being.
        !ledger.moved && !self.habits.half_written && self.env.view(|view| ledger.no_host_failed(view))
    }

    /// Whether a block must be there: it was stored before, and nothing takes blocks away.
    fn must_be(&self, name: Name) -> bool {
        self.habits.roomy && self.shared.borrow().stored.contains(&name)
    }

    /// Fails the run for a block that must be there and is not.
    fn missed(&self, must_be: bool, name: Name, how: &str) {
        if must_be && self.is_calm() {
            self.env.fail(format!("P5: {name:?} was stored and not evicted, but a {how} misses it"));
        }
    }

    fn look_up(&self, cache: &Cache) -> Result<()> {
        let name = self.name();
        let must_be = self.must_be(name);
        match cache.lookup(name.namespace(), name.key()) {
            Ok(Some(_)) => {}
            Ok(None) => self.missed(must_be, name, "lookup"),
            Err(error) => self.tolerate(error)?,
        }
        Ok(())
    }

    fn chain(&self) -> Vec<Name> {
        let first = self.name();
        let count = 1 + self.env.below(4) as u16;
        (0..count).map(|step| Name(first.0, (first.1 + step) % self.habits.keys)).collect()
    }

    fn look_up_chain(&self, cache: &Cache) -> Result<()> {
        let names = self.chain();
        let keys: Vec<_> = names.iter().map(|name| name.key()).collect();
        let must_be = names.iter().take_while(|name| self.must_be(**name)).count();
        match cache.lookup_chain(names[0].namespace(), &keys) {
            Ok(found) if found.len() < must_be => self.missed(true, names[found.len()], "chain lookup"),
            Ok(_) => {}
            Err(error) => self.tolerate(error)?,
        }
        Ok(())
    }

    fn pull(&self, cache: &Cache) -> Result<()> {
        let name = self.name();
        let must_be = self.must_be(name);
        let room = if self.env.below(8) == 0 { self.habits.most_bytes / 2 } else { self.habits.most_bytes + 1 };
        let mut buffer = vec![0; room];
        match cache.pull(name.namespace(), name.key(), &mut buffer) {
            Ok(Pulled::Hit { len_bytes }) => {
                self.shared.borrow_mut().accepted(self.env, name, &buffer[..len_bytes as usize], "pull");
            }
            Ok(Pulled::Miss(reason)) => {
                self.only_the_checksum(reason);
                self.missed(must_be, name, "pull");
            }
            Err(Error::Invalid(_)) if room < self.habits.most_bytes => {}
            Err(error) => self.tolerate_full(error)?,
        }
        Ok(())
    }

    /// Steps 4 and 5 notice everything as long as the proofs are true: the checksum is never the only one to see it.
    fn only_the_checksum(&self, reason: MissReason) {
        if reason == MissReason::Checksum {
            self.env.fail("P1: bytes that the descriptor and the fences vouched for have another checksum");
        }
    }

    fn hold(&mut self, pinned: Pinned, name: Name) {
        let (slot, incarnation) = (self.host.slot(), pinned.incarnation());
        let (cell, offset, len_bytes) = (pinned.cell(), pinned.offset(), pinned.len_bytes());
        let ticket = self.shared.borrow_mut().pinned(self.env, name, cell, offset, len_bytes, slot, incarnation);
        self.pins.push((pinned, name, ticket));
    }

    fn pin(&mut self, cache: &Cache) -> Result<()> {
        let name = self.name();
        let must_be = self.must_be(name);
        match cache.pin(name.namespace(), name.key()) {
            Ok(Ok(pinned)) => self.hold(pinned, name),
            Ok(Err(_)) => self.missed(must_be, name, "pin"),
            Err(error) => self.tolerate_full(error)?,
        }
        Ok(())
    }

    fn pin_chain(&mut self, cache: &Cache) -> Result<()> {
        let names = self.chain();
        let keys: Vec<_> = names.iter().map(|name| name.key()).collect();
        match cache.pin_chain(names[0].namespace(), &keys) {
            Ok(pinned) => pinned.into_iter().zip(names).for_each(|(pinned, name)| self.hold(pinned, name)),
            Err(error) => self.tolerate_full(error)?,
        }
        Ok(())
    }

    fn use_pin(&mut self) -> Result<()> {
        if self.pins.is_empty() {
            return Ok(());
        }
        let (pinned, name, _) = &self.pins[self.env.below(self.pins.len())];
        let in_place = self.env.below(2) == 0;
        let mut buffer = vec![0; pinned.len_bytes() as usize];
        let verdict = if in_place {
            let memory = self.env.memory();
            let used = pinned.invalidate().and_then(|()| memory.copy_out(pinned.offset(), &mut buffer));
            used.and_then(|()| pinned.is_unchanged()).map(|unchanged| (!unchanged).then_some(MissReason::Changed))
        } else {
            pinned.copy_to(&mut buffer)
        };
        match verdict {
            Ok(None) => self.shared.borrow_mut().accepted(self.env, *name, &buffer, "use of a pin"),
            Ok(Some(reason)) => {
                self.only_the_checksum(reason);
                if self.is_calm() {
                    self.env.fail(format!("P2: pinned {name:?} was refused ({reason:?}), and no cell ever changed hands"));
                }
            }
            Err(error) => self.tolerate(error)?,
        }
        Ok(())
    }

    /// Gives a pin back.
    fn unpin(&mut self) -> Result<()> {
        if !self.pins.is_empty() {
            let (pinned, _, ticket) = self.pins.swap_remove(self.env.below(self.pins.len()));
            self.shared.borrow_mut().unpins(ticket);
            drop(pinned);
        }
        Ok(())
    }

    /// Gives all pins back.
    pub fn unpin_all(&mut self) -> Result<()> {
        while !self.pins.is_empty() {
            self.unpin()?;
        }
        Ok(())
    }

    fn evict(&self, cache: &Cache) -> Result<()> {
        let name = self.name();
        match cache.evict(name.namespace(), name.key()) {
            Ok(_) => Ok(()),
            Err(error) => self.tolerate(error),
        }
    }

    /// Copies a block that is next to go into the second level, which may keep it otherwise than it was written.
    fn demote(&self, cache: &Cache) -> Result<()> {
        let blocks = cache.coldest(2);
        let Some(block) = blocks.get(self.env.below(blocks.len().max(1))) else { return Ok(()) };
        if self.env.below(2) == 0 {
            self.env.platform().sleep_ns(1 + self.env.below(self.habits.longest_wait_us * 1000) as u64);
        }
        let name = Name::named(block.namespace(), block.key());
        let mut bytes = vec![0; block.len_bytes() as usize];
        match cache.copy_cold(block, &mut bytes) {
            Ok(Pulled::Hit { .. }) => {
                let mut ledger = self.shared.borrow_mut();
                ledger.accepted(self.env, name, &bytes, "copy of a cold block");
                ledger.second_level.put(name, bytes, self.env.below(6), self.env.below(1 << 16));
            }
            Ok(Pulled::Miss(reason)) => self.only_the_checksum(reason),
            Err(error) => self.tolerate(error)?,
        }
        Ok(())
    }

    /// Brings a block back that any process has put into the second level.
    fn promote(&self, cache: &Cache) -> Result<()> {
        let Some((name, bytes)) = self.shared.borrow_mut().second_level.get(self.env.below(1 << 16)) else { return Ok(()) };
        match cache.publish(name.namespace(), name.key(), None, &bytes) {
            Ok(Published::Stored) => self.stored(name),
            Ok(Published::Exists | Published::Busy) => {}
            Err(error) => self.tolerate_full(error)?,
        }
        Ok(())
    }

    fn clear(&self, cache: &Cache) -> Result<()> {
        let all = self.env.below(3) == 0;
        match cache.clear((!all).then(|| self.name().namespace())) {
            Ok(_) => Ok(()),
            Err(error) => self.tolerate(error),
        }
    }
}
