// SPDX-License-Identifier: Apache-2.0
//! Publishing: reserve a cell, fill it, commit (CACHE.md section 4).
//!
//! One fence check carries the safety: the descriptor says WRITING, *then* the own fence is fetched, *then* the first payload byte is
//! written. An adopter does the same the other way round, so either it sees WRITING and leaves the cell alone, or this host sees its fence.

pub(super) mod reservation;

use super::policy::QueueEnd;
use super::{BlockKey, Cache, Inner, Namespace};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Op;
use crate::media::{Descriptor, Geometry};
use crate::metrics::RefusalReason;
use reservation::Reservation;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Age of X, the look at the own fence in front of the payload, from which on a commit looks once more, in nanoseconds. READY of a fenced
/// incarnation is void: that look only saves the caller from believing what no other host does, and soon after X it tells nothing new.
const RECENT_NS: u64 = 1_000_000;

/// A block to be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishRequest {
    /// Its namespace.
    pub namespace: Namespace,
    /// Its key.
    pub key: BlockKey,
    /// Key of the block before it in its chain, for policies that look at chains and for listeners; `None` of a first block.
    pub parent: Option<BlockKey>,
    /// Its length in bytes, at least 1 and at most the largest cell.
    pub len_bytes: u64,
}

/// What became of a request.
pub enum Reserved {
    /// A cell to fill.
    Cell(Reservation),
    /// A block of this key is there, or is being written.
    Exists,
    /// A block of this key is there and may be about to go: not published, and perhaps soon not there.
    Busy,
    /// There is no cell, and none could be evicted.
    NoCell,
    /// The hint table has no place for this key, or the lock of its part is blocked by a damaged line.
    NoHint,
    /// The namespace has used up its quota with blocks that are in use.
    OverQuota,
}

/// What became of a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// Every host can pull it.
    Stored,
    /// It was there before, or another process is just writing it.
    Exists,
    /// It was there, and is about to go.
    Busy,
}

impl Inner {
    /// Reserves a cell for each request; the answers come in the same order. Lines of a batch share their fences.
    pub(super) fn reserve(self: &Arc<Self>, requests: &[PublishRequest], is_list: bool) -> Result<Vec<Reserved>> {
        let mut homes = Vec::with_capacity(requests.len());
        for request in requests {
            self.check_request(request)?;
            let home = self.index.home(request.namespace, request.key);
            self.index.locations.prefetch(&home);
            homes.push(home);
        }
        // A fence that this host has not noticed yet is seen at X, before any byte of payload.
        let op = self.store.work()?;
        let mut answers: Vec<Reserved> = requests.iter().map(|_| Reserved::NoCell).collect();
        let asked = requests.iter().zip(&homes).map(|(request, home)| (home, request.namespace, request.key));
        self.index.look_where_they_were(asked, |index| answers[index] = Reserved::Exists)?;
        self.take_cells(requests, &mut answers, &op)?;
        point!("cache.reserve");
        for (index, refusal) in self.announce(&answers, &homes, &op, is_list)? {
            answers[index] = refusal;
        }
        point!("cache.may_write");
        Ok(answers)
    }

    fn check_request(&self, request: &PublishRequest) -> Result<()> {
        if request.len_bytes == 0 {
            return Err(Error::Invalid("a block has at least one byte".into()));
        }
        if self.class_holding(request.len_bytes).is_none() {
            let most = self.geometry().cells.iter().map(|class| class.cell_bytes).max().unwrap_or(0);
            return Err(Error::Invalid(format!(
                "a block of {} bytes does not fit the largest cell of {most} bytes: format the pool with larger cells",
                request.len_bytes
            )));
        }
        Ok(())
    }

    pub(super) fn class_holding(&self, len_bytes: u64) -> Option<usize> {
        self.geometry().cells.iter().position(|class| class.chunks > 0 && class.cell_bytes >= len_bytes && len_bytes <= u64::from(u32::MAX))
    }

    /// A reservation of a cell that is this operation's, for a block, with a new stamp and the promised part of its namespace's quota. It
    /// is not announced yet.
    pub(super) fn begin(
        self: &Arc<Self>,
        request: &PublishRequest,
        (cell, promised_bytes): (u64, u64),
        op: &Op<'_>,
        since_ns: u64,
    ) -> Result<Reservation> {
        let content =
            Descriptor { len_bytes: request.len_bytes as u32, key: request.key.0, namespace: request.namespace.0, ..Descriptor::default() };
        let (offset, _) = self.lines().layout().cell(cell)?;
        // For the reservation, whose drop ends it.
        self.host.inner.count_operation();
        self.store.local.begin_filling(cell / u64::from(self.geometry().cells_per_chunk));
        Ok(Reservation {
            inner: self.clone(),
            incarnation: op.incarnation(),
            cell,
            offset,
            descriptor: self.store.stamp(op.incarnation(), Descriptor::WRITING, content),
            parent: request.parent.map(|parent| parent.0),
            since_ns,
            checksum: None,
            promised_bytes,
            is_in_place: AtomicBool::new(false),
            open: true,
        })
    }

    pub(super) fn commit(&self, reservations: &mut [Reservation]) -> Result<()> {
        let Some(incarnation) = reservations.first().map(|first| first.incarnation) else { return Ok(()) };
        self.host.inner.check_noticed()?;
        if !mutant!("cache.committed_unflushed") {
            reservations.iter().try_for_each(Reservation::flush_stores)?;
        }
        for reservation in reservations.iter_mut() {
            let line = &mut reservation.descriptor;
            line.state = Descriptor::READY;
            if let Some(checksum) = reservation.checksum {
                line.kind = Descriptor::XXH3;
                line.checksum = checksum;
            }
            point!("cache.commit");
            self.lines().write(reservation.cell, *line)?;
        }
        self.lines().fence_published();
        point!("cache.ready");
        let now_ns = self.host.platform().now_ns();
        let is_old = reservations.iter().any(|reservation| now_ns.saturating_sub(reservation.since_ns) > RECENT_NS);
        let looked = if is_old { self.host.inner.check_fences(incarnation) } else { Ok(()) };
        if let Err(fenced @ Error::Fenced { .. }) = looked {
            // The state of the cells is read again after the re-join.
            reservations.iter_mut().for_each(|reservation| reservation.open = false);
            return Err(fenced);
        }
        let tick = self.store.clock_now();
        let mut own = self.store.cells();
        // From the end of a chain to its start, so that the start is the younger: without it the rest is of no use.
        for reservation in reservations.iter_mut().rev() {
            reservation.open = false;
            own.set_ready(reservation.cell, reservation.descriptor, reservation.parent, QueueEnd::Young, tick)?;
            if reservation.promised_bytes > 0 {
                own.usage.end_promise(&reservation.descriptor.namespace, std::mem::take(&mut reservation.promised_bytes));
            }
        }
        // Before any thread can take them out again, and tell that.
        self.events.emit_all(reservations.iter().map(Reservation::stored_event));
        drop(own);
        let mut bytes = 0;
        for reservation in reservations.iter() {
            self.metrics.publish_seconds.observe(now_ns.saturating_sub(reservation.since_ns));
            self.metrics.block_bytes.observe(reservation.len_bytes());
            bytes += reservation.len_bytes();
        }
        self.metrics.publish_bytes_total.add(bytes);
        self.metrics.publish_total.add(reservations.len() as u64);
        // Where a fence could not be read they are READY all the same, and this process's to evict.
        looked
    }

    /// Gives a reserved cell up. Every writer of it has stopped.
    pub(super) fn abort(&self, reservation: &Reservation) -> Result<()> {
        // Where that is unknown: FREE of a fenced incarnation is void, and a cell that stays reserved keeps its key for ever.
        if let Err(fenced @ Error::Fenced { .. }) = self.host.inner.check_fences(reservation.incarnation) {
            return Err(fenced);
        }
        reservation.give_up()?;
        point!("cache.abort");
        let free = self.store.stamp(reservation.incarnation, Descriptor::FREE, Descriptor::default());
        self.lines().publish(reservation.cell, free)?;
        point!("cache.aborted");
        self.store.cells().set_free(reservation.cell);
        self.metrics.publish_aborted_total.inc();
        Ok(())
    }
}

impl Cache {
    /// Publishes a block: when it returns, every host can pull it, for as long as this one is not fenced.
    ///
    /// # Errors
    /// [`Error::Full`] when there is no cell or hint for it, or its namespace has no quota left; [`Error::Invalid`] when no cell is
    /// large enough; [`Error::Fenced`]; those of the memory.
    pub fn publish(&self, namespace: Namespace, key: BlockKey, parent: Option<BlockKey>, bytes: &[u8]) -> Result<Published> {
        let mut reservation = match self.reserve(&PublishRequest { namespace, key, parent, len_bytes: bytes.len() as u64 })? {
            Reserved::Cell(reservation) => reservation,
            Reserved::Exists => return Ok(Published::Exists),
            Reserved::Busy => return Ok(Published::Busy),
            Reserved::NoCell => return Err(no_cell(self.inner.geometry())),
            Reserved::NoHint => return Err(no_hint(self.inner.geometry())),
            Reserved::OverQuota => return Err(over_quota(self.inner.config.quota_of(&namespace).unwrap_or(0))),
        };
        reservation.fill([bytes])?;
        self.inner.commit(std::slice::from_mut(&mut reservation))?;
        Ok(Published::Stored)
    }

    /// Reserves a cell for one block.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Fenced`], [`Error::Timeout`] for the lock of a stripe, [`Error::BadLine`] if a damaged line blocks it,
    /// for which a list answers [`Reserved::NoHint`]; those of the memory.
    pub fn reserve(&self, request: &PublishRequest) -> Result<Reserved> {
        Ok(self.reserve_counted(std::slice::from_ref(request), false)?.pop().unwrap_or(Reserved::NoCell))
    }

    /// Reserves cells for several blocks, with shared fences and neighbouring cells; one answer for each request, in order.
    ///
    /// # Errors
    /// As [`Cache::reserve`]; then nothing is reserved.
    pub fn reserve_all(&self, requests: &[PublishRequest]) -> Result<Vec<Reserved>> {
        self.reserve_counted(requests, true)
    }

    fn reserve_counted(&self, requests: &[PublishRequest], is_list: bool) -> Result<Vec<Reserved>> {
        let answers = self.inner.reserve(requests, is_list);
        match &answers {
            Ok(answers) => answers.iter().for_each(|answer| self.count_refused(answer)),
            Err(error) => self.count_failed_requests(error, requests.len()),
        }
        answers
    }

    fn count_refused(&self, answer: &Reserved) {
        let reason = match answer {
            Reserved::Cell(_) => return,
            Reserved::Exists => RefusalReason::Exists,
            Reserved::Busy => RefusalReason::Busy,
            Reserved::NoCell => RefusalReason::PoolFull,
            Reserved::NoHint => RefusalReason::TableFull,
            Reserved::OverQuota => RefusalReason::Quota,
        };
        self.inner.metrics.publish_refused_total.of(reason).inc();
    }

    fn count_failed_requests(&self, error: &Error, requests: usize) {
        let reason = match error {
            Error::Fenced { .. } => RefusalReason::Fenced,
            Error::Invalid(_) => RefusalReason::TooLong,
            _ => RefusalReason::Device,
        };
        self.inner.metrics.publish_refused_total.of(reason).add(requests as u64);
    }

    /// Makes filled reservations of this cache visible to every host, with one fence. A fence of this host within the last millisecond may
    /// go unnoticed: then they are not visible, as after one that comes a moment later.
    ///
    /// # Errors
    /// [`Error::Invalid`] when one of them is another cache's: all of them are given up. [`Error::Fenced`]: none of them is visible, unless
    /// for a moment.
    pub fn commit_all(&self, mut reservations: Vec<Reservation>) -> Result<()> {
        // A cell is a number: that of another pool's cache is a cell of this one's as well.
        if reservations.iter().any(|reservation| !Arc::ptr_eq(&self.inner, &reservation.inner)) {
            return Err(Error::Invalid("a reservation is another cache's: commit it there".into()));
        }
        self.inner.commit(&mut reservations)
    }
}

fn no_cell(geometry: &Geometry) -> Error {
    let advice = "unpin blocks, wait until other hosts make room, or format the pool with more cells";
    Error::Full { what: "the cells that this process can have", limit: geometry.cell_count(), advice }
}

fn no_hint(geometry: &Geometry) -> Error {
    let limit = u64::from(geometry.stripes) * geometry.hint_lines_per_stripe() * crate::media::HINTS_PER_LINE as u64;
    Error::Full { what: "the part of the hint table where this key belongs", limit, advice: "evict blocks" }
}

fn over_quota(limit: u64) -> Error {
    Error::Full { what: "the quota of the namespace", limit, advice: "raise it, or unpin blocks of the namespace" }
}
