// SPDX-License-Identifier: Apache-2.0
//! What a thread of a child does with the cache, at random, and the look at every byte that it gets.

use crate::payload::{self, CELL_BYTES, Random};
use crate::worker::Shared;
use cxl_pool::cache::{BlockKey, Namespace, Pinned, PublishRequest, Published, Pulled, Reservation, Reserved};
use cxl_pool::copy::{LocalPlace, LocalRange};
use cxl_pool::{Error, Result};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Pins that one thread holds at most.
const MOST_PINS: usize = 24;

/// Counters with names.
macro_rules! counts {
    ($($name:ident),*) => {
        #[derive(Default)]
        pub struct Counts {
            $(pub $name: AtomicU64,)*
        }

        impl Counts {
            /// All of them by name.
            pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.load(Ordering::Relaxed))),*].into_iter()
            }
        }
    };
}

counts!(stored, aborted, not_stored, pulls, hits, foreign_hits, pinned, in_place, raw_looks, evicts, clears, failed);

impl Counts {
    /// Publications, hits, and those of blocks of other hosts.
    pub fn progress(&self) -> [u64; 3] {
        [&self.stored, &self.hits, &self.foreign_hits].map(|count| count.load(Ordering::Relaxed))
    }
}

fn count(counter: &AtomicU64, more: usize) {
    counter.fetch_add(more as u64, Ordering::Relaxed);
}

/// A pin that is held for a while.
struct Held {
    block: Pinned,
    /// The publication that was read through it first.
    publication: Option<u64>,
    /// Under which the pin was made.
    incarnation: u32,
}

/// One thread.
pub struct Operator {
    shared: Arc<Shared>,
    random: Random,
    number: u64,
    published: u64,
    held: Vec<Held>,
    buffer: Vec<u8>,
}

impl Operator {
    pub fn new(shared: Arc<Shared>, seed: u64, number: u64) -> Self {
        let buffer = vec![0; CELL_BYTES[1] as usize];
        Operator { shared, random: Random::new(seed), number, published: 0, held: Vec::new(), buffer }
    }

    pub fn run(&mut self) {
        let shared = self.shared.clone();
        while !shared.stopping.load(Ordering::Acquire) {
            match self.operate() {
                Ok(()) => {}
                Err(Error::Fenced { .. } | Error::Timeout { .. } | Error::Full { .. }) => {
                    count(&shared.counts.failed, 1);
                    std::thread::yield_now();
                }
                Err(error) => shared.bad(&format!("error {error}")),
            }
        }
        self.held.clear();
    }

    fn operate(&mut self) -> Result<()> {
        match self.random.below(400) {
            0 => self.clear(),
            1..10 => self.evict(),
            10..110 => self.request(),
            110..170 => self.publish_one(),
            170..230 => self.pull_one(),
            230..260 => self.pull_pieces(),
            260..370 => self.use_held(),
            _ => self.drop_held(),
        }
    }

    /// A block; those of the first chains are asked for more often.
    fn pick(&mut self) -> (Namespace, BlockKey, Option<BlockKey>) {
        let (space, chain, place) = self.pick_chain();
        let chain = &self.shared.names.chains[chain];
        (space, chain[place], place.checked_sub(1).map(|before| chain[before]))
    }

    fn pick_chain(&mut self) -> (Namespace, usize, usize) {
        let names = &self.shared.names;
        let space = names.spaces[self.random.below(names.spaces.len() as u64) as usize];
        let chain = self.random.below(names.chains.len() as u64).min(self.random.below(names.chains.len() as u64)) as usize;
        let place = self.random.below(names.chains[chain].len() as u64) as usize;
        (space, chain, place)
    }

    fn next_publication(&mut self, aborted: bool) -> u64 {
        self.published += 1;
        payload::publication(self.shared.start << 1 | self.number, self.published, aborted)
    }

    /// The publication of bytes that the cache vouches for.
    fn verify(&self, namespace: Namespace, key: BlockKey, bytes: &[u8], how: &str) -> u64 {
        match payload::check(namespace, key, bytes) {
            Ok(publication) => publication,
            Err(wrong) => {
                let cell = self.shared.cache.lookup(namespace, key).ok().flatten();
                self.shared.bad(&format!("wrong bytes by {how}, key {key}, now {cell:?}: {wrong}"))
            }
        }
    }

    fn publish_one(&mut self) -> Result<()> {
        let (namespace, key, parent) = self.pick();
        let publication = self.next_publication(false);
        let bytes = payload::bytes(namespace, key, publication);
        match self.shared.cache.publish(namespace, key, parent, &bytes) {
            Ok(Published::Stored) => count(&self.shared.counts.stored, 1),
            Ok(_) | Err(Error::Full { .. }) => count(&self.shared.counts.not_stored, 1),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// What a worker does with a prompt: find the blocks that are there, use them, publish those behind them.
    fn request(&mut self) -> Result<()> {
        let shared = self.shared.clone();
        let (namespace, chain, place) = self.pick_chain();
        let keys = &shared.names.chains[chain][..=place];
        let found = shared.cache.lookup_chain(namespace, keys)?.len();
        // Before the pins: those of a later incarnation than this one are not judged.
        let incarnation = shared.host.incarnation();
        let pinned = shared.cache.pin_chain(namespace, keys)?;
        for (block, key) in pinned.iter().zip(keys) {
            if (block.key(), block.namespace()) != (*key, namespace) {
                shared.bad(&format!("a pin of {} for {key}", block.key()));
            }
        }
        count(&shared.counts.pinned, pinned.len());
        let first = pinned.len().max(found);
        for block in pinned {
            let mut held = Held { block, publication: None, incarnation };
            self.look(&mut held)?;
            if self.held.len() < MOST_PINS && self.random.below(4) == 0 {
                self.held.push(held);
            }
        }
        let count = 1 + self.random.below(12) as usize;
        let rest = &keys[first.min(keys.len())..];
        self.publish_batch(namespace, &rest[..rest.len().min(count)], first.checked_sub(1).map(|before| keys[before]))
    }

    fn publish_batch(&mut self, namespace: Namespace, keys: &[BlockKey], parent: Option<BlockKey>) -> Result<()> {
        let shared = self.shared.clone();
        let mut plans = Vec::with_capacity(keys.len());
        for (index, &key) in keys.iter().enumerate() {
            let aborted = self.random.below(12) == 0;
            let publication = self.next_publication(aborted);
            let parent = index.checked_sub(1).map(|before| keys[before]).or(parent);
            let len_bytes = payload::len_bytes(publication) as u64;
            plans.push((PublishRequest { namespace, key, parent, len_bytes }, publication, aborted));
        }
        let requests: Vec<PublishRequest> = plans.iter().map(|plan| plan.0).collect();
        let answers = shared.cache.reserve_all(&requests)?;
        if answers.len() != requests.len() {
            shared.bad(&format!("{} answers for {} requests", answers.len(), requests.len()));
        }
        let mut filled = Vec::with_capacity(answers.len());
        for (answer, (request, publication, aborted)) in answers.into_iter().zip(&plans) {
            let Reserved::Cell(mut reservation) = answer else {
                count(&shared.counts.not_stored, 1);
                continue;
            };
            if reservation.key() != request.key || reservation.len_bytes() != request.len_bytes {
                shared.bad(&format!("a cell of {} bytes for {}: asked for {request:?}", reservation.len_bytes(), reservation.key()));
            }
            self.fill(&mut reservation, &payload::bytes(namespace, request.key, *publication))?;
            if *aborted {
                count(&shared.counts.aborted, 1);
                // Both ways of giving up.
                if publication & 2 == 0 { reservation.abort()? } else { drop(reservation) }
            } else {
                filled.push(reservation);
            }
        }
        if self.random.below(8) == 0 {
            std::thread::sleep(Duration::from_micros(self.random.below(3_000)));
        }
        let stored = filled.len();
        shared.cache.commit_all(filled)?;
        count(&shared.counts.stored, stored);
        Ok(())
    }

    /// Fills a cell in one of the ways there are.
    fn fill(&mut self, reservation: &mut Reservation, bytes: &[u8]) -> Result<()> {
        let cut = self.random.below(bytes.len() as u64 + 1) as usize;
        match self.random.below(4) {
            0 => reservation.fill([bytes]),
            1 => reservation.fill([&bytes[..cut], &[], &bytes[cut..]]),
            2 => {
                reservation.write(cut as u64, &bytes[cut..])?;
                reservation.write(0, &bytes[..cut])
            }
            _ => {
                let Some(address) = reservation.address() else { return reservation.fill([bytes]) };
                // SAFETY: the range is that of the reservation, which no other thread writes to, and the pool stays mapped while it lives.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address.as_ptr(), bytes.len()) };
                Ok(())
            }
        }
    }

    fn pull_one(&mut self) -> Result<()> {
        let (namespace, key, _) = self.pick();
        let owner = self.shared.cache.lookup(namespace, key)?.map(|found| found.owner);
        count(&self.shared.counts.pulls, 1);
        if let Pulled::Hit { len_bytes } = self.shared.cache.pull(namespace, key, &mut self.buffer)? {
            self.verify(namespace, key, &self.buffer[..len_bytes as usize], "pull");
            self.count_hit(owner);
        }
        Ok(())
    }

    fn count_hit(&self, owner: Option<u16>) {
        count(&self.shared.counts.hits, 1);
        if owner.is_some_and(|owner| owner != self.shared.host.slot()) {
            count(&self.shared.counts.foreign_hits, 1);
        }
    }

    /// Pulls into pieces that do not follow one another.
    fn pull_pieces(&mut self) -> Result<()> {
        let (namespace, key, _) = self.pick();
        let Some(found) = self.shared.cache.lookup(namespace, key)? else { return Ok(()) };
        let len = found.len_bytes as usize;
        let cut = self.random.below(len as u64 + 1) as usize;
        let mut halves = [vec![0; cut], vec![0; len - cut]];
        let pieces = halves.each_mut().map(|half| LocalRange { address: NonNull::from(&mut half[..]).cast(), len_bytes: half.len() });
        count(&self.shared.counts.pulls, 1);
        // SAFETY: the pieces are the vectors above, which no thread touches until the call returns.
        let pulled = unsafe { self.shared.cache.pull_all_raw(namespace, &[key], LocalPlace::Host, |_, _| pieces) }?;
        // Otherwise the block is another publication by now.
        if let [Pulled::Hit { .. }] = pulled[..] {
            self.verify(namespace, key, &halves.concat(), "pull in pieces");
            self.count_hit(Some(found.owner));
        }
        Ok(())
    }

    fn use_held(&mut self) -> Result<()> {
        if self.held.is_empty() {
            return self.pull_one();
        }
        let chosen = self.random.below(self.held.len() as u64) as usize;
        let mut held = self.held.swap_remove(chosen);
        self.look(&mut held)?;
        self.look_at_cell(&held)?;
        self.held.push(held);
        Ok(())
    }

    /// Uses a pinned block, by a copy or in place.
    fn look(&mut self, held: &mut Held) -> Result<()> {
        let (namespace, key, len) = (held.block.namespace(), held.block.key(), held.block.len_bytes() as usize);
        count(&self.shared.counts.pulls, 1);
        let publication = if self.random.below(2) == 0 {
            match held.block.copy_to(&mut self.buffer)? {
                None => self.verify(namespace, key, &self.buffer[..len], "copy of a pinned block"),
                Some(_) => return Ok(()),
            }
        } else {
            // Judged afterwards: only what did not change while it was read counts.
            match held.block.read(|bytes| payload::check(namespace, key, bytes))? {
                Ok(Ok(publication)) => publication,
                Ok(Err(wrong)) => self.shared.bad(&format!("wrong bytes in place, key {key}, cell {}: {wrong}", held.block.cell())),
                Err(_) => return Ok(()),
            }
        };
        count(&self.shared.counts.in_place, 1);
        self.count_hit(Some(held.block.owner()));
        if held.publication.is_some_and(|before| before != publication) {
            self.shared.bad(&format!("a pinned block of {key} was publication {:x?}, now {publication:#x}", held.publication));
        }
        held.publication = Some(publication);
        Ok(())
    }

    /// Whatever became of the block, the bytes of a pinned cell stay while the host that pinned it is not fenced.
    fn look_at_cell(&mut self, held: &Held) -> Result<()> {
        let (Some(publication), len) = (held.publication, held.block.len_bytes() as usize) else { return Ok(()) };
        let (shared, offset) = (&self.shared, held.block.offset());
        let op = shared.host.enter()?;
        let memory = shared.host.lines().memory();
        memory.flush_range(offset, len as u64)?;
        memory.fence_all();
        memory.copy_out(offset, &mut self.buffer[..len])?;
        memory.fence_loads();
        shared.host.check_fences(&op)?;
        if op.incarnation() != held.incarnation {
            return Ok(());
        }
        count(&shared.counts.raw_looks, 1);
        let (namespace, key, cell) = (held.block.namespace(), held.block.key(), held.block.cell());
        match payload::check(namespace, key, &self.buffer[..len]) {
            Ok(found) if found == publication => Ok(()),
            other => shared.bad(&format!("cell {cell} with {key} was written while it was pinned: {other:x?}, was {publication:#x}")),
        }
    }

    fn drop_held(&mut self) -> Result<()> {
        for _ in 0..1 + self.random.below(8) {
            if !self.held.is_empty() {
                let chosen = self.random.below(self.held.len() as u64) as usize;
                self.held.swap_remove(chosen);
            }
        }
        Ok(())
    }

    fn evict(&mut self) -> Result<()> {
        let (namespace, key, _) = self.pick();
        self.shared.cache.evict(namespace, key)?;
        count(&self.shared.counts.evicts, 1);
        Ok(())
    }

    fn clear(&mut self) -> Result<()> {
        // Seldom, so that there is something to be found.
        if self.random.below(8) == 0 {
            let namespace = self.shared.names.spaces[self.random.below(self.shared.names.spaces.len() as u64) as usize];
            let all = self.random.below(4) == 0;
            self.shared.cache.clear((!all).then_some(namespace))?;
            count(&self.shared.counts.clears, 1);
        }
        Ok(())
    }
}
