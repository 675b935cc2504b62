// SPDX-License-Identifier: Apache-2.0
//! Publishing: reserve a cell, fill it, commit (CACHE.md section 4).
//!
//! One fence check carries the safety: the descriptor says WRITING, *then* the own fence is fetched, *then* the first payload byte is
//! written. An adopter does the same the other way round, so either it sees WRITING and leaves the cell alone, or this host sees its fence.

use super::events::Change;
use super::index::{Home, Inserted};
use super::policy::Place;
use super::{BlockKey, Inner, Namespace};
use crate::background::held;
use crate::copy::{Checksum, LocalRange, Outcome, WriteList};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::HeldOp;
use crate::media::{Descriptor, REFERENCE_BYTES};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

/// A block to be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Its namespace.
    pub namespace: Namespace,
    /// Its key.
    pub key: BlockKey,
    /// Key of the block before it in its chain, for policies that look at chains and for listeners; `None` of a first block.
    pub parent: Option<BlockKey>,
    /// Its length in bytes, at least 1 and at most the largest cell.
    pub len_bytes: u64,
}

/// What became of a wish.
pub enum Reserved {
    /// A cell to fill.
    Cell(Reservation),
    /// A block of this key is there, or is being written by somebody.
    Exists,
    /// A block of this key is there and may be about to go: not published, and perhaps soon not there.
    Busy,
    /// There is no cell, and none could be evicted.
    NoCell,
    /// The hint table has no place for this key.
    NoHint,
    /// The namespace has used up its quota with blocks that are in use.
    OverQuota,
}

/// What a cell is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// The block.
    Bytes,
    /// A reference to it.
    Reference,
}

impl Form {
    fn stored_bytes(self, len_bytes: u64) -> u64 {
        match self {
            Form::Bytes => len_bytes,
            Form::Reference => REFERENCE_BYTES,
        }
    }
}

/// What became of a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// Every host can pull it.
    Stored,
    /// It was there before, or somebody else is just writing it.
    Exists,
    /// It was there, and is about to go.
    Busy,
}

/// A cell that this process may fill: visible to all as WRITING, served to nobody. Dropping it gives it up.
///
/// Whoever writes into it by address, or lets a device do so, must have stopped before it is committed or dropped.
pub struct Reservation {
    inner: Arc<Inner>,
    /// Shared by the reservations of a batch; while it is alive the host does not say that it has ended its work.
    op: Arc<HeldOp>,
    cell: u64,
    offset: u64,
    descriptor: Descriptor,
    parent: Option<[u8; 16]>,
    /// When it was reserved, on this host's clock.
    since_ns: u64,
    /// Checksum of the whole payload, once it is known.
    checksum: Option<u64>,
    form: Form,
    open: bool,
}

impl Inner {
    /// Reserves a cell for each wish; the answers come in the same order. Lines of a batch share their fences.
    pub(super) fn reserve(self: &Arc<Self>, wishes: &[Wish], form: Form) -> Result<Vec<Reserved>> {
        for wish in wishes {
            self.check_wish(wish, form)?;
        }
        // A fence that this host has not noticed yet is seen at X, before any byte of payload.
        let op = Arc::new(self.work_held()?);
        let mut answers: Vec<Option<Reserved>> = wishes.iter().map(|_| None).collect();
        self.skip_known(wishes, &mut answers)?;
        let mut begun = self.take_cells(wishes, form, &mut answers, &op)?;
        point!("cache.reserve");
        if begun.is_empty() {
            return Ok(answers.into_iter().flatten().collect());
        }
        for (_, reservation) in &begun {
            self.lines().write(reservation.cell, reservation.descriptor)?;
        }
        self.lines().fence_published();
        point!("cache.writing");
        self.hint_all(wishes, &mut begun, &mut answers)?;
        point!("cache.hinted_all");
        // X: after WRITING is there for everybody, before the first byte of payload.
        if !mutant!("cache.no_fence_check_before_payload") {
            op.check_fences()?;
        }
        point!("cache.may_write");
        for (index, reservation) in begun {
            answers[index] = Some(Reserved::Cell(reservation));
        }
        Ok(answers.into_iter().flatten().collect())
    }

    fn check_wish(&self, wish: &Wish, form: Form) -> Result<()> {
        if wish.len_bytes == 0 {
            return Err(Error::Invalid("a block has at least one byte".into()));
        }
        if self.class_of(wish, form).is_none() {
            let most = self.geometry().cells.iter().map(|class| class.cell_bytes).max().unwrap_or(0);
            return Err(Error::Invalid(format!(
                "a block of {} bytes does not fit the largest cell of {most} bytes: format the pool with larger cells",
                wish.len_bytes
            )));
        }
        Ok(())
    }

    /// The class of the smallest cells that hold a block.
    pub(super) fn class_holding(&self, len_bytes: u64) -> Option<usize> {
        self.geometry().cells.iter().position(|class| class.chunks > 0 && class.cell_bytes >= len_bytes && len_bytes <= u64::from(u32::MAX))
    }

    fn class_of(&self, wish: &Wish, form: Form) -> Option<usize> {
        self.class_holding(form.stored_bytes(wish.len_bytes)).filter(|_| wish.len_bytes <= u64::from(u32::MAX))
    }

    /// Blocks of a batch that are there are seen without a cell, a lock or a published line. A single block is only looked for where this
    /// process met it: whoever publishes one has mostly just found out that it is not there, and the insert looks anyway.
    fn skip_known(&self, wishes: &[Wish], answers: &mut [Option<Reserved>]) -> Result<()> {
        if let [wish] = wishes {
            if self.is_where_it_was(wish.namespace, wish.key)? {
                answers[0] = Some(Reserved::Exists);
            }
            return Ok(());
        }
        let mut index = 0;
        for group in wishes.chunk_by(|a, b| a.namespace == b.namespace) {
            let keys: Vec<BlockKey> = group.iter().map(|wish| wish.key).collect();
            self.look_up_all(group[0].namespace, &keys, |found| {
                if found.is_some() {
                    answers[index] = Some(Reserved::Exists);
                }
                index += 1;
                true
            })?;
        }
        Ok(())
    }

    /// Takes a cell for every wish that has no answer yet.
    fn take_cells(
        self: &Arc<Self>,
        wishes: &[Wish],
        form: Form,
        answers: &mut [Option<Reserved>],
        op: &Arc<HeldOp>,
    ) -> Result<Vec<(usize, Reservation)>> {
        let mut wanted: Vec<Vec<usize>> = vec![Vec::new(); self.geometry().cells.len()];
        // What this batch is going to take, which no share tells yet.
        let mut taking: HashMap<Namespace, u64> = HashMap::new();
        for (index, wish) in wishes.iter().enumerate() {
            if answers[index].is_some() {
                continue;
            }
            let Some(class) = self.class_of(wish, form) else { continue };
            let bytes = taking.get(&wish.namespace).copied().unwrap_or(0) + self.geometry().cells[class].cell_bytes;
            if self.within_quota(wish.namespace, bytes)? {
                taking.insert(wish.namespace, bytes);
                wanted[class].push(index);
            } else {
                answers[index] = Some(Reserved::OverQuota);
            }
        }
        let mut begun = Vec::new();
        let since_ns = self.host.platform().now_ns();
        for (class, indexes) in wanted.iter().enumerate().filter(|(_, indexes)| !indexes.is_empty()) {
            let cells = self.obtain(class, indexes.len())?;
            for (position, &index) in indexes.iter().enumerate() {
                let (Some(&cell), wish) = (cells.get(position), &wishes[index]) else {
                    answers[index] = Some(Reserved::NoCell);
                    continue;
                };
                let content =
                    Descriptor { len_bytes: wish.len_bytes as u32, key: wish.key.0, namespace: wish.namespace.0, ..Descriptor::default() };
                begun.push((
                    index,
                    Reservation {
                        inner: self.clone(),
                        op: op.clone(),
                        cell,
                        offset: self.lines().layout().cell(cell)?.0,
                        descriptor: self.stamped(op.incarnation(), Descriptor::WRITING, content),
                        parent: wish.parent.map(|parent| parent.0),
                        since_ns,
                        checksum: None,
                        form,
                        open: true,
                    },
                ));
            }
        }
        Ok(begun)
    }

    /// Inserts the hints of a batch, one stripe after the other; wishes that cannot be fulfilled get their answer and lose their cell.
    fn hint_all(&self, wishes: &[Wish], begun: &mut Vec<(usize, Reservation)>, answers: &mut [Option<Reserved>]) -> Result<()> {
        let mut homes: Vec<(Home, usize)> =
            begun.iter().enumerate().map(|(at, (index, _))| (self.home(wishes[*index].namespace, wishes[*index].key), at)).collect();
        homes.sort_by_key(|(home, at)| (home.stripe, *at));
        let mut refused = Vec::new();
        for group in homes.chunk_by(|a, b| a.0.stripe == b.0.stripe) {
            let _guard = self.lock_stripe(&group[0].0)?;
            for (home, at) in group {
                let (index, reservation) = &begun[*at];
                let wish = &wishes[*index];
                match self.insert(home, wish.namespace, wish.key, reservation.cell)? {
                    Inserted::Done => self.guesses.put(home, reservation.cell),
                    Inserted::Exists => refused.push((*at, Reserved::Exists)),
                    Inserted::Busy => refused.push((*at, Reserved::Busy)),
                    Inserted::Full => refused.push((*at, Reserved::NoHint)),
                }
            }
        }
        refused.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        for (at, answer) in refused {
            let (index, reservation) = begun.remove(at);
            answers[index] = Some(answer);
            drop(reservation);
        }
        Ok(())
    }

    /// Cells of a class for blocks: free ones, else a chunk more, else by eviction. Fewer than `count` when there are no more.
    fn obtain(&self, class: usize, count: usize) -> Result<Vec<u64>> {
        let mut cells = Vec::with_capacity(count);
        self.take_usable(class, count, &mut cells)?;
        let result = self.obtain_more(class, count, &mut cells);
        if result.is_err() {
            let mut own = held(&self.cells);
            cells.iter().for_each(|&cell| own.set_free(cell));
        }
        result.map(|()| cells)
    }

    fn obtain_more(&self, class: usize, count: usize, cells: &mut Vec<u64>) -> Result<()> {
        while cells.len() < count && self.may_claim(class) {
            if !self.claim_chunk(class)? {
                self.has_exhausted(class, true);
                break;
            }
            self.take_usable(class, count, cells)?;
        }
        while cells.len() < count {
            self.evict(class, count - cells.len())?;
            // Once more only where what was evicted cannot be used, which is so once for each cell.
            if !self.take_usable(class, count, cells)? {
                break;
            }
        }
        if cells.len() < count {
            self.ask_for_room(class)?;
        }
        Ok(())
    }

    /// Takes free cells until there are `count`. Those in memory that was marked bad are set aside: a block would be lost there, and each
    /// of its publishes fail. True when there were any.
    fn take_usable(&self, class: usize, count: usize, cells: &mut Vec<u64>) -> Result<bool> {
        let mut were_bad = false;
        loop {
            let had = cells.len();
            held(&self.cells).take_free(class, count.saturating_sub(had), cells);
            let (mut at, mut any_bad) = (had, false);
            while let Some(&cell) = cells.get(at) {
                let (offset, len_bytes) = self.lines().layout().cell(cell)?;
                if matches!(self.lines().memory().check(offset, len_bytes), Err(Error::Poisoned { .. })) {
                    held(&self.cells).set_bad(cells.swap_remove(at));
                    any_bad = true;
                } else {
                    at += 1;
                }
            }
            were_bad |= any_bad;
            if !any_bad {
                return Ok(were_bad);
            }
        }
    }

    /// Publishes READY for several filled reservations with one fence.
    pub(super) fn commit(&self, reservations: Vec<Reservation>) -> Result<()> {
        let Some(first) = reservations.first() else { return Ok(()) };
        first.op.check_noticed()?;
        let mut ready = Vec::with_capacity(reservations.len());
        for reservation in &reservations {
            let mut line = Descriptor { state: Descriptor::READY, ..reservation.descriptor };
            if let Some(checksum) = reservation.checksum {
                let kind = if reservation.form == Form::Reference { Descriptor::REFERENCE } else { Descriptor::XXH3 };
                (line.kind, line.checksum) = (kind, checksum);
            }
            point!("cache.commit");
            self.lines().write(reservation.cell, line)?;
            ready.push(line);
        }
        self.lines().fence_published();
        point!("cache.ready");
        // READY of a fenced incarnation is void: this look only saves the caller from believing what nobody else does. Written, then
        // checked (I6): if it comes out clean, the block was there for everybody.
        let op = first.op.clone();
        if let Err(error) = op.check_fences() {
            // What the cells are is read anew after the re-join.
            reservations.into_iter().for_each(|mut reservation| reservation.open = false);
            return Err(error);
        }
        let tick = self.clock_now();
        let now_ns = self.host.platform().now_ns();
        let mut changes = Vec::new();
        for (mut reservation, line) in reservations.into_iter().zip(ready) {
            reservation.open = false;
            self.metrics.publish_seconds.observe(now_ns.saturating_sub(reservation.since_ns));
            held(&self.cells).set_ready(reservation.cell, line, reservation.parent, Place::Young, tick)?;
            changes.push(Change::Stored {
                key: BlockKey(line.key),
                parent: reservation.parent.map(BlockKey),
                namespace: Namespace(line.namespace),
                cell: reservation.cell,
                len_bytes: line.len_bytes.into(),
            });
        }
        for change in &changes {
            if let Change::Stored { len_bytes, .. } = change {
                self.metrics.publish_bytes_total.add(*len_bytes);
                self.metrics.block_bytes.observe(*len_bytes);
            }
        }
        self.metrics.publish_total.add(changes.len() as u64);
        self.events.emit_all(changes);
        Ok(())
    }

    /// Gives a reserved cell up. Every writer of it has stopped.
    fn abort(&self, reservation: &Reservation) -> Result<()> {
        reservation.op.check_fences()?;
        point!("cache.abort");
        let free = self.stamped(reservation.op.incarnation(), Descriptor::FREE, Descriptor::default());
        self.lines().publish(reservation.cell, free)?;
        point!("cache.aborted");
        held(&self.cells).set_free(reservation.cell);
        self.metrics.publish_aborted_total.inc();
        Ok(())
    }
}

impl Reservation {
    /// Length of the block in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.descriptor.len_bytes.into()
    }

    /// Pool offset of the block's first byte.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The cell.
    pub fn cell(&self) -> u64 {
        self.cell
    }

    /// Its key.
    pub fn key(&self) -> BlockKey {
        BlockKey(self.descriptor.key)
    }

    /// Where this process maps the block, for those who fill it in place; `None` where there is no mapping. What is written here must be
    /// past the caches before the commit: [`Reservation::flush`].
    pub fn address(&self) -> Option<NonNull<u8>> {
        self.inner.lines().memory().address(self.offset, self.len_bytes())
    }

    /// Writes what was stored in place out of this host's caches.
    pub fn flush(&self) -> Result<()> {
        let memory = self.inner.lines().memory();
        memory.flush_range(self.offset, self.len_bytes())?;
        memory.fence_all();
        Ok(())
    }

    /// Fills the whole block from pieces that follow one another, and computes its checksum if the cache is configured so.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the pieces are not as long as the block; the errors of the memory.
    pub fn fill<'m>(&mut self, pieces: impl IntoIterator<Item = &'m [u8]>) -> Result<()> {
        self.fill_from(WriteList::gather(self.offset, pieces))
    }

    /// As [`Reservation::fill`], by address.
    ///
    /// # Safety
    /// Until this returns each range may be read, nobody writes to it, and it is not memory of the pool, but for a
    /// [region](super::lent) of this process.
    pub unsafe fn fill_raw(&mut self, pieces: impl IntoIterator<Item = LocalRange>) -> Result<()> {
        let mut list = WriteList::new();
        let mut at = self.offset;
        for piece in pieces {
            // SAFETY: as this function demands.
            unsafe { list.push_raw(at, piece) };
            at = at.saturating_add(piece.len_bytes as u64);
        }
        self.fill_from(list)
    }

    fn fill_from(&mut self, list: WriteList<'_>) -> Result<()> {
        Self::fill_each(std::slice::from_mut(self), std::slice::from_ref(&list))
    }

    fn not_as_long(&self, given_bytes: u64) -> Error {
        Error::Invalid(format!("the pieces have {given_bytes} bytes together, the block {}: give all of it, in order", self.len_bytes()))
    }

    /// Fills whole blocks of one cache from one list each, with one store fence behind all of them.
    pub(super) fn fill_each(reservations: &mut [Reservation], lists: &[WriteList<'_>]) -> Result<()> {
        let Some(inner) = reservations.first().map(|first| first.inner.clone()) else { return Ok(()) };
        for (reservation, list) in reservations.iter().zip(lists) {
            if !Arc::ptr_eq(&inner, &reservation.inner) {
                return Err(Error::Invalid("the reservations are of several caches: fill those of each by themselves".into()));
            }
            if list.len_bytes() != reservation.len_bytes() {
                return Err(reservation.not_as_long(list.len_bytes()));
            }
        }
        let checksum = if inner.config.checksums { Checksum::Xxh3 } else { Checksum::Off };
        let outcomes = inner.engine.publish_each(&**inner.lines().memory(), lists, checksum);
        let mut filled = Ok(());
        for (reservation, outcome) in reservations.iter_mut().zip(outcomes) {
            // Every one of them is noted, whatever became of those before.
            match reservation.noted(outcome) {
                Ok(checksum) => reservation.checksum = checksum,
                Err(error) => filled = filled.and(Err(error)),
            }
        }
        point!("cache.filled");
        filled
    }

    /// Fills the cell with a reference to the block, which has been asked for that.
    pub(super) fn refer(&mut self, reference: &[u8; REFERENCE_BYTES as usize]) -> Result<()> {
        self.checksum = self.copy(&WriteList::gather(self.offset, [&reference[..]]), Checksum::Xxh3)?;
        Ok(())
    }

    /// Fills a part of the block, `at` bytes in. A block that is filled in parts has no checksum.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when the part does not lie inside the block; the errors of the memory.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let (len_bytes, limit_bytes) = (bytes.len() as u64, self.len_bytes());
        if at.checked_add(len_bytes).is_none_or(|end| end > limit_bytes) {
            return Err(Error::OutOfRange { what: "part of a block", offset: at, len_bytes, limit_bytes });
        }
        self.checksum = None;
        let list = WriteList::gather(self.offset + at, [bytes]);
        self.copy(&list, Checksum::Off)?;
        Ok(())
    }

    fn copy(&mut self, list: &WriteList<'_>, checksum: Checksum) -> Result<Option<u64>> {
        let outcome = self.inner.engine.publish(&**self.inner.lines().memory(), list, checksum);
        self.noted(outcome)
    }

    /// What is to be done about the outcome of a copy.
    fn noted(&mut self, outcome: Outcome) -> Outcome {
        if matches!(outcome, Err(Error::Timeout { .. })) {
            // A device may still write to the cell. It stays reserved, and this process's work unended, until the process ends and its
            // device contexts with it: only then may anybody use the cell again (CACHE.md C20).
            self.open = false;
            std::mem::forget(self.op.clone());
        }
        outcome
    }

    /// Makes the block visible to every host.
    ///
    /// # Errors
    /// [`Error::Fenced`]: it is not visible, unless it was for a moment.
    pub fn commit(self) -> Result<()> {
        let inner = self.inner.clone();
        inner.commit(vec![self])
    }

    /// Gives the cell up, as dropping does, and says whether that worked.
    pub fn abort(mut self) -> Result<()> {
        self.open = false;
        self.inner.clone().abort(&self)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.open {
            // Fenced: the cell is read anew after the re-join. A device that is gone: with the pool.
            let _ = self.inner.clone().abort(self);
        }
    }
}
