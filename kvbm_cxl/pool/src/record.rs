// SPDX-License-Identifier: Apache-2.0
//! Host-owned protected records: class A of protocols/LOCKS.md section 5, the form in which small shared tables survive zombies.
//!
//! Record `r` has a copy per slot, and each host writes its own copy only; the value is the copy with the highest (grant, version).
//! Every write goes through the same four steps, under the lock of the record's [`Structure`]:
//!
//! | step | what | why |
//! |---|---|---|
//! | B1 | publish the intent line: which records are about to be written | a later repair knows what may still surface |
//! | B2 | fetch every fence row of the own slot | a fence seen here means that the repairing holder may have read no intent: stop |
//! | A2 | publish the own copies | |
//! | A3 | fetch every fence row again | a fence seen here means that the successor may have missed the copy: outcome unknown |
//!
//! A fenced host that resumes can therefore only write records that its visible intent names. The next holder seals exactly those: it
//! writes their value again under its own, higher grant, so that anything that still surfaces is outvoted. A seal is written by the same
//! steps as a commit, because its writer can become a zombie as well.

use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Host;
use crate::limits::{INTENT_LINES, INTENTS, MAX_NUMBER};
use crate::line::Lines;
use crate::lock::{LOCK_OBJECTS, LOCK_TABLE, LockGuard, LockId};
use crate::media::{Geometry, Intent, ObjectValue, RECORD_BYTES, Record, Region};
use bytemuck::Zeroable;
use std::ops::Range;

/// A table made of records, with the lock that protects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Structure {
    /// Which locks are allocated.
    LockTable,
    /// The named objects.
    Objects,
}

impl Structure {
    /// The lock under which the structure is written.
    pub fn lock(self) -> LockId {
        match self {
            Structure::LockTable => LOCK_TABLE,
            Structure::Objects => LOCK_OBJECTS,
        }
    }

    /// The records that belong to it.
    pub fn records(self, geometry: &Geometry) -> Range<u64> {
        match self {
            Structure::LockTable => 0..geometry.lock_table_records(),
            Structure::Objects => geometry.lock_table_records()..geometry.records(),
        }
    }

    /// What a repair writes in place of `copy`.
    ///
    /// A commit of several records is published in an order that keeps the structure sound, but a repair reads them one after the other
    /// while zombies still write, some of them seals of older values: what it reads together need not have been there together. An object
    /// cell that it saw empty may therefore lie before a live one that it saw earlier. A tombstone is right in either case.
    fn sound(self, copy: &Record) -> [u8; RECORD_BYTES] {
        let mut value: ObjectValue = bytemuck::cast(copy.data);
        let is_emptied = self == Structure::Objects && copy.grant != 0 && value.state == ObjectValue::EMPTY;
        if is_emptied && !mutant!("objects.seal_keeps_empty") {
            value.state = ObjectValue::TOMB;
        }
        bytemuck::cast(value)
    }

    fn intent_line(self, slot: u64) -> u64 {
        let number = match self {
            Structure::LockTable => 0,
            Structure::Objects => 1,
        };
        slot * INTENTS as u64 + number
    }
}

/// The value of a record and who wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Best {
    /// Number of the record.
    pub number: u64,
    /// Slot whose copy this is; meaningless while `copy.grant` is 0.
    pub slot: u16,
    /// The copy. All zero when the record was never written.
    pub copy: Record,
}

/// What a lock-free reader gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// The value is final: no later holder of the lock can have missed it.
    Final(Best),
    /// Its writer is fenced: a later holder may or may not have seen it. Ask again after a seal, or settle it under the lock.
    Doubtful,
}

/// Chooses the value among the copies of one record, given in the order of their slots.
///
/// # Errors
/// A reason when two slots wrote the same (grant, version): a grant has one holder, so one of the lines is wrong.
fn choose(number: u64, copies: &[Record]) -> std::result::Result<Best, &'static str> {
    let mut best = Best { number, slot: 0, copy: Record::zeroed() };
    for (slot, copy) in copies.iter().enumerate() {
        let age =
            |copy: &Record| if mutant!("record.version_before_grant") { (copy.version, copy.grant) } else { (copy.grant, copy.version) };
        let (new, old) = (age(copy), age(&best.copy));
        if copy.grant != 0 && new == old {
            return Err("two slots wrote the same version under one grant");
        }
        if new > old {
            best = Best { number, slot: slot as u16, copy: *copy };
        }
    }
    Ok(best)
}

/// Fetches every slot's copy of record `number` in one batch.
fn fetch_best(lines: &Lines, number: u64) -> Result<Best> {
    let geometry = lines.layout().geometry();
    let indexes: Vec<u64> = (0..u64::from(geometry.slots)).map(|slot| slot * geometry.records() + number).collect();
    let mut fetched = Vec::with_capacity(indexes.len());
    lines.fetch_many::<Record>(&indexes, &mut fetched)?;
    // A copy that cannot be read may be the highest one, so nothing can be said without it.
    let absent = |copy: Result<Record>| if mutant!("objects.torn_copy_is_absent") { Ok(copy.unwrap_or_default()) } else { copy };
    let copies = fetched.into_iter().map(absent).collect::<Result<Vec<Record>>>()?;
    choose(number, &copies).map_err(|reason| Error::BadLine { region: Region::Record.name(), index: number, reason })
}

/// Reads a record without taking a lock.
///
/// # Errors
/// [`Error::BadLine`] when any slot's copy does not verify; the errors of the memory.
pub fn read(host: &Host, number: u64) -> Result<Reading> {
    let best = fetch_best(host.lines(), number)?;
    if best.copy.grant == 0 || mutant!("reader_no_fence_check") {
        return Ok(Reading::Final(best));
    }
    // Strictly after the copies: an unfenced writer here means that the next holder of the lock will see this copy.
    Ok(if host.is_fenced(best.slot, best.copy.incarnation)? { Reading::Doubtful } else { Reading::Final(best) })
}

/// A structure held under its lock, repaired if that was due.
pub struct Locked<'h> {
    guard: LockGuard<'h>,
    structure: Structure,
}

impl<'h> Locked<'h> {
    /// Acquires the structure's lock and, when a holder before did not end cleanly, seals what that one may still write.
    ///
    /// # Errors
    /// Those of [`Host::acquire`]; [`Error::Fenced`] during the repair, which the next holder then does again.
    pub fn acquire(host: &'h Host, structure: Structure, timeout_ms: u64) -> Result<Self> {
        let guard = host.acquire(structure.lock(), timeout_ms)?;
        let mut locked = Locked { guard, structure };
        if locked.guard.needs_repair() {
            let named = locked.intent_of_holder()?;
            for group in named.chunks(INTENT_LINES) {
                locked.seal_with(group, |best| structure.sound(&best.copy))?;
            }
            point!("record.repaired");
            locked.guard.repaired();
        }
        Ok(locked)
    }

    /// Grant number under which the lock is held; later holders have higher ones.
    pub fn grant(&self) -> u32 {
        self.guard.grant()
    }

    fn host(&self) -> &'h Host {
        self.guard.op().host()
    }

    fn geometry(&self) -> &'h Geometry {
        self.host().lines().layout().geometry()
    }

    /// The records that any slot's intent for this structure names. An intent that cannot be read may name any of them.
    fn intent_of_holder(&self) -> Result<Vec<u64>> {
        let records = self.structure.records(self.geometry());
        let indexes: Vec<u64> = (0..u64::from(self.geometry().slots)).map(|slot| self.structure.intent_line(slot)).collect();
        let mut fetched = Vec::with_capacity(indexes.len());
        self.host().lines().fetch_many::<Intent>(&indexes, &mut fetched)?;
        let mut named = Vec::new();
        for intent in fetched {
            match intent {
                Ok(intent) => named.extend(intent.lines[..intent.count as usize].iter().map(|&line| u64::from(line))),
                Err(Error::BadLine { .. }) => return Ok(records.collect()),
                Err(error) => return Err(error),
            }
        }
        if !named.iter().all(|number| records.contains(number)) {
            return Ok(records.collect());
        }
        named.sort_unstable();
        named.dedup();
        Ok(named)
    }

    /// A1: the value of a record.
    ///
    /// It is the truth for later commits under this guard. A caller that only reports it calls [`Locked::confirm`] first.
    pub fn read(&self, number: u64) -> Result<Best> {
        fetch_best(self.host().lines(), number)
    }

    /// A3 on its own: the values read under this guard were the truth when they were read.
    ///
    /// # Errors
    /// [`Error::Fenced`]: another host may have held the lock meanwhile.
    pub fn confirm(&self) -> Result<()> {
        self.host().check_fences(self.guard.op())
    }

    /// Writes new values; all of them are visible and confirmed when this returns.
    ///
    /// The copies are published in the order given, so that a crash leaves a prefix of them.
    ///
    /// # Errors
    /// [`Error::Fenced`]: the outcome is unknown. [`Error::Full`] when a record has used up its versions.
    pub fn commit(&mut self, changes: &[(Best, [u8; RECORD_BYTES])]) -> Result<()> {
        changes.iter().try_for_each(|(best, _)| self.check_grant(best))?;
        let copies = changes.iter().map(|(best, data)| {
            let version = best.copy.version + 1;
            if version > MAX_NUMBER {
                let advice = "format the pool anew";
                return Err(Error::Full { what: "the version number of a record", limit: MAX_NUMBER.into(), advice });
            }
            Ok((best.number, self.copy(version, *data)))
        });
        let copies = copies.collect::<Result<Vec<_>>>()?;
        self.write(&copies)
    }

    /// Writes the present values of `numbers` again under this guard's grant, so that no copy of an older grant counts any more.
    pub fn seal(&mut self, numbers: &[u64]) -> Result<()> {
        self.seal_with(numbers, |best| best.copy.data)
    }

    fn seal_with(&mut self, numbers: &[u64], data: impl Fn(&Best) -> [u8; RECORD_BYTES]) -> Result<()> {
        if mutant!("no_seal") {
            return Ok(());
        }
        let copies = numbers.iter().map(|&number| {
            // A record that was never written is sealed as well: what this holder takes for absent must not appear later.
            let best = self.read(number)?;
            self.check_grant(&best)?;
            point!("record.sealing");
            Ok((number, self.copy(best.copy.version, data(&best))))
        });
        let copies = copies.collect::<Result<Vec<_>>>()?;
        self.write(&copies)?;
        point!("record.sealed");
        Ok(())
    }

    /// The value of a record, sealed if its writer is fenced, so that lock-free readers can have it again.
    pub fn settle(&mut self, number: u64) -> Result<Best> {
        let best = self.read(number)?;
        if best.copy.grant != 0 && self.host().is_fenced(best.slot, best.copy.incarnation)? {
            self.seal(&[number])?;
        }
        Ok(best)
    }

    /// Refuses a record that a later grant than this one wrote: a copy of this grant would not count, and its writer would not know.
    fn check_grant(&self, best: &Best) -> Result<()> {
        if best.copy.grant <= self.guard.grant() {
            return Ok(());
        }
        // A holder that was fenced may well meet its successor's copy. For any other host it cannot be there.
        self.confirm()?;
        Err(Error::BadLine { region: Region::Record.name(), index: best.number, reason: "written under a grant that is still to come" })
    }

    fn copy(&self, version: u32, data: [u8; RECORD_BYTES]) -> Record {
        Record { crc: 0, grant: self.guard.grant(), version, incarnation: self.guard.op().incarnation(), reserved: 0, data }
    }

    fn write(&mut self, copies: &[(u64, Record)]) -> Result<()> {
        let result = self.write_steps(copies);
        if result.is_err() {
            // Part of it may be published: the next holder of the lock seals what the intent names, this host included.
            self.guard.damaged();
        }
        result
    }

    fn write_steps(&self, copies: &[(u64, Record)]) -> Result<()> {
        let host = self.host();
        let slot = u64::from(host.slot());
        let mut intent = Intent {
            incarnation: self.guard.op().incarnation(),
            lock: self.structure.lock(),
            grant: self.guard.grant(),
            count: copies.len() as u32,
            ..Intent::zeroed()
        };
        if copies.len() > INTENT_LINES {
            return Err(Error::Invalid(format!("{} records in one commit, at most {INTENT_LINES} fit its intent", copies.len())));
        }
        for (place, (number, _)) in intent.lines.iter_mut().zip(copies) {
            *place = *number as u32;
        }
        let late = mutant!("record.intent_after_check");
        if !late && !mutant!("record.no_intent") {
            host.lines().publish(self.structure.intent_line(slot), intent)?;
        }
        point!("record.intent");
        self.confirm()?;
        point!("record.checked");
        if late {
            host.lines().publish(self.structure.intent_line(slot), intent)?;
        }
        if mutant!("check_then_write") {
            self.confirm()?;
        }
        for &(number, copy) in copies {
            host.lines().publish(slot * self.geometry().records() + number, copy)?;
            point!("record.published");
        }
        if mutant!("check_then_write") {
            // The check was made before the write.
        } else if !mutant!("no_fence_check") {
            self.confirm()?;
        }
        point!("record.confirmed");
        // After an error the intent stays: it names too much then, never too little.
        host.lines().publish(self.structure.intent_line(slot), Intent { count: 0, ..intent })?;
        point!("record.intent_emptied");
        Ok(())
    }
}

#[cfg(test)]
mod tests;
