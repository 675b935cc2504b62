// SPDX-License-Identifier: Apache-2.0
//! Everything but the lines of chunks, cells and hints, fetched once, with what follows from it: who is in charge, who holds which slot and
//! which lock.

use super::report::{Finding, FindingPlace, Remedy, Report, Severity, Write};
use crate::error::{Error, Result};
use crate::line::Lines;
use crate::media::*;
use crate::platform::MachineId;
use bytemuck::Zeroable;

/// Lines fetched in one batch.
const BATCH: u64 = 256;

/// Fetches `indexes` of `T`'s region one by one into `each`; a line whose memory fails is reported like a bad one.
pub(super) fn scan<T: MediaLine>(
    lines: &Lines,
    indexes: std::ops::Range<u64>,
    mut each: impl FnMut(u64, std::result::Result<T, String>),
) -> Result<()> {
    let mut fetched: Vec<Result<T>> = Vec::with_capacity(BATCH as usize);
    let mut next = indexes.start;
    while next < indexes.end {
        let batch: Vec<u64> = (next..indexes.end.min(next + BATCH)).collect();
        next += batch.len() as u64;
        if lines.fetch_many(&batch, &mut fetched).is_err() {
            // Poison or loss ends a whole batch; line by line it is only the line itself.
            fetched = batch.iter().map(|&index| lines.fetch(index)).collect();
        }
        for (index, line) in batch.iter().zip(fetched.drain(..)) {
            match line {
                Ok(line) => each(*index, Ok(line)),
                Err(Error::BadLine { reason, .. }) => each(*index, Err(reason.into())),
                Err(error @ (Error::Poisoned { .. } | Error::DeviceLost { .. })) => each(*index, Err(error.to_string())),
                Err(other) => return Err(other),
            }
        }
    }
    Ok(())
}

/// The lines of one region; `None` where a line does not verify.
pub(super) struct Table<T> {
    pub cells: Vec<Option<T>>,
    /// Lines that do not verify, and why.
    pub bad: Vec<(u64, String)>,
}

impl<T: MediaLine> Table<T> {
    fn load(lines: &Lines) -> Result<Self> {
        let count = lines.layout().span(T::REGION).lines;
        let mut table = Table { cells: Vec::with_capacity(count as usize), bad: Vec::new() };
        scan::<T>(lines, 0..count, |index, line| match line {
            Ok(line) => table.cells.push(Some(line)),
            Err(reason) => {
                table.cells.push(None);
                table.bad.push((index, reason));
            }
        })?;
        Ok(table)
    }

    /// Line `index`, if it verifies.
    pub fn get(&self, index: u64) -> Option<&T> {
        self.cells.get(index as usize)?.as_ref()
    }

    /// Every line that verifies.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.cells.iter().enumerate().filter_map(|(index, cell)| Some((index as u64, cell.as_ref()?)))
    }
}

/// A manager register: its copies, and the one that counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Register<T> {
    /// The copy with the highest tag among those that verify; an empty line when no seat ever wrote one.
    pub best: T,
    pub seat: u64,
    /// A copy that does not verify could have a higher tag.
    pub hidden: bool,
}

pub(super) struct View<'a> {
    pub lines: &'a Lines,
    pub geometry: Geometry,
    /// Seats that the superblock gives to machines.
    pub fixed_seats: &'a [MachineId],
    pub seats: Table<Seat>,
    pub grants: Table<GrantLine>,
    pub bindings: Table<Binding>,
    pub fences: Table<FenceLine>,
    pub deaths: Table<DeathLine>,
    pub boxes: Table<JoinBox>,
    pub identities: Table<Identity>,
    pub summaries: Table<Summary>,
    pub requests: Table<RequestLine>,
    pub intents: Table<Intent>,
    pub records: Table<Record>,
    pub claims: Table<Claim>,
    pub free_boxes: Table<FreeBox>,
    pub free_acks: Table<FreeAck>,
    pub stats: Table<StatsLine>,
    pub cell_claims: Table<CellClaim>,
    pub asks: Table<Ask>,
    pub splitters: Table<Splitter>,
    pub claimants: Table<Claimant>,
    pub seat_claims: Table<SeatClaim>,
    pub decided_grants: Vec<Register<GrantLine>>,
    pub decided_bindings: Vec<Register<Binding>>,
    /// What counts for each seat; `seat` is the place of the copy.
    pub decided_seats: Vec<Register<SeatClaim>>,
    /// Fenced and dead incarnation of each slot, over all rows that verify.
    pub fenced: Vec<u32>,
    pub dead: Vec<u32>,
    /// Highest incarnation in any copy of each slot's binding: a stale manager's undecided binding may be above the decided one.
    pub highest_bound: Vec<u32>,
}

impl<'a> View<'a> {
    pub fn load(lines: &'a Lines, fixed_seats: &'a [MachineId]) -> Result<Self> {
        let geometry = *lines.layout().geometry();
        let mut view = View {
            lines,
            geometry,
            fixed_seats,
            seats: Table::load(lines)?,
            grants: Table::load(lines)?,
            bindings: Table::load(lines)?,
            fences: Table::load(lines)?,
            deaths: Table::load(lines)?,
            boxes: Table::load(lines)?,
            identities: Table::load(lines)?,
            summaries: Table::load(lines)?,
            requests: Table::load(lines)?,
            intents: Table::load(lines)?,
            records: Table::load(lines)?,
            claims: Table::load(lines)?,
            free_boxes: Table::load(lines)?,
            free_acks: Table::load(lines)?,
            stats: Table::load(lines)?,
            cell_claims: Table::load(lines)?,
            asks: Table::load(lines)?,
            splitters: Table::load(lines)?,
            claimants: Table::load(lines)?,
            seat_claims: Table::load(lines)?,
            decided_grants: Vec::new(),
            decided_bindings: Vec::new(),
            decided_seats: Vec::new(),
            fenced: vec![0; geometry.slots as usize],
            dead: vec![0; geometry.slots as usize],
            highest_bound: vec![0; geometry.slots as usize],
        };
        view.decided_grants = view.decide(&view.grants, geometry.grant_lines(), |line| line.tag);
        view.decided_bindings = view.decide(&view.bindings, geometry.bindings(), |line| line.tag);
        view.decided_seats = (0..geometry.all_seats()).map(|seat| view.decide_seat(seat)).collect();
        for slot in 0..geometry.slots as usize {
            let (line, place) = (slot as u64 / SLOTS_PER_FENCE as u64, slot % SLOTS_PER_FENCE);
            for seat in 0..geometry.all_seats() {
                let row = seat * geometry.fence_lines() + line;
                view.fenced[slot] = view.fenced[slot].max(view.fences.get(row).map_or(0, |row| row.fenced[place]));
                view.dead[slot] = view.dead[slot].max(view.deaths.get(row).map_or(0, |row| row.dead[place]));
                let bound = view.bindings.get(seat * geometry.bindings() + slot as u64).map_or(0, |copy| copy.incarnation);
                view.highest_bound[slot] = view.highest_bound[slot].max(bound);
            }
        }
        Ok(view)
    }

    fn decide<T: MediaLine>(&self, table: &Table<T>, per_seat: u64, tag: impl Fn(&T) -> u32) -> Vec<Register<T>> {
        (0..per_seat)
            .map(|line| {
                let mut register = Register { best: T::zeroed(), seat: 0, hidden: false };
                for seat in 0..self.geometry.all_seats() {
                    if let Some(copy) = table.get(seat * per_seat + line)
                        && tag(copy) > tag(&register.best)
                    {
                        (register.best, register.seat) = (*copy, seat);
                    }
                }
                register.hidden = (0..self.geometry.all_seats()).any(|seat| {
                    let is_bad = table.get(seat * per_seat + line).is_none();
                    is_bad && !self.is_outvoted(seat, tag(&register.best))
                });
                register
            })
            .collect()
    }

    fn decide_seat(&self, seat: u64) -> Register<SeatClaim> {
        if let Some(slot) = self.geometry.slot_of(seat) {
            // With the slot, and so without a vote of its own.
            let Register { best, seat, hidden } = &self.decided_bindings[slot as usize];
            let best = SeatClaim { generation: best.incarnation, machine: best.machine, ..SeatClaim::default() };
            return Register { best, seat: *seat, hidden: *hidden };
        }
        let copy = |place: u64| self.seat_claims.get(place * u64::from(self.geometry.seats) + seat);
        let places = 0..self.geometry.places();
        let newest = places.clone().filter_map(|place| Some((place, *copy(place)?))).max_by_key(|(_, copy)| copy.tag);
        let (place, best) = newest.unwrap_or((0, SeatClaim::zeroed()));
        // A place writes no tag above its newest ballot.
        let outvoted = |place| self.claimants.get(place).is_some_and(|line| line.ballot < best.tag || line.ballot == 0);
        Register { best, seat: place, hidden: places.into_iter().any(|place| copy(place).is_none() && !outvoted(place)) }
    }

    /// Whether whatever stands in a copy of `seat` has a lower tag than `tag`: a seat writes no tag above the epoch it claimed last.
    pub fn is_outvoted(&self, seat: u64, tag: u32) -> bool {
        self.seats.get(seat).is_some_and(|line| line.epoch < tag || line.epoch == 0)
    }

    /// The incarnation that counts for a slot; 0 = never bound.
    pub fn bound(&self, slot: u64) -> u32 {
        self.decided_bindings.get(slot as usize).map_or(0, |register| register.best.incarnation)
    }

    /// True when the slot was never bound, whatever a copy that does not verify may hold.
    pub fn is_never_bound(&self, slot: u64) -> bool {
        let register = self.decided_bindings.get(slot as usize);
        register.is_some_and(|register| !register.hidden && register.best.incarnation == 0) && self.highest_bound[slot as usize] == 0
    }

    /// The machine of a seat: fixed by the superblock, or voted.
    pub fn seat_machine(&self, seat: u64) -> Option<MachineId> {
        let fixed = self.fixed_seats.get(seat as usize).filter(|machine| !machine.is_none());
        let bound = || {
            let register = self.decided_seats.get(seat as usize)?;
            (register.best.generation != 0).then_some(MachineId(register.best.machine))
        };
        fixed.copied().or_else(bound)
    }

    /// The grant that counts for a lock.
    pub fn grant(&self, lock: u32) -> Grant {
        let line = self.decided_grants.get(lock as usize / LOCKS_PER_GRANT);
        line.map_or(Grant::default(), |line| line.best.grants[lock as usize % LOCKS_PER_GRANT])
    }

    /// The newest copy of a record and its slot, among those that verify; `None` when it was never written.
    pub fn best_record(&self, number: u64) -> Option<(u64, Record)> {
        let copies = (0..u64::from(self.geometry.slots)).filter_map(|slot| {
            let copy = self.records.get(slot * self.geometry.records() + number)?;
            (copy.grant != 0).then_some((slot, *copy))
        });
        copies.max_by_key(|(_, copy)| (copy.grant, copy.version))
    }

    /// The request of a slot for a lock, and the incarnation that made it.
    pub fn request(&self, slot: u64, lock: u32) -> Option<(u32, Request)> {
        let line = self.requests.get(slot * self.geometry.request_lines() + u64::from(lock) / LOCKS_PER_REQUEST as u64)?;
        Some((line.incarnation, line.requests[lock as usize % LOCKS_PER_REQUEST]))
    }

    /// Whether the last grant of a lock is this slot's and not given back.
    pub fn is_held(&self, slot: u64, lock: u32) -> bool {
        let grant = self.grant(lock);
        grant.number != 0
            && u64::from(grant.slot) == slot
            && self.request(slot, lock).is_some_and(|(incarnation, request)| {
                incarnation == grant.incarnation && request.number as u16 == grant.request && request.flags & Request::WANT != 0
            })
    }

    /// Whether incarnation `incarnation` of a slot is fenced by any row that verifies.
    pub fn is_fenced(&self, slot: u64, incarnation: u32) -> bool {
        self.fenced.get(slot as usize).is_some_and(|fenced| *fenced >= incarnation)
    }

    /// Whether a pull may take this descriptor: complete, by an incarnation that no row fences.
    pub fn is_served(&self, line: &Descriptor) -> bool {
        line.state == Descriptor::READY && !self.is_fenced(line.owner.into(), line.incarnation)
    }

    /// Whether it is proven that (slot, incarnation) writes nothing any more.
    pub fn is_proven_dead(&self, slot: u64, incarnation: u32) -> bool {
        self.dead.get(slot as usize).is_some_and(|dead| *dead >= incarnation)
            || self.identities.get(slot).is_some_and(|identity| {
                identity.drained >= incarnation || (identity.state == Identity::LEFT && identity.incarnation >= incarnation)
            })
    }

    pub fn write<T: MediaLine>(&self, index: u64, value: T) -> Write {
        Write { region: T::REGION, index, line: self.lines.seal(index, value) }
    }
}

pub(super) fn add_finding(
    report: &mut Report,
    severity: Severity,
    rule: &'static str,
    (region, index): (Region, u64),
    meaning: impl Into<String>,
    remedy: Remedy,
) {
    let place = FindingPlace::Lines { region, first: index, count: 1 };
    report.add(Finding { severity, rule, place, meaning: meaning.into(), remedy });
}
